"""A plane as rectangles of pixels, to scale as far as every box can still be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.viz.bands import Bands, pixel_bands

if TYPE_CHECKING:
    from shardwise.geometry.box import Ints
    from shardwise.viz.planes import Plane
    from shardwise.viz.scene import Point

__all__ = ["Tiles", "stripes_of", "tiles_of"]

_PIXELS_PER_ELEMENT = 40  # at most: small tensors are not blown up beyond this
_LEAST_SIDE = 64  # of a whole plane
_LINE_HEIGHT = 40  # of a tensor with one dim
_LABEL_SIZE = (24, 14)  # of a box with room for four small digits


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Rectangles that cover a plane, and the region of each."""

    plane: Plane
    rows: Bands
    columns: Bands
    corners: Ints  # (n, 4): left, top, right, bottom
    regions: Ints  # (n,): of the layout

    @property
    def width(self) -> int:
        """Pixels of all columns."""
        return int(self.columns.cells.sum())

    @property
    def height(self) -> int:
        """Pixels of all rows."""
        return int(self.rows.cells.sum())

    @property
    def sampled(self) -> bool:
        """Whether some boxes are not seen."""
        return self.rows.sampled or self.columns.sampled


def tiles_of(plane: Plane, *, size: tuple[int, int], most: tuple[int, int], least: int) -> Tiles:
    """Tiles of a plane in about `size` pixels (width, height), or up to `most` for many pieces.

    No side of a box is shorter than `least`; where that leaves no room, not all boxes are seen.
    """
    scale = min(size[0] / plane.shape[1], size[1] / plane.shape[0], _PIXELS_PER_ELEMENT)
    tall, wide = (max(round(length * scale), _LEAST_SIDE) for length in plane.shape)
    if plane.ndim < 2:
        tall = _LINE_HEIGHT
    cuts = plane.cuts(0)
    tall = min(most[1], max(tall, (len(cuts) - 1) * _LABEL_SIZE[1]))
    rows = pixel_bands(cuts, room=tall, least=least)
    seen = plane.meeting(rows.points, 0) if rows.sampled else plane
    cuts = seen.cuts(1)
    wide = min(most[0], max(wide, (len(cuts) - 1) * _LABEL_SIZE[0]))
    columns = pixel_bands(cuts, room=wide, least=least)
    corners, picked = _rectangles(seen, rows, columns)
    return Tiles(seen, rows, columns, corners, seen.picked[picked])


def stripes_of(
    left: float, top: float, right: float, bottom: float, count: int
) -> list[tuple[int, tuple[Point, ...]]]:
    """A rectangle cut into diagonal stripes of `count` colours in turn: (colour, polygon)."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    if count == 1:
        return [(0, tuple(corners))]
    length = (right - left) + (bottom - top)
    # All colours twice, so that a stripe is taken for a stripe.
    num_stripes = 2 * count
    ends = [left + top + length * i / num_stripes for i in range(num_stripes + 1)]
    found = []
    for at in range(num_stripes):
        polygon = _beyond(_beyond(corners, ends[at], 1), -ends[at + 1], -1)
        if len(polygon) > 2:
            found.append((at % count, tuple(polygon)))
    return found


def _beyond(polygon: list[Point], end: float, sign: int) -> list[Point]:
    """The part of a convex polygon with `sign * (x + y) >= end`."""
    kept: list[Point] = []
    for at, (x, y) in enumerate(polygon):
        before_x, before_y = polygon[at - 1]
        here, before = sign * (x + y) - end, sign * (before_x + before_y) - end
        if here * before < 0:
            share = before / (before - here)
            kept.append((before_x + share * (x - before_x), before_y + share * (y - before_y)))
        if here >= 0:
            kept.append((x, y))
    return kept


def _rectangles(plane: Plane, rows: Bands, columns: Bands) -> tuple[Ints, Ints]:
    """Corners, (n, 4), and indices of regions in the plane, (n,), of the regions that are seen."""
    first, last = plane.spans(rows.points, columns.points)
    picked = np.flatnonzero((first < last).all(axis=1))
    y, x = (np.append(0, np.cumsum(bands.cells)) for bands in (rows, columns))
    ends = (x[first[:, 1]], y[first[:, 0]], x[last[:, 1]], y[last[:, 0]])
    return np.stack(ends, axis=1)[picked], picked
