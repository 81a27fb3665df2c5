"""Which boxes of two sets intersect, in near-linear time for sets that tile.

[Note: halving] Coordinates are replaced by their rank among those of the smaller set, so every
region of space can be halved at most `log2(2n)` times per dim, whatever the sizes are. All regions
are halved together, level by level, with numpy: each along the dim that leaves the fewest pairs to
compare. Long thin boxes, which ruin a fixed grid of bins, are separated by cuts along their own
length. A region is done when it holds few boxes of one set, or when no cut separates anything
(then its boxes really intersect). A pair is reported only by the region that holds the low corner
of its intersection, so nothing is reported twice.

[Note: bins] Where one set is much smaller, the part of one rank say, most boxes of the other are
near none of it. Space around the smaller set is divided into even bins, and a table of sums, looked
up at the corners of a box, tells whether the box touches a bin that the smaller set touches. Only
such boxes go on to be halved.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.geometry.box import Boxes, Ints

__all__ = ["distinct", "intersecting_pairs", "overlapping_pairs"]

_FEW = 16  # a region with so many boxes of one set is compared pair by pair
_BATCH = 1 << 20  # about so many pairs are compared at a time, to bound memory
_LITTLE = 1 << 16  # so many pairs are sooner compared than avoided
_MUCH_FEWER = 8  # bins pay if the other set is so many times as large
_BINNED_DIMS = 3  # those in which boxes are smallest: a look at the table takes 2**dims reads

Int32s = NDArray[np.int32]  # halving mostly waits for memory, and these take half of it
Mask = NDArray[np.bool_]


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


def distinct(coordinates: Ints) -> Ints:
    """The different ones, ascending: np.unique, which hashes many values slowly."""
    ordered = np.sort(coordinates)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def _pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Ints, Ints]]:
    """Batches of intersecting pairs. [Note: halving]"""
    space = _Space.of(a, b)
    while space.num_regions:
        one, other = space.counts()
        work = one * other
        is_done = (np.minimum(one, other) <= _FEW) | (work.sum() <= _LITTLE)
        yield from space.only(is_done & (work > 0)).compare()
        space = space.only(~is_done)
        dim = space.best_cut()
        yield from space.only(dim < 0).compare()
        space = space.only(dim >= 0).halved(dim[dim >= 0])


@dataclass(frozen=True, slots=True)
class _Side:
    """The boxes of one set, once for each region that they touch: its members."""

    starts: Int32s  # (ndim, m), in ranks of coordinates
    stops: Int32s  # (ndim, m)
    box: Ints  # (m,)
    region: Int32s  # (m,)

    def pick(self, rows: Ints, region: Int32s) -> _Side:
        """These members, now of other regions."""
        starts, stops = self.starts.take(rows, axis=1), self.stops.take(rows, axis=1)
        return _Side(starts, stops, self.box[rows], region)

    def only(self, regions: Mask) -> _Side:
        number = np.cumsum(regions, dtype=np.int32) - 1
        rows = np.flatnonzero(regions[self.region])
        return self.pick(rows, number[self.region[rows]])

    def halved(self, dim: Ints, middle: Int32s) -> _Side:
        """Members after region `r` became `2r` (below its middle) and `2r + 1` (above)."""
        along, at, each = dim[self.region], middle[self.region], np.arange(len(self.box))
        below = np.flatnonzero(self.starts[along, each] < at)
        above = np.flatnonzero(self.stops[along, each] > at)
        rows = np.concatenate([below, above])
        region = 2 * self.region[rows]
        region[len(below) :] += 1
        return self.pick(rows, region)

    def by_region(self) -> _Side:
        order = np.argsort(self.region)
        return self.pick(order, self.region[order])


@dataclass(frozen=True, slots=True)
class _Space:
    """Regions of space and the boxes of both sets in them."""

    low: Int32s  # (ndim, regions), in ranks of coordinates
    high: Int32s  # (ndim, regions)
    sides: tuple[_Side, _Side]

    @classmethod
    def of(cls, a: Boxes, b: Boxes) -> _Space:
        """One region, with every box that may meet one of the other set."""
        rows = _candidates(a, b)
        ends = [
            (boxes.starts.take(picked, axis=0).T, boxes.stops.take(picked, axis=0).T)
            for boxes, picked in zip((a, b), rows, strict=True)
        ]
        fewer = ends[0] if len(rows[0]) < len(rows[1]) else ends[1]
        cuts = [distinct(np.concatenate(along)) for along in zip(*fewer, strict=True)]
        # Rounded outwards to these cuts, a box still meets the same ones of the smaller set.
        one, other = (
            _Side(
                _ranks(cuts, starts, "right") - 1,
                _ranks(cuts, stops, "left"),
                picked,
                np.zeros(len(picked), np.int32),
            )
            for (starts, stops), picked in zip(ends, rows, strict=True)
        )
        high = np.array([len(along) - 1 for along in cuts], np.int32)[:, None]
        return cls(np.zeros_like(high), high, (one, other))

    @property
    def num_regions(self) -> int:
        return int(self.low.shape[1])

    def counts(self) -> tuple[Ints, Ints]:
        """Members of every region, per side."""
        one, other = (np.bincount(s.region, minlength=self.num_regions) for s in self.sides)
        return one, other

    def only(self, regions: Mask) -> _Space:
        """The space of these regions alone."""
        if regions.all():
            return self
        one, other = (side.only(regions) for side in self.sides)
        return _Space(self.low[:, regions], self.high[:, regions], (one, other))

    def best_cut(self) -> Ints:
        """Per region, the dim whose cut leaves the fewest pairs; -1 if none leaves fewer.

        A cut with everything on one side leaves all pairs, but halves the region: it counts as
        one fewer, so that halving goes on while it can help.
        """
        work = np.multiply(*self.counts())
        best, least = np.full(self.num_regions, -1), work
        for dim, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            middle = (low + high) // 2
            below, above = np.ones_like(work), np.ones_like(work)
            for side in self.sides:
                at = middle[side.region]
                is_below, is_above = side.starts[dim] < at, side.stops[dim] > at
                below *= np.bincount(side.region[is_below], minlength=self.num_regions)
                above *= np.bincount(side.region[is_above], minlength=self.num_regions)
            left = below + above
            left[(left == work) & ((below == 0) | (above == 0))] -= 1
            left = np.where(high - low > 1, left, work)
            best = np.where(left < least, dim, best)
            least = np.minimum(left, least)
        return best

    def halved(self, dim: Ints) -> _Space:
        """Every region cut in two along its `dim`."""
        each = np.arange(self.num_regions)
        middle = (self.low[dim, each] + self.high[dim, each]) // 2
        low, high = np.repeat(self.low, 2, axis=1), np.repeat(self.high, 2, axis=1)
        low[dim, 2 * each + 1] = middle
        high[dim, 2 * each] = middle
        one, other = (side.halved(dim, middle) for side in self.sides)
        return _Space(low, high, (one, other))

    def compare(self) -> Iterator[tuple[Ints, Ints]]:
        """Intersecting pairs, each box compared with all of the other set in its region."""
        one, other = self.sides[0], self.sides[1].by_region()
        count = self.counts()[1]
        first = np.cumsum(count) - count
        ends = np.cumsum(count[one.region])
        edges = np.searchsorted(ends, np.arange(_BATCH, ends.max(initial=0), _BATCH))
        for rows in np.split(np.arange(len(ends)), edges):
            num_others = count[one.region[rows]]
            i = np.repeat(rows, num_others)
            skipped = first[one.region[rows]] - (np.cumsum(num_others) - num_others)
            j = np.arange(len(i)) + np.repeat(skipped, num_others)
            for dim, low in enumerate(self.low):
                corner = np.maximum(one.starts[dim][i], other.starts[dim][j])
                stop = np.minimum(one.stops[dim][i], other.stops[dim][j])
                # Both boxes reach into the region, so the corner cannot lie above it.
                here = np.flatnonzero((low[one.region[i]] <= corner) & (corner < stop))
                i, j = i[here], j[here]
            yield one.box[i], other.box[j]


def _ranks(cuts: list[Ints], coordinates: Ints, side: Literal["left", "right"]) -> Int32s:
    """Where coordinates, (ndim, m), stand among the cuts of their dim."""
    ranks = np.empty(coordinates.shape, np.int32)
    for dim, along in enumerate(cuts):
        ranks[dim] = np.searchsorted(along, coordinates[dim], side)
    return ranks


def _candidates(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """Rows of the boxes of each set that may meet one of the other. [Note: bins]"""
    use_a, use_b = a.is_full, b.is_full
    num_a, num_b = np.count_nonzero(use_a), np.count_nonzero(use_b)
    if num_a * num_b > _LITTLE:
        if num_a * _MUCH_FEWER <= num_b:
            use_b &= _are_near(b, a[use_a])
        elif num_b * _MUCH_FEWER <= num_a:
            use_a &= _are_near(a, b[use_b])
    return np.flatnonzero(use_a), np.flatnonzero(use_b)


def _are_near(boxes: Boxes, few: Boxes) -> Mask:
    """Which boxes touch a bin that one of `few` touches, empty ones aside. [Note: bins]"""
    low, high = few.starts.min(axis=0), few.stops.max(axis=0)
    dims = np.argsort((few.shapes / (high - low)).mean(axis=0))[:_BINNED_DIMS]
    # Per dim, and one on either side; together about as many as there are boxes.
    num_bins = math.ceil(len(boxes) ** (1 / max(len(dims), 1)))

    def corners(of: Boxes) -> Iterator[tuple[int, tuple[Ints, ...]]]:
        """Each of the 2**dims corners of all boxes, in bins, and its sign."""
        first, last = (
            np.clip((ends - low)[:, dims] * (num_bins / (high - low)[dims]), -1, num_bins)
            for ends in (of.starts, of.stops - 1)
        )
        start, stop = (np.floor(ends.T).astype(np.int64) + 1 for ends in (first, last + 1))
        for ends in itertools.product(
            *([(1, a), (-1, b)] for a, b in zip(start, stop, strict=True))
        ):
            yield math.prod(sign for sign, _ in ends), tuple(at for _, at in ends)

    sums = np.zeros((num_bins + 4,) * len(dims), np.int64)
    for sign, at in corners(few):
        np.add.at(sums, tuple(along + 1 for along in at), sign)
    for axis in (*range(len(dims)),) * 2:  # once for boxes per bin, once for all bins below
        np.cumsum(sums, axis=axis, out=sums)
    return np.asarray(sum(sign * sums[at] for sign, at in corners(boxes)) != 0)
