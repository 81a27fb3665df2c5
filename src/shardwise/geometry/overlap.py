"""Which boxes of two sets intersect, in near-linear time for sets that tile.

[Note: halving] All coordinates are replaced by their rank among the coordinates of their dim, so
every region of space can be halved at most `log2(2n)` times per dim, whatever the sizes are. All
regions are halved together, level by level, with numpy: each along the dim that leaves the fewest
pairs to compare. Long thin boxes, which ruin a fixed grid of bins, are separated by cuts along
their own length. A region is done when it holds few boxes, or when no cut separates anything
(then its boxes really intersect). A pair is reported only by the region that holds the low corner
of its intersection, so nothing is reported twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.geometry.box import Boxes, Ints

__all__ = ["intersecting_pairs", "overlapping_pairs"]

_FEW = 16  # a region with so many boxes of both sets together is compared pair by pair
_BATCH = 1 << 21  # pairs compared at a time, to bound memory


def intersecting_pairs(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """Index arrays (i, j) of all pairs where `a[i]` and `b[j]` share an element, each once."""
    if a.ndim != b.ndim:
        raise GeometryError("boxes", expected=f"{a.ndim} dims", got=b.ndim)
    batches = list(_pairs(a, b))
    if not batches:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([i for i, _ in batches]), np.concatenate([j for _, j in batches])


def overlapping_pairs(boxes: Boxes, *, limit: int) -> list[tuple[int, int]]:
    """At most `limit` pairs `i < j` of boxes that share an element; empty if there are none."""
    found: list[tuple[int, int]] = []
    for i, j in _pairs(boxes, boxes):
        upper = np.flatnonzero(i < j)[: limit - len(found)]
        found += zip(i[upper].tolist(), j[upper].tolist(), strict=True)
        if len(found) >= limit:
            break
    return found


@dataclass(slots=True)
class _Side:
    """The boxes of one set, each in every region that it touches."""

    starts: Ints  # (n, ndim), in ranks of coordinates
    stops: Ints  # (n, ndim)
    box: Ints  # (m,), rows of starts and stops
    region: Ints  # (m,), non-decreasing

    def counts(self, num_regions: int) -> Ints:
        return np.bincount(self.region, minlength=num_regions).astype(np.int64)

    def halves(self, middle: Ints, dim: Ints) -> tuple[np.ndarray, np.ndarray]:
        """Which memberships reach below and above their region's `middle` along its `dim`."""
        at, along = middle[self.region], dim[self.region]
        return self.starts[self.box, along] < at, self.stops[self.box, along] > at

    def keep(self, rows: np.ndarray, new_region: Ints) -> _Side:
        return _Side(self.starts, self.stops, self.box[rows], new_region[self.region[rows]])

    def split(self, middle: Ints, dim: Ints) -> _Side:
        """Memberships after region `r` became `2r` (below) and `2r + 1` (above)."""
        below, above = self.halves(middle, dim)
        box = np.concatenate([self.box[below], self.box[above]])
        region = np.concatenate([2 * self.region[below], 2 * self.region[above] + 1])
        order = np.argsort(region, kind="stable")
        return _Side(self.starts, self.stops, box[order], region[order])


def _pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Ints, Ints]]:
    sides = _ranked(a, b)
    low = np.zeros((1, a.ndim), np.int64)  # (regions, ndim)
    high = np.concatenate([s.stops for s in sides]).max(axis=0, initial=0)[None]  # (regions, ndim)
    while len(low):
        counts = [side.counts(len(low)) for side in sides]
        work = counts[0] * counts[1]
        dim, least = _best_cut(sides, low, high, work)
        done = (counts[0] + counts[1] <= _FEW) | (least >= work)
        yield from _compare(sides, low, high, np.flatnonzero(done & (work > 0)))
        going = np.flatnonzero(~done & (work > 0))
        new_region = np.full(len(low), -1, np.int64)
        new_region[going] = np.arange(len(going))
        sides = [s.keep(new_region[s.region] >= 0, new_region) for s in sides]
        low, high, dim = low[going], high[going], dim[going]
        each = np.arange(len(going))
        middle = (low[each, dim] + high[each, dim]) // 2
        sides = [side.split(middle, dim) for side in sides]
        low, high = np.repeat(low, 2, axis=0), np.repeat(high, 2, axis=0)
        low[2 * each + 1, dim] = middle
        high[2 * each, dim] = middle


def _ranked(a: Boxes, b: Boxes) -> list[_Side]:
    """Both sets without their empty boxes, coordinates replaced by ranks."""
    rows = [np.flatnonzero(boxes.is_full) for boxes in (a, b)]
    ends = [boxes.starts for boxes in (a, b)] + [boxes.stops for boxes in (a, b)]
    sizes = np.cumsum([len(array) for array in ends])[:-1]
    stacked = np.concatenate(ends)
    for dim in range(a.ndim):
        stacked[:, dim] = np.unique(stacked[:, dim], return_inverse=True)[1]
    parts = np.split(stacked, sizes)
    return [
        _Side(parts[k], parts[k + 2], rows[k], np.zeros(len(rows[k]), np.int64)) for k in (0, 1)
    ]


def _best_cut(sides: list[_Side], low: Ints, high: Ints, work: Ints) -> tuple[Ints, Ints]:
    """Per region, the dim whose cut leaves the fewest pairs, and how many it leaves.

    A cut with everything on one side leaves all pairs, but halves the region: it counts as one
    fewer, so that halving goes on while it can help.
    """
    num_regions, ndim = low.shape
    best = np.zeros(num_regions, np.int64)
    least = work.copy()
    for dim in range(ndim):
        middle = (low[:, dim] + high[:, dim]) // 2
        along = np.full(num_regions, dim)
        below, above = np.ones(num_regions, np.int64), np.ones(num_regions, np.int64)
        for side in sides:
            is_below, is_above = side.halves(middle, along)
            below *= np.bincount(side.region[is_below], minlength=num_regions)
            above *= np.bincount(side.region[is_above], minlength=num_regions)
        left = below + above
        left[(left == work) & ((below == 0) | (above == 0))] -= 1
        left = np.where(high[:, dim] - low[:, dim] > 1, left, work)
        best = np.where(left < least, dim, best)
        least = np.minimum(left, least)
    return best, least


def _compare(
    sides: list[_Side], low: Ints, high: Ints, regions: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Intersecting pairs of the given regions, compared one with each, in batches."""
    first = [np.searchsorted(side.region, np.arange(len(low))) for side in sides]
    count = [side.counts(len(low)) for side in sides]
    for region, row in _cross_rows(regions, count[0], count[1]):
        picks = [
            sides[0].box[first[0][region] + row // count[1][region]],
            sides[1].box[first[1][region] + row % count[1][region]],
        ]
        corner = np.maximum(sides[0].starts[picks[0]], sides[1].starts[picks[1]])
        stop = np.minimum(sides[0].stops[picks[0]], sides[1].stops[picks[1]])
        here = (corner < stop) & (low[region] <= corner) & (corner < high[region])
        hit = here.all(axis=1)
        if hit.any():
            yield picks[0][hit], picks[1][hit]


def _cross_rows(regions: Ints, na: Ints, nb: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Batches of (region, k) with k running over the `na * nb` pairs of every region."""
    ends = np.cumsum(na[regions] * nb[regions])
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, _BATCH):
        flat = np.arange(begin, min(begin + _BATCH, total))
        slot = np.searchsorted(ends, flat, side="right")
        starts = ends - na[regions] * nb[regions]
        yield regions[slot], flat - starts[slot]
