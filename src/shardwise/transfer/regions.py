"""Where two layouts meet: the elementary regions of every plan.

The boxes of each layout tile the tensor, so the non-empty intersections of a source box with a
target box tile it too. Grids are joined dim by dim along their cuts, anything else by
`intersecting_pairs`. What one rank takes part in costs about that, and a pass over all boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.geometry import Boxes, Layout, intersecting_pairs
from shardwise.geometry.overlap import distinct
from shardwise.transfer.moves import ragged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints

__all__ = ["BoxJoin", "GridJoin", "Regions", "join"]


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Intersections of distinct boxes, ordered by their starts (no two start alike)."""

    starts: Ints  # (n, ndim)
    stops: Ints  # (n, ndim)
    source_box: Ints  # (n,): index among the distinct boxes of the source (`Layout.box_rows`)
    target_box: Ints  # (n,)

    def __len__(self) -> int:
        return len(self.source_box)

    def __getitem__(self, rows: np.ndarray) -> Regions:
        picked = np.flatnonzero(rows) if rows.dtype == bool else rows
        return Regions(
            self.starts.take(picked, axis=0),  # much faster than an index
            self.stops.take(picked, axis=0),
            self.source_box[picked],
            self.target_box[picked],
        )

    @property
    def volumes(self) -> Ints:
        """Elements of each region."""
        volumes: Ints = np.prod(self.stops - self.starts, axis=1, dtype=np.int64)
        return volumes

    def in_order(self, shape: tuple[int, ...]) -> Regions:
        """The same regions of a tensor of `shape` by their starts, each once."""
        number = np.zeros(len(self), np.int64)  # of the first element, row-major: below 2**63
        for dim, size in enumerate(shape):
            number = number * size + self.starts[:, dim]
        order = np.argsort(number)
        number = number[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = number[1:] != number[:-1]
        return self[order[new]]


def join(source: Layout, target: Layout) -> GridJoin | BoxJoin:
    """What finds the regions of two layouts of one shape, all or those of one rank."""
    return GridJoin.of(source, target) or BoxJoin(source, target)


@dataclass(frozen=True, slots=True, eq=False)
class BoxJoin:
    """Two layouts of one shape, joined box by box."""

    source: Layout
    target: Layout

    def regions(self) -> Regions:
        """All regions."""
        return self._of_pairs(*intersecting_pairs(*self._boxes))

    def regions_of(self, rank: int) -> Regions:
        """The regions that `rank` holds before or gets after."""
        before, after = self._boxes
        held, wanted = (
            np.searchsorted(layout.box_rows, _rows_on(layout, rank), side="right") - 1
            for layout in (self.source, self.target)
        )
        a, b = intersecting_pairs(before[held], after)
        c, d = intersecting_pairs(before, after[wanted])
        return self._of_pairs(np.concatenate([held[a], c]), np.concatenate([b, wanted[d]]))

    @property
    def _boxes(self) -> tuple[Boxes, Boxes]:
        """The distinct boxes of both layouts."""
        before, after = (
            layout.boxes if layout.has_every_box_once else layout.boxes[layout.box_rows[:-1]]
            for layout in (self.source, self.target)
        )
        return before, after

    def _of_pairs(self, source_box: Ints, target_box: Ints) -> Regions:
        """The regions in which these boxes meet, in order."""
        before, after = self._boxes
        low = (before.starts.take(source_box, axis=0), after.starts.take(target_box, axis=0))
        high = (before.stops.take(source_box, axis=0), after.stops.take(target_box, axis=0))
        regions = Regions(np.maximum(*low), np.minimum(*high), source_box, target_box)
        return regions.in_order(self.source.shape)


class _Axis(NamedTuple):
    """The cuts of both grids along one dim, together."""

    cuts: Ints  # (pieces + 1,)
    source_cell: Ints  # (pieces,): cell of the source's grid
    target_cell: Ints  # (pieces,)


@dataclass(frozen=True, slots=True, eq=False)
class GridJoin:
    """Two grids of one shape, joined along their cuts."""

    source: Layout
    target: Layout
    axes: tuple[_Axis, ...]

    @classmethod
    def of(cls, source: Layout, target: Layout) -> GridJoin | None:
        """The join, or None if one of the two is no grid."""
        if source.grid is None or target.grid is None:
            return None
        axes = []
        for a, b in zip(source.grid.cuts, target.grid.cuts, strict=True):
            cuts = distinct(np.concatenate([a, b]))
            low = cuts[:-1]
            axes.append(
                _Axis(
                    cuts,
                    np.searchsorted(a, low, side="right") - 1,
                    np.searchsorted(b, low, side="right") - 1,
                )
            )
        return cls(source, target, tuple(axes))

    def regions(self) -> Regions:
        """All regions."""
        source_cell = np.ix_(*(axis.source_cell for axis in self.axes))
        target_cell = np.ix_(*(axis.target_cell for axis in self.axes))
        starts = _row_major([axis.cuts[:-1] for axis in self.axes])
        return Regions(
            starts,
            _row_major([axis.cuts[1:] for axis in self.axes]),
            _distinct_box(self.source, source_cell, len(starts)),
            _distinct_box(self.target, target_cell, len(starts)),
        )

    def regions_of(self, rank: int) -> Regions:
        """The regions that `rank` holds before or gets after."""
        windows = [layout.boxes[_rows_on(layout, rank)] for layout in (self.source, self.target)]
        starts = np.concatenate([boxes.starts for boxes in windows])
        stops = np.concatenate([boxes.stops for boxes in windows])
        return self._within(starts, stops).in_order(self.source.shape)

    def _within(self, starts: Ints, stops: Ints) -> Regions:
        """The regions inside windows, (n, ndim), that are empty or have cuts for sides."""
        cuts = [axis.cuts for axis in self.axes]
        low = _positions(cuts, starts)
        extent = _positions(cuts, stops) - low
        pieces = _numbers_within(low, extent)
        corners = np.empty((2, pieces.shape[1], len(cuts)), np.int64)
        for dim, piece in enumerate(pieces):
            corners[0, :, dim], corners[1, :, dim] = cuts[dim][piece], cuts[dim][piece + 1]
        source_cell = [axis.source_cell[p] for axis, p in zip(self.axes, pieces, strict=True)]
        target_cell = [axis.target_cell[p] for axis, p in zip(self.axes, pieces, strict=True)]
        return Regions(
            corners[0],
            corners[1],
            _distinct_box(self.source, source_cell, pieces.shape[1]),
            _distinct_box(self.target, target_cell, pieces.shape[1]),
        )


def _positions(cuts: list[Ints], corners: Ints) -> Ints:
    """Where the coordinates of `corners`, (n, ndim), stand among the cuts of their dim."""
    found = np.empty_like(corners)
    for dim, along in enumerate(cuts):
        found[:, dim] = np.searchsorted(along, corners[:, dim])
    return found


def _numbers_within(low: Ints, extent: Ints) -> Ints:
    """Coordinates of all points of boxes given by corner and sizes, (n, ndim): (ndim, points)."""
    box, rest = ragged(np.zeros(len(low), np.int64), np.prod(extent, axis=1, dtype=np.int64))
    points = np.empty((low.shape[1], len(box)), np.int64)
    for dim in reversed(range(low.shape[1])):  # the last dim runs fastest
        rest, inner = np.divmod(rest, extent[box, dim])
        points[dim] = low[box, dim] + inner
    return points


def _row_major(along: Sequence[Ints]) -> Ints:
    """All points with one of these coordinates per dim, in row-major order, (n, ndim)."""
    shape = [len(coordinates) for coordinates in along]
    points = np.empty((*shape, len(along)), np.int64)
    for dim, coordinates in enumerate(np.ix_(*along)):
        points[..., dim] = coordinates
    return points.reshape(math.prod(shape), len(along))


def _distinct_box(layout: Layout, cell: Sequence[Ints], num_cells: int) -> Ints:
    """Index among the distinct boxes of each of these cells, row-major, (num_cells,)."""
    assert layout.grid is not None
    rows = np.broadcast_to(np.ravel(layout.grid.rows[..., 0][tuple(cell)]), num_cells)
    return rows if layout.has_every_box_once else np.searchsorted(layout.box_rows, rows)


def _rows_on(layout: Layout, rank: int) -> Ints:
    return np.flatnonzero(layout.owners == rank)  # for one rank cheaper than to sort as `rows_of`
