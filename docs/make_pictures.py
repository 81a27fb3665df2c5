"""Draws docs/images/layouts.svg, the picture in the README: `python docs/make_pictures.py`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

import shardwise
from shardwise.viz import LayoutDrawing, draw_layout

SHAPE = (8, 6)
IMAGES = Path(__file__).parent / "images"

# rich's own template loads a font from the net; this one stands alone.
SVG_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "DejaVu Sans Mono", Menlo, "Liberation Mono", "Courier New", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font: bold 18px Helvetica, Arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
FONT_ASPECT_RATIO = 0.602  # of DejaVu Sans Mono and Menlo


def drawings() -> list[LayoutDrawing]:
    """The four layouts of the README, with their titles."""
    specs = {
        "Rows of chosen sizes; rank 3 has none": "chunk(0, sizes=[4, 1, 3, 0])",
        "A 2 x 2 grid, each box on two ranks": "grid([2, 2], ranks=[[0,4], [1,5], [2,6], [3,7]])",
        "Q, K and V in one weight, each cut": "fused(0, [4, 2, 2], ranks=[0, 1])",
        "Ranges of the flattened tensor": "flat(sizes=[15, 8, 16, 9])",
    }
    return [
        draw_layout(
            shardwise.parse_spec(text, ranks=range(4), device="cpu").layout(SHAPE),
            title=title,
            width=46,
            height=9,
        )
        for title, text in specs.items()
    ]


def main() -> None:
    console = Console(
        record=True,
        width=95,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    page = Table.grid(padding=(1, 4, 0, 0))
    first, second, third, fourth = drawings()
    page.add_row(first, second)
    page.add_row(third, fourth)
    console.print(page)
    svg = console.export_svg(
        title="One (8, 6) tensor, four layouts",
        code_format=SVG_FORMAT,
        font_aspect_ratio=FONT_ASPECT_RATIO,
        unique_id="layouts",
    )
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "layouts.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
