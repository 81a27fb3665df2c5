"""Layouts drawn in the terminal: the public functions, and how their parts are put together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardwise.arguments import whole_number
from shardwise.errors import ArgumentTypeError
from shardwise.geometry import Layout
from shardwise.viz.colors import NUM_KEYS, sixteen_color_style
from shardwise.viz.legend import Legend
from shardwise.viz.picture import Picture, Room, draw_plane
from shardwise.viz.planes import Plane, Regions, iter_planes, num_planes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import ConsoleOptions, RenderableType, RenderResult

__all__ = ["LayoutDrawing", "draw_layout", "print_layout"]

_LEAST_WIDTH = 40
_GAP = 3  # cells between neighbours

_REDUCED = {
    "sum": "the sum",
    "avg": "the average",
    "max": "the maximum",
    "min": "the minimum",
    "product": "the product",
}
_SIGNS = {  # in labels
    ",": "a,b: the same box on ranks a and b (replicas)",
    "-": "a-c: the same box on ranks a to c (replicas)",
}


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
    if not isinstance(layout, Layout):
        raise ArgumentTypeError(
            "layout",
            expected="a Layout",
            got=type(layout).__name__,
            fix="Call spec.layout(shape) first.",
        )
    if title is not None and not isinstance(title, str):
        raise ArgumentTypeError("title", expected="a str or None", got=type(title).__name__)
    return LayoutDrawing(
        layout,
        title,
        width=None if width is None else whole_number(width, "width", least=_LEAST_WIDTH),
        height=whole_number(height, "height", least=1),
        color=color,
        itemsize=None if itemsize is None else whole_number(itemsize, "itemsize", least=1),
        world_size=None if world_size is None else whole_number(world_size, "world_size", least=1),
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


@dataclass(frozen=True, slots=True, eq=False)
class LayoutDrawing:
    """A layout as a rich renderable, drawn for the console it is printed to."""

    layout: Layout
    title: str | None
    width: int | None
    height: int
    color: bool
    itemsize: int | None
    world_size: int | None
    max_slices: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=self._room(options))
        segments = console.render(Group(*self._parts(console, options)), options)
        if not self.color or console.color_system is None:
            yield from _without_trailing_blanks(segments)
        elif console.color_system in ("standard", "windows"):
            yield from (
                s._replace(style=s.style and sixteen_color_style(s.style)) for s in segments
            )
        else:
            yield from segments

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        options = options.update(width=self._room(options))
        lines = Segment.split_lines(console.render(Group(*self._parts(console, options)), options))
        width = max(map(Segment.get_line_length, lines))
        return Measurement(width, width)

    def _room(self, options: ConsoleOptions) -> int:
        return max(_LEAST_WIDTH, min(options.max_width, self.width or options.max_width))

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.title is not None:
            yield Text(_encodable(self.title, console.encoding), "bold")
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
        beside = pictures[0].width + _GAP + _width_of(column, console, options) <= options.max_width
        if len(pictures) == 1 and planes[0].name is None and beside:
            yield _in_row([pictures[0], column])
        else:
            yield from _flow(planes, pictures, options.max_width)
            if (more := num_planes(regions) - len(planes)) > 0:
                yield Text(f"... and {more:,} more slices", "italic")
            yield from _legend_parts(legend, console, options, keyed=keyed)
        yield from _captions(pictures)
        labels = frozenset[str]().union(*(picture.labels for picture in pictures))
        yield from _notes(regions, keyed=keyed, labels=labels)

    def _picture_room(self, width: int, num_pictures: int) -> Room:
        """Room for one picture: many are smaller, and two stand in a row at least if keyed."""
        if num_pictures == 1:
            return Room(width, keyed_width=width, height=self.height, most_lines=64)
        half = (width - _GAP) // 2
        return Room(width, keyed_width=half, height=-(-self.height // 2), most_lines=32)


def _encodable(text: str, encoding: str) -> str:
    """`text` with escapes for the characters that a console of this encoding cannot print."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _without_trailing_blanks(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The lines as plain text."""
    for line in Segment.split_lines(segments):
        yield Segment("".join(segment.text for segment in line).rstrip())
        yield Segment.line()


def _in_row(parts: list[RenderableType]) -> Table:
    row = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in parts:
        row.add_column(no_wrap=True, overflow="crop")
    row.add_row(*parts)
    return row


def _flow(planes: list[Plane], pictures: list[Picture], room: int) -> Iterator[RenderableType]:
    """Rows of titled pictures, as many in a row as fit."""
    row: list[RenderableType] = []
    used = 0
    for plane, picture in zip(planes, pictures, strict=True):
        width = max(picture.width, len(plane.name or "")) + _GAP
        if row and used + width - _GAP > room:
            yield _in_row(row)
            row, used = [], 0
        row.append(Group(Text(plane.name, "bold"), picture) if plane.name else picture)
        used += width
    yield _in_row(row)


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
    width = _width_of(legend.table(0, count, keyed=keyed), console, options) + _GAP
    most = max(1, (options.max_width + _GAP) // width)
    lines = max(4, -(-count // most))
    starts = range(0, count, lines)
    tables: list[RenderableType] = [
        legend.table(start, min(start + lines, count), keyed=keyed) for start in starts
    ]
    return _with_words(_in_row(tables), legend)


def _captions(pictures: list[Picture]) -> Iterator[Text]:
    for caption in dict.fromkeys(picture.caption for picture in pictures):
        if caption is not None:
            yield Text(caption, "italic")


def _notes(regions: Regions, *, keyed: bool, labels: frozenset[str]) -> Iterator[Text]:
    """What the characters in the picture mean, as far as they occur."""
    layout = regions.layout
    if keyed:
        note = "each character is the key of a rank"
        if len(regions.rows) > len(regions):
            note += "; keys alternate where several ranks hold one box"
        if len(layout.ranks) > NUM_KEYS:
            note += f"; keys repeat after {NUM_KEYS} ranks"
        yield Text(note, "italic")
    for sign, meaning in _SIGNS.items():
        if any(sign in label for label in labels):
            yield Text(meaning, "italic")
    for dots in ("…", ".."):
        if any(label.endswith(dots) for label in labels):
            yield Text(f"a{dots}: on rank a and others", "italic")
    if layout.pending is not None:
        note = f"pending {layout.pending}: the value is {_REDUCED[layout.pending]} of the terms"
        lead = "a+b: a term on rank a and one on rank b; " if any("+" in s for s in labels) else ""
        yield Text(lead + note, "italic")
