"""Draws the pictures of the documents, docs/images/*: `python docs/make_pictures.py`.

The picture of the HTML page is taken by chromium, and left as it is where there is none.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import shardwise
from shardwise.viz import LayoutDrawing, draw_layout, draw_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan

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


def plan() -> TransferPlan:
    """The plan of docs/resharding.md."""
    specs = (shardwise.chunk(0, ranks=range(4)), shardwise.grid([2, 2], ranks=range(4)))
    rows, grid = (spec.layout((8192, 8192)) for spec in specs)
    return shardwise.plan_reshard(rows, grid, itemsize=4)


def slices() -> Layout:
    """A tensor of three dims, of docs/pictures.md."""
    spec = shardwise.grid([2, 2, 2], ranks=[[0, 4], [1, 5], [2, 6], [3, 7], 4, 5, 6, 7])
    return spec.layout((16, 64, 48))


def photograph_page(path: Path) -> None:
    """The page of the plan in a browser, with rank 1 chosen."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print(f"no chromium: {path.name} stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        shardwise.save_picture(plan(), page, title="chunk(0) -> grid([2, 2])")
        words = ["--headless", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,980"]
        words += ["--no-sandbox"] if os.geteuid() == 0 else []  # which root cannot have
        words += [f"--user-data-dir={folder}/profile", f"--screenshot={path}"]
        subprocess.run(
            [chromium, *words, f"{page.as_uri()}#rank=1"], check=True, capture_output=True
        )


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
    drawing = draw_plan(plan(), width=72)
    save("plan", drawing, title="Rows to a 2 x 2 grid, 256 MiB, four ranks", width=74)
    shardwise.save_picture(slices(), IMAGES / "slices.svg", title="A grid of 2 x 2 x 2", itemsize=2)
    shardwise.save_picture(plan(), IMAGES / "reshard.svg", title="chunk(0) -> grid([2, 2])")
    photograph_page(IMAGES / "page.png")


if __name__ == "__main__":
    main()
