"""Layouts drawn in the terminal: the public functions, and how their parts are put together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.measure import Measurement
from rich.text import Text

from shardwise.arguments import whole_number
from shardwise.geometry import Layout, check_layout
from shardwise.viz.checking import number_or_none
from shardwise.viz.drawing import GAP, Drawing, in_row
from shardwise.viz.legend import Legend
from shardwise.viz.notes import picture_notes
from shardwise.viz.picture import CellRoom, Picture, draw_plane
from shardwise.viz.planes import Plane, Regions, iter_planes, num_planes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import ConsoleOptions, RenderableType

__all__ = ["LayoutDrawing", "draw_layout", "print_layout"]


def draw_layout(
    layout: Layout,
    *,
    title: str | None = None,
    width: int | None = None,
    height: int = 12,
    color: bool = True,
    itemsize: int | None = None,
    world_size: int | None = None,
    max_slices: int = 8,
) -> LayoutDrawing:
    """A picture of `layout` that rich can print, with a legend of its ranks.

    Boxes are to scale and carry their ranks: `0`, replicas `0,1`, pending addends `0+1`. From
    three dims on there is one picture for each slab between cuts of the leading dims, at most
    `max_slices` of them. `itemsize` adds bytes to the legend, `world_size` the ranks below it that
    hold nothing. The picture takes the console's width at most, or `width` if that is less; it
    aims at `height` lines but takes what its cuts need.

    >>> from shardwise.geometry import Box, Layout
    >>> draw_layout(Layout((4,), [Box((0,), (4,))], [0])).layout.shape
    (4,)
    """
    check_layout(layout, "layout")
    return LayoutDrawing(
        layout=layout,
        title=title,
        width=width,
        height=whole_number(height, "height", least=1),
        color=color,
        itemsize=number_or_none(itemsize, "itemsize"),
        world_size=number_or_none(world_size, "world_size"),
        max_slices=whole_number(max_slices, "max_slices", least=1),
    )


def print_layout(
    layout: Layout,
    *,
    console: Console | None = None,
    title: str | None = None,
    width: int | None = None,
    height: int = 12,
    color: bool = True,
    itemsize: int | None = None,
    world_size: int | None = None,
    max_slices: int = 8,
) -> None:
    """Prints `draw_layout` to `console`, by default standard output (plain text in a pipe)."""
    drawing = draw_layout(
        layout,
        title=title,
        width=width,
        height=height,
        color=color,
        itemsize=itemsize,
        world_size=world_size,
        max_slices=max_slices,
    )
    (console or Console(width=width)).print(drawing)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayoutDrawing(Drawing):
    """A layout as a rich renderable, drawn for the console it is printed to."""

    layout: Layout
    height: int
    itemsize: int | None
    world_size: int | None
    max_slices: int

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(repr(self.layout), "dim" if self.title is not None else "")
        legend = Legend.of(self.layout, itemsize=self.itemsize, world_size=self.world_size)
        regions = Regions.of(self.layout)
        if not len(regions):
            yield Text("no elements", "italic")
            yield from _legend_parts(legend, console, options, keyed=False)
            return
        yield from self._picture_parts(regions, legend, console, options)

    def _picture_parts(
        self, regions: Regions, legend: Legend, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Pictures, legend (beside a single narrow picture, else below), then words."""
        planes = list(itertools.islice(iter_planes(regions), self.max_slices))
        room = self._picture_room(options.max_width, len(planes))
        pictures = [draw_plane(plane, room, ascii_only=options.ascii_only) for plane in planes]
        keyed = any(picture.keyed for picture in pictures)
        column = Group(*_with_words(legend.table(0, len(legend.rows), keyed=keyed), legend))
        beside = pictures[0].width + GAP + _width_of(column, console, options) <= options.max_width
        if len(pictures) == 1 and planes[0].name is None and beside:
            yield in_row([pictures[0], column])
        else:
            yield from _flow(planes, pictures, options.max_width)
            if (more := num_planes(regions) - len(planes)) > 0:
                yield Text(f"... and {more:,} more slices", "italic")
            yield from _legend_parts(legend, console, options, keyed=keyed)
        yield from _captions(pictures)
        labels = frozenset[str]().union(*(picture.labels for picture in pictures))
        for note in picture_notes(regions, keyed=keyed, labels=labels):
            yield Text(note, "italic")

    def _picture_room(self, width: int, num_pictures: int) -> CellRoom:
        """Room for one picture: many are smaller, and two stand in a row at least if keyed."""
        if num_pictures == 1:
            return CellRoom(width, keyed_width=width, height=self.height, most_lines=64)
        half = (width - GAP) // 2
        return CellRoom(width, keyed_width=half, height=-(-self.height // 2), most_lines=32)


def _flow(planes: list[Plane], pictures: list[Picture], room: int) -> Iterator[RenderableType]:
    """Rows of titled pictures, as many in a row as fit."""
    row: list[RenderableType] = []
    used = 0
    for plane, picture in zip(planes, pictures, strict=True):
        width = max(picture.width, len(plane.name or "")) + GAP
        if row and used + width - GAP > room:
            yield in_row(row)
            row, used = [], 0
        row.append(Group(Text(plane.name, "bold"), picture) if plane.name else picture)
        used += width
    yield in_row(row)


def _width_of(part: RenderableType, console: Console, options: ConsoleOptions) -> int:
    return Measurement.get(console, options, part).maximum


def _with_words(table: RenderableType, legend: Legend) -> list[RenderableType]:
    return [table, *(Text(words, "italic") for words in legend.words)]


def _legend_parts(
    legend: Legend, console: Console, options: ConsoleOptions, *, keyed: bool
) -> list[RenderableType]:
    """The legend over the whole width, in as many columns as it takes to stay short."""
    count = len(legend.rows)
    if not count:
        return [Text(words, "italic") for words in legend.words]
    width = _width_of(legend.table(0, count, keyed=keyed), console, options) + GAP
    most = max(1, (options.max_width + GAP) // width)
    lines = max(4, -(-count // most))
    starts = range(0, count, lines)
    tables: list[RenderableType] = [
        legend.table(start, min(start + lines, count), keyed=keyed) for start in starts
    ]
    return _with_words(in_row(tables), legend)


def _captions(pictures: list[Picture]) -> Iterator[Text]:
    for caption in dict.fromkeys(picture.caption for picture in pictures):
        if caption is not None:
            yield Text(caption, "italic")
