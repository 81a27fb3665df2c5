"""A layout as a scene: its planes with labels and offsets, its legend, notes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.transfer.units import format_bytes
from shardwise.viz.colors import rank_hex, rank_ink
from shardwise.viz.labels import NUM_LEVELS, box_label
from shardwise.viz.legend import Legend
from shardwise.viz.notes import picture_notes
from shardwise.viz.planes import Regions, iter_planes, num_planes
from shardwise.viz.scene import (
    FONT_SIZE,
    INK,
    QUIET,
    TAG,
    Polygon,
    Scene,
    Words,
    flow,
    rectangle,
    stack,
    width_of,
)
from shardwise.viz.tiles import Tiles, stripes_of, tiles_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints
    from shardwise.viz.bands import Bands

__all__ = ["GAP", "PixelRoom", "layout_scene", "planes_scene"]

GAP = 24  # pixels between neighbours
_MOST_STRIPES = 16
_TICK_SIZE = 10
_LABEL_SIZES = (FONT_SIZE, 10, 8)  # fonts, the best first
_ROW_HEIGHT = 18  # of the legend
_LEGEND_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class PixelRoom:
    """How many pixels a picture may take."""

    width: int  # of the whole
    plane: tuple[int, int]  # of one plane, if there is one: width and height
    most: tuple[int, int]  # the same, where there are many boxes
    least: int  # side of a box
    max_slices: int = 8
    max_ranks: int = 32  # with a row in the legend


def layout_scene(
    layout: Layout,
    room: PixelRoom,
    *,
    title: str | None = None,
    itemsize: int | None = None,
    world_size: int | None = None,
    with_words: bool = True,
) -> Scene:
    """The whole picture of a layout, below its title and (if `with_words`) its repr."""
    parts = [] if title is None else [Scene.line(title, bold=True, size=15)]
    if with_words:
        parts.append(Scene.line(repr(layout), color=QUIET if title is not None else INK))
    rows = Legend.of(layout, itemsize=itemsize, world_size=world_size, most=room.max_ranks)
    legend = _legend(rows, room.width)
    regions = Regions.of(layout)
    if not len(regions):
        return stack([*parts, Scene.line("no elements"), legend], gap=6)
    planes, notes = planes_scene(regions, room, itemsize=itemsize)
    parts.append(flow([planes, legend], room=room.width, gap=GAP))
    return stack([*parts, notes], gap=8)


def planes_scene(
    regions: Regions, room: PixelRoom, *, itemsize: int | None = None
) -> tuple[Scene, Scene]:
    """The planes of a layout in rows, and the notes about what stands in them."""
    planes = list(itertools.islice(iter_planes(regions), room.max_slices))
    # Several are smaller: two beside each other, or three.
    shrink = 1 if len(planes) == 1 else 2 if len(planes) <= 4 else 3
    size, most = ((width // shrink, height // shrink) for width, height in (room.plane, room.most))
    scenes, labels, notes = [], set[str](), list[str]()
    for plane in planes:
        tiles = tiles_of(plane, size=size, most=most, least=room.least)
        scene, written = _plane_scene(tiles, itemsize=itemsize)
        labels |= written
        if plane.name is not None:
            scene = stack([Scene.line(plane.name, bold=True), scene])
        scenes.append(scene)
        if tiles.sampled:
            notes.append(f"showing {len(tiles.regions):,} of {len(plane):,} boxes")
    if (more := num_planes(regions) - len(planes)) > 0:
        notes.append(f"... and {more:,} more slices")
    pictures = flow(scenes, room=room.width, gap=GAP)
    return pictures, _notes_scene(regions, frozenset(labels), notes)


def _notes_scene(regions: Regions, labels: frozenset[str], notes: Sequence[str] = ()) -> Scene:
    """What the signs in the labels mean, below `notes`, each once."""
    signs = picture_notes(regions, keyed=False, labels=labels)
    return stack([Scene.line(note, color=QUIET) for note in dict.fromkeys([*notes, *signs])])


def _plane_scene(tiles: Tiles, *, itemsize: int | None) -> tuple[Scene, set[str]]:
    """One plane with its labels and offsets, and the labels that were written."""
    regions = tiles.plane.regions
    placed = list(zip(tiles.regions.tolist(), tiles.corners.tolist(), strict=True))
    polygons = [
        polygon
        for region, corners in placed
        for polygon in _region_polygons(regions, region, corners, itemsize)
    ]
    words = _labels(regions, placed)
    labels = {label.text for label in words}
    inside = Scene(tiles.width, tiles.height, tuple(polygons), tuple(words))
    margin = max((len(str(tick)) for tick in tiles.rows.ticks.tolist()), default=0)
    left = width_of("0", _TICK_SIZE) * margin + 6 if tiles.plane.ndim == 2 else 0
    top = _TICK_SIZE + 6 if tiles.plane.ndim else 0
    ticks = [*_row_ticks(tiles.rows, left, top)] if left else []
    ticks += [*_column_ticks(tiles.columns, left)] if top else []
    moved = inside.moved(left, top)
    tail = width_of(str(tiles.plane.shape[1]), _TICK_SIZE) / 2
    every = (*moved.words, *ticks)
    return Scene(moved.width + tail, moved.height + 6, moved.polygons, every), labels


def _region_polygons(
    regions: Regions, region: int, corners: Sequence[float], itemsize: int | None
) -> Iterator[Polygon]:
    """The colours of all its ranks, and an outline that has the words."""
    left, top, right, bottom = corners
    ranks = regions.ranks_of(region, _MOST_STRIPES)
    if len(ranks) > 1:
        stripes = stripes_of(left, top, right, bottom, len(ranks))
        yield from (Polygon(points, fill=rank_hex(ranks[at])) for at, points in stripes)
    yield Polygon(
        rectangle(left, top, right, bottom),
        fill=rank_hex(ranks[0]) if len(ranks) == 1 else None,
        edge=INK,
        dashed=regions.layout.pending is not None,
        hover=_region_in_words(regions, region, itemsize),
    )


def _region_in_words(regions: Regions, region: int, itemsize: int | None) -> str:
    """`rank 0: [0:2, 0:6], 2 x 6, 48 B`."""
    start, stop = (ends[region].tolist() for ends in (regions.starts, regions.stops))
    index = ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
    sizes = [b - a for a, b in zip(start, stop, strict=True)]
    by_term = regions.ranks_by_term(region)
    several = len(by_term) > 1 or len(by_term[0]) > 1
    words = f"rank{'s' if several else ''} {box_label(by_term, 0)}: [{index}]"
    if sizes:
        words += ", " + " x ".join(map(str, sizes))
    return words if itemsize is None else f"{words}, {format_bytes(math.prod(sizes) * itemsize)}"


def _labels(regions: Regions, placed: Sequence[tuple[int, Sequence[float]]]) -> list[Words]:
    """Labels of all boxes in the largest font that has room for them, or of those that have room.

    One font for all, so that a box without a label is one that is too small for any.
    """
    for size in (*_LABEL_SIZES, _LABEL_SIZES[0]):
        found = [_label(regions, region, corners, size) for region, corners in placed]
        if None not in found:
            break
    return [label for label in found if label is not None]


def _label(regions: Regions, region: int, corners: Sequence[float], size: int) -> Words | None:
    """The longest label of a box that fits, or None."""
    left, top, right, bottom = corners
    if size + 1 > bottom - top:
        return None
    by_term = regions.ranks_by_term(region)
    several = len(by_term) > 1 or len(by_term[0]) > 1
    for level in range(NUM_LEVELS):
        text = box_label(by_term, level)
        if width_of(text, size) + 2 <= right - left:
            color = TAG if several else rank_ink(by_term[0][0])
            middle = ((left + right) / 2, (top + bottom) / 2)
            return Words(*middle, text, "middle", color, bold=True, size=size)
    return None


# -- around the boxes --------------------------------------------------------------------------


def _row_ticks(bands: Bands, left: float, top: float) -> Iterator[Words]:
    """Offsets beside the cuts; one that would touch its neighbour is left out."""
    for place, tick in _spread(bands, [_TICK_SIZE + 1] * (len(bands) + 1)):
        yield Words(left - 4, top + place, f"{tick}", "end", QUIET, size=_TICK_SIZE)


def _column_ticks(bands: Bands, left: float) -> Iterator[Words]:
    widths = [width_of(f"{tick} ", _TICK_SIZE) for tick in bands.ticks.tolist()]
    for place, tick in _spread(bands, widths):
        yield Words(left + place, _TICK_SIZE / 2 + 2, f"{tick}", "middle", QUIET, size=_TICK_SIZE)


def _spread(bands: Bands, sizes: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Places and offsets of the ticks that fit beside each other; the last always stands."""
    ends: Ints = bands.cells.cumsum()
    # A sample's offset is at its middle, that of a piece where it begins.
    half = bands.cells / 2 if bands.sampled else 0 * bands.cells
    places = [*(ends - bands.cells + half).tolist(), float(ends[-1])]
    ticks = bands.ticks.tolist()
    last = places[-1] - sizes[-1] / 2
    free = -math.inf
    for place, tick, size in zip(places[:-1], ticks[:-1], sizes[:-1], strict=True):
        if place - size / 2 >= free and place + size / 2 <= last:
            yield place, tick
            free = place + size / 2
    yield places[-1], ticks[-1]


# -- the legend --------------------------------------------------------------------------------


def _legend(legend: Legend, room: float) -> Scene:
    """The table of ranks, in as many columns as it takes to stay short, and words."""
    lines = max(16, -(-len(legend.rows) // _LEGEND_COLUMNS))
    starts = range(0, len(legend.rows), lines)
    tables = [_legend_table(legend, start, start + lines) for start in starts]
    words = [Scene.line(text, color=QUIET) for text in legend.words]
    return stack([flow(tables, room=room, gap=GAP), *words])


def _legend_table(legend: Legend, first: int, last: int) -> Scene:
    """A heading, then a row for each rank: swatch, boxes, elements, bytes."""
    rows = [legend.headings, *(legend.cells(row) for row in legend.rows[first:last])]
    widths = [max(width_of(cell) for cell in column) for column in zip(*rows, strict=True)]
    swatch = widths[0] + 12
    polygons, words = [], []
    for at, cells in enumerate(rows):
        middle = (at + 0.5) * _ROW_HEIGHT
        color = QUIET
        if at:
            rank = legend.rows[first + at - 1].rank
            box = rectangle(0, middle - 8, swatch, middle + 8)
            polygons.append(Polygon(box, fill=rank_hex(rank)))
            color = rank_ink(rank)
        words.append(Words(swatch / 2, middle, cells[0], "middle", color, bold=at > 0))
        right = swatch
        for cell, width in zip(cells[1:], widths[1:], strict=True):
            right += width + 10
            words.append(Words(right, middle, cell, "end", INK if at else QUIET))
    return Scene(right, len(rows) * _ROW_HEIGHT, tuple(polygons), tuple(words))
