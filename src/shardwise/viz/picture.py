"""One plane as lines of terminal cells: coloured boxes, walls, labels and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from shardwise.viz.bands import Bands, column_bands, row_bands
from shardwise.viz.colors import rank_keys, rank_style
from shardwise.viz.labels import NUM_LEVELS, box_label

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console, ConsoleOptions, RenderResult

    from shardwise.geometry.box import Ints
    from shardwise.viz.planes import Plane

__all__ = ["CellRoom", "Picture", "draw_plane"]

_WALL, _OUTSIDE = -1, -2  # in arrays of regions
_PLAIN, _TAG = -1, -2  # in arrays of ranks to paint with

# Wall characters by the directions in which a wall leaves the cell: up 1, right 2, down 4, left 8.
_UNICODE_WALLS = np.array(list(" ╵╶└╷│┌├╴┘─┴┐┤┬┼"))
_ASCII_WALLS = np.array(list(" |-+||++-+-+++++"))
_UPRIGHT, _ACROSS = 5, 10

_CELLS_PER_ELEMENT = 3  # of height, at most: small tensors are not blown up beyond this
_LEAST_WIDTH = 12
_MOST_STRIPES = 16
_TICK_STYLE = Style(dim=True)


@dataclass(frozen=True, slots=True)
class CellRoom:
    """How many cells a picture may take."""

    width: int
    keyed_width: int  # where labels find no room
    height: int  # to aim at; the cuts may need more
    most_lines: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Lines of one width, a rich renderable."""

    lines: tuple[tuple[Segment, ...], ...]
    width: int
    labels: frozenset[str]  # written in it; none if one character per cell names a rank
    caption: str | None  # what the picture leaves out

    @property
    def keyed(self) -> bool:
        """Whether keys stand for ranks, as labels had no room."""
        return not self.labels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)


def draw_plane(plane: Plane, room: CellRoom, *, ascii_only: bool) -> Picture:
    """Picture of a plane."""
    num_rows, num_columns = (len(str(size)) for size in plane.shape)
    margin = num_rows + 1 if plane.ndim == 2 else 0
    tail = num_columns - 1 if plane.ndim else 0  # the last offset hangs over the right wall
    wide, keyed = (
        max(width - margin - tail, _LEAST_WIDTH) for width in (room.width, room.keyed_width)
    )
    lines_wanted, cells_wanted = _natural_size(plane, wide, room.height)

    rows = row_bands(plane.cuts(0), target=lines_wanted, most=room.most_lines)
    seen = plane.meeting(rows.points, 0)
    cuts = seen.cuts(1)
    labels: list[list[str]] = []
    if 2 * len(cuts) - 1 <= wide:  # a cell for each piece beside the walls: labels may fit
        labels = [_labels(seen, i, ascii_only) for i in range(len(seen))]
    least = _least_cells(seen, cuts, labels)
    columns = column_bands(cuts, target=cells_wanted, room=wide, keyed_room=keyed, least=least)

    chars, paint, written = _canvas(seen, rows, columns, labels, ascii_only)
    lines = [_segments(*line) for line in zip(chars, paint, strict=True)]
    framed = _with_ticks(plane, rows, columns, lines, margin=margin, tail=tail)
    total = margin + int(columns.lattice_cells.sum()) + tail
    return Picture(framed, total, written, _caption(plane, rows, columns))


def _natural_size(plane: Plane, width: int, height: int) -> tuple[int, int]:
    """Lines and cells that keep the tensor's proportions; a cell is half as wide as it is tall."""
    rows, columns = plane.shape
    scale = min(width / (2 * columns), height / rows, _CELLS_PER_ELEMENT)
    lines = max(min(rows, 3), round(rows * scale)) if plane.ndim == 2 else 1
    return lines, max(_LEAST_WIDTH, round(2 * columns * scale))


# -- labels ----------------------------------------------------------------------------------


def _labels(plane: Plane, index: int, ascii_only: bool) -> list[str]:
    """Labels of one region, the longest first."""
    ranks = plane.regions.ranks_by_term(int(plane.picked[index]))
    labels = [box_label(ranks, level) for level in range(NUM_LEVELS)]
    return [label.replace("…", "..") for label in labels] if ascii_only else labels


def _least_cells(plane: Plane, cuts: Ints, labels: list[list[str]]) -> list[int]:
    """Cells per band that give every label its room: with offsets, then level by level."""
    if not labels:
        return []
    spans = np.searchsorted(cuts, plane.stops[:, 1]) - np.searchsorted(cuts, plane.starts[:, 1])
    least = []
    for level in range(NUM_LEVELS):
        lengths = np.array([len(names[level]) for names in labels])
        # A box over several bands has the cells of the walls between them too.
        least.append(max(1, int((-(-(lengths + 1) // spans) - 1).max())))
    ticks = max(len(str(cut)) for cut in cuts[:-1].tolist()) if plane.ndim else 1
    return [max(least[0], ticks), *least]


# -- cells -----------------------------------------------------------------------------------


def _canvas(
    plane: Plane, rows: Bands, columns: Bands, labels: list[list[str]], ascii_only: bool
) -> tuple[NDArray[np.str_], Ints, frozenset[str]]:
    """Character of each cell, the rank whose colour it has (or _PLAIN or _TAG), and labels."""
    first, last = plane.spans(rows.points, columns.points)
    seen = np.flatnonzero((first < last).all(axis=1)).tolist()
    raster = np.full((len(rows), len(columns)), _OUTSIDE, dtype=np.int64)
    for i in seen:
        raster[first[i, 0] : last[i, 0], first[i, 1] : last[i, 1]] = i

    area, directions = _lattice(raster)
    cells = np.ix_(
        *(np.repeat(np.arange(2 * len(b) + 1), b.lattice_cells) for b in (rows, columns))
    )
    area, chars = area[cells], (_ASCII_WALLS if ascii_only else _UNICODE_WALLS)[directions[cells]]
    paint = _stripes(plane, seen, area, breadth=2 if columns.ruled else 1)
    if not columns.ruled:
        ranks, where = np.unique(paint, return_inverse=True)
        holders = plane.regions.layout.ranks
        keys = np.array(rank_keys(holders))[
            np.searchsorted(holders, ranks).clip(max=len(holders) - 1)
        ]
        chars = np.where(area >= 0, keys[where.reshape(paint.shape)], chars)
        return chars, paint, frozenset()
    insides = (_inside(rows, columns, first[i], last[i]) for i in seen)
    written = {
        _write_label(chars, paint, labels[i], inside)
        for i, inside in zip(seen, insides, strict=True)
    }
    return chars, paint, frozenset(written)


def _lattice(raster: Ints) -> tuple[Ints, Ints]:
    """Regions and wall directions on the lattice of walls (even places) and bands (odd ones).

    Where the same region lies on all sides there is no wall, and the region fills the place.
    """
    framed = np.pad(raster, 1, constant_values=_OUTSIDE)
    above, below = framed[:-1], framed[1:]  # of each line between rows
    across = above[:, 1:-1] != below[:, 1:-1]
    upright = framed[1:-1, :-1] != framed[1:-1, 1:]
    up, down = np.pad(upright, ((1, 0), (0, 0))), np.pad(upright, ((0, 1), (0, 0)))
    left, right = np.pad(across, ((0, 0), (1, 0))), np.pad(across, ((0, 0), (0, 1)))

    directions = np.zeros([2 * size + 1 for size in raster.shape], dtype=np.int64)
    directions[0::2, 0::2] = up + 2 * right + 4 * down + 8 * left
    directions[0::2, 1::2] = _ACROSS * across
    directions[1::2, 0::2] = _UPRIGHT * upright
    area = np.full(directions.shape, _WALL, dtype=np.int64)
    area[1::2, 1::2] = raster
    area[0::2, 1::2] = below[:, 1:-1]
    area[1::2, 0::2] = framed[1:-1, 1:]
    area[0::2, 0::2] = below[:, 1:]
    area[directions > 0] = _WALL
    return area, directions


def _stripes(plane: Plane, seen: list[int], area: Ints, *, breadth: int) -> Ints:
    """Rank whose colour each cell has: diagonal stripes where a region is on several ranks."""
    owners = [plane.regions.ranks_of(int(plane.picked[i]), _MOST_STRIPES) for i in seen]
    counts = np.ones(len(plane), dtype=np.int64)
    counts[seen] = [len(ranks) for ranks in owners]
    ranks = np.zeros((len(plane), int(counts.max())), dtype=np.int64)
    for i, held in zip(seen, owners, strict=True):
        ranks[i, : len(held)] = held
    line, column = np.indices(area.shape)
    stripe = (column + line) // breadth % counts[area]
    return np.where(area >= 0, ranks[area, stripe], _PLAIN)


def _inside(rows: Bands, columns: Bands, first: Ints, last: Ints) -> tuple[int, int, int, int]:
    """Lines `[top, bottom)` and cells `[left, right)` inside the walls of a region."""
    ends: list[int] = []
    for dim, bands in enumerate((rows, columns)):
        low, high = 2 * int(first[dim]) + 1, 2 * int(last[dim]) - 1
        ends += [int(bands.offsets[low]), int(bands.offsets[high] + bands.lattice_cells[high])]
    return ends[0], ends[1], ends[2], ends[3]


def _write_label(
    chars: NDArray[np.str_], paint: Ints, labels: list[str], inside: tuple[int, int, int, int]
) -> str:
    """Puts the longest label that fits at the centre; on stripes, it stands on a plain ground.

    Returns what it wrote.
    """
    top, bottom, left, right = inside
    room = right - left
    label = next((label for label in labels if len(label) <= room), labels[-1][:room])
    line = (top + bottom - 1) // 2
    several = not labels[0].isdigit()
    if several and len(label) + 2 <= room:
        label = f" {label} "
    at = slice(left + (room - len(label)) // 2, left + (room - len(label)) // 2 + len(label))
    chars[line, at] = list(label)
    if several:
        paint[line, at] = _TAG
    return label.strip()


def _segments(chars: NDArray[np.str_], paint: Ints) -> list[Segment]:
    """One line of cells as runs of one style."""
    ends = [*(np.flatnonzero(paint[1:] != paint[:-1]) + 1).tolist(), len(paint)]
    segments, start = [], 0
    for end in ends:
        rank = int(paint[start])
        style = rank_style(rank) if rank >= 0 else Style(bold=rank == _TAG)
        segments.append(Segment("".join(chars[start:end].tolist()), style))
        start = end
    return segments


# -- around the cells ------------------------------------------------------------------------


def _with_ticks(
    plane: Plane,
    rows: Bands,
    columns: Bands,
    lines: list[list[Segment]],
    *,
    margin: int,
    tail: int,
) -> tuple[tuple[Segment, ...], ...]:
    """The lines with offsets on top and at the left."""
    at_line = _tick_places(rows)
    framed: list[tuple[Segment, ...]] = []
    if plane.ndim:
        framed.append((Segment(" " * margin + _column_ticks(columns, tail), _TICK_STYLE),))
    for number, line in enumerate(lines):
        tick = f"{at_line.get(number, '')}".rjust(margin - 1) + " " if margin else ""
        framed.append((Segment(tick, _TICK_STYLE), *line, Segment(" " * tail)))
    return tuple(framed)


def _tick_places(bands: Bands) -> dict[int, int]:
    """Cell to offset: at each wall or, without walls, where each band begins."""
    offsets = bands.offsets
    places = offsets[0::2] if bands.ruled else np.append(offsets[1::2], offsets[-1])
    return dict(zip(places.tolist(), bands.ticks.tolist(), strict=True))


def _column_ticks(columns: Bands, tail: int) -> str:
    """Offsets above their walls; one that would touch its neighbour is left out."""
    ticks = _tick_places(columns)
    end = max(ticks)
    text = ""
    gap = 1 if columns.ruled else 4
    for place, tick in ticks.items():
        fits_left = not text or len(text) + gap <= place
        if place == end or (fits_left and place + len(str(tick)) + gap <= end):
            text = text.ljust(place) + str(tick)
    return text.ljust(end + 1 + tail)


def _caption(plane: Plane, rows: Bands, columns: Bands) -> str | None:
    boxes = f"{len(plane):,} boxes"
    if rows.sampled and columns.sampled:
        size = " x ".join(f"{size:,}" for size in plane.shape)
        return f"showing {len(rows)} x {len(columns)} samples of {size}; {boxes}"
    for bands, length, name in zip((rows, columns), plane.shape, ("rows", "columns"), strict=True):
        if bands.sampled:
            what = "elements" if plane.ndim == 1 else name
            return f"showing {len(bands)} of {length:,} {what}; {boxes}"
    return None
