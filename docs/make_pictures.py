"""Draws the pictures of the documents, docs/images/*.svg: `python docs/make_pictures.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import shardwise
from shardwise.viz import LayoutDrawing, PlanDrawing, draw_layout, draw_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def layouts_page() -> Table:
    page = Table.grid(padding=(1, 4, 0, 0))
    first, second, third, fourth = drawings()
    page.add_row(first, second)
    page.add_row(third, fourth)
    return page


def plan_drawing() -> PlanDrawing:
    """The plan of docs/resharding.md."""
    specs = (shardwise.chunk(0, ranks=range(4)), shardwise.grid([2, 2], ranks=range(4)))
    rows, grid = (spec.layout((8192, 8192)) for spec in specs)
    return draw_plan(shardwise.plan_reshard(rows, grid, itemsize=4), width=72)


def save(name: str, page: RenderableType, *, title: str, width: int) -> None:
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    console.print(page)
    svg = console.export_svg(
        title=title,
        code_format=SVG_FORMAT,
        font_aspect_ratio=FONT_ASPECT_RATIO,
        unique_id=name,
    )
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(svg, encoding="utf-8")


def main() -> None:
    save("layouts", layouts_page(), title="One (8, 6) tensor, four layouts", width=95)
    save("plan", plan_drawing(), title="Rows to a 2 x 2 grid, 256 MiB, four ranks", width=74)


if __name__ == "__main__":
    main()
