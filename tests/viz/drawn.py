"""What the tests of pictures share: layouts to draw, and what a console prints."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console

import shardwise
from shardwise.geometry import Box, Boxes, Layout
from shardwise.geometry.splits import product_boxes
from shardwise.testing.strategies import layouts, shapes
from shardwise.viz import draw_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis import strategies as st
    from rich.console import RenderableType

__all__ = ["PINWHEEL", "any_layout", "drawn", "grid", "in_boxes", "layout_of", "printed"]

PINWHEEL = Layout(
    (6, 6),
    [
        Box((0, 0), (2, 4)),
        Box((0, 4), (4, 6)),
        Box((4, 2), (6, 6)),
        Box((2, 0), (6, 2)),
        Box((2, 2), (4, 4)),
    ],
    range(5),
)


def any_layout(max_size: int, world_size: int, max_ndim: int = 4) -> st.SearchStrategy[Layout]:
    """Layouts of every kind, of tensors with up to so many dims of up to so many elements."""
    return shapes(max_ndim=max_ndim, max_size=max_size).flatmap(
        lambda shape: layouts(shape=shape, world_size=world_size)
    )


def layout_of(text: str, shape: tuple[int, ...], num_ranks: int = 4) -> Layout:
    """What a spec written as text makes of a shape."""
    return shardwise.parse_spec(text, ranks=range(num_ranks), device="cpu").layout(shape)


def grid(cuts: Sequence[Sequence[int] | np.ndarray[Any, Any]], owners: Any, **terms: Any) -> Layout:
    """Layout of a grid; `owners` has one rank a cell or one row of ranks a cell."""
    edges = [np.asarray(cut, dtype=np.int64) for cut in cuts]
    starts, stops = product_boxes([(cut[:-1], cut[1:]) for cut in edges])
    ranks = np.asarray(owners).reshape(len(starts), -1)
    copies = ranks.shape[1]
    boxes = Boxes(np.repeat(starts, copies, axis=0), np.repeat(stops, copies, axis=0))
    return Layout([int(cut[-1]) for cut in edges], boxes, ranks.reshape(-1), **terms)


def printed(drawing: RenderableType, *, width: int = 80, tty: bool = False) -> str:
    """What a console of the given width prints."""
    file = io.StringIO()
    system: Literal["truecolor", "auto"] = "truecolor" if tty else "auto"
    console = Console(
        file=file, width=width, force_terminal=tty, color_system=system, no_color=False
    )
    console.print(drawing)
    return file.getvalue()


def drawn(layout: Layout, *, width: int = 80, tty: bool = False, **options: Any) -> str:
    """What a console of the given width prints of a layout."""
    return printed(draw_layout(layout, **options), width=width, tty=tty)


def in_boxes(text: str, *, slices: bool = False) -> list[str]:
    """What stands between walls: labels of boxes, left to right and top to bottom."""
    if slices:  # offsets of a picture to the right of another
        text = re.sub("([┐┤┘]) +[0-9]+ (?=[┌├└])", r"\1", text)
    parts = [re.split("[│├┤┼┬┴┌┐└┘─|]+", line)[1:-1] for line in text.splitlines()]
    return [part.strip() for line in parts for part in line if part.strip()]
