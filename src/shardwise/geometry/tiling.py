"""Do these boxes tile this shape, and if not, which ones are to blame?

[Note: corners] The boxes tile the shape if the sum of their indicator functions is the indicator
of the whole. A function that is a sum of boxes is known by its 2**d signed corners per box (+1 at
the start, the sign changing with every end taken), and two such functions are equal if their
corners cancel. So one sort of integers decides, in O(n log n) for every arrangement of boxes.
If corners are left over, the smallest in row-major order is a point where the sum is wrong: no
other left-over corner lies below it in every dim, so its own count says by how much. A count
above zero is an overlap, one below zero a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import whole_number
from shardwise.errors import TilingError
from shardwise.geometry.box import Box, Boxes, Ints, as_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TilingReport", "check_tiling", "is_tiling"]

_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class TilingReport:
    """What is wrong with a set of boxes as a tiling; falsy lists mean nothing is."""

    shape: tuple[int, ...]
    boxes: Boxes
    out_of_range: tuple[int, ...]  # every box that leaves the shape
    overlaps: tuple[tuple[int, int], ...]  # pairs i < j
    gaps: tuple[Box, ...]  # disjoint boxes that nothing covers
    is_complete: bool  # False: `limit` was reached, there is more

    @property
    def ok(self) -> bool:
        """Whether the boxes tile the shape."""
        return self.is_complete and not (self.out_of_range or self.overlaps or self.gaps)

    def describe(self, label: Callable[[int], str] | None = None) -> str:
        """One line a problem; `label(i)` names box `i`, by default its index and extent."""
        name = label or (lambda i: f"box {i} {self.boxes[i]}")
        if self.ok:
            return f"{len(self.boxes)} boxes tile {self.shape}"
        lines = [f"{name(i)} exceeds tensor dims {self.shape}" for i in self.out_of_range[:8]]
        if len(self.out_of_range) > 8:
            lines.append(f"and {len(self.out_of_range) - 8} more boxes exceed them")
        lines += [f"{name(i)} and {name(j)} overlap{self._where(i, j)}" for i, j in self.overlaps]
        lines += [f"nothing covers {gap}" for gap in self.gaps]
        return "; ".join(lines) + ("" if self.is_complete else "; and more")

    def _where(self, i: int, j: int) -> str:
        common = self.boxes[i] & self.boxes[j]
        return "" if common in (None, self.boxes[i]) else f" in {common}"

    def raise_if_bad(self, what: str, *, label: Callable[[int], str] | None = None) -> None:
        """Raises a TilingError about `what` unless the boxes tile the shape."""
        if not self.ok:
            raise TilingError(
                f"{what}: the shards do not cover the entire tensor of shape {self.shape}, "
                f"each element once: {self.describe(label)}"
            )


def is_tiling(boxes: Boxes | Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether `boxes` cover every element of `shape` exactly once; faster than a report."""
    sizes = as_shape(shape)
    listed = _listed(boxes, sizes)
    if (listed.stops > np.array(sizes, dtype=np.int64)).any():
        return False
    return _cancels(listed[np.flatnonzero(listed.is_full)], sizes)


def check_tiling(
    boxes: Boxes | Sequence[Box],
    shape: Sequence[int],
    *,
    replicas: bool = False,
    limit: int = 8,
) -> TilingReport:
    """Report on whether `boxes` cover every element of `shape` exactly once.

    With `replicas`, identical boxes count as one; boxes that overlap in part are never allowed.
    Empty boxes must lie inside the shape and cover nothing. The report names all boxes out of
    range and the first `limit` overlaps and gaps in row-major order.

    >>> check_tiling([Box((0,), (4,)), Box((3,), (6,))], (8,)).describe()
    'box 0 [0:4] and box 1 [3:6] overlap in [3:4]; nothing covers [6:8]'
    """
    sizes = as_shape(shape)
    limit = whole_number(limit, "limit", least=1)
    listed = _listed(boxes, sizes)
    whole = np.array(sizes, dtype=np.int64)
    outside = np.flatnonzero((listed.stops > whole).any(axis=1))
    inside = Boxes(np.minimum(listed.starts, whole), np.minimum(listed.stops, whole))
    rows = np.flatnonzero(inside.is_full)
    overlaps: list[tuple[int, int]] = []
    gaps: list[Box] = []
    complete = True
    if not _cancels(inside[rows], sizes):
        firsts, repeats = _distinct(listed, rows)
        if not replicas:
            overlaps += repeats[:limit]
        complete = _search(inside, firsts, sizes, limit=limit, overlaps=overlaps, gaps=gaps)
        complete = complete and (replicas or len(repeats) <= limit)
    return TilingReport(
        sizes, listed, tuple(outside.tolist()), tuple(overlaps), tuple(gaps), complete
    )


def _listed(boxes: Boxes | Sequence[Box], shape: tuple[int, ...]) -> Boxes:
    listed = boxes if isinstance(boxes, Boxes) else Boxes.of(boxes, len(shape))
    if listed.ndim != len(shape):
        raise TilingError("boxes", expected=f"{len(shape)} dims as in {shape}", got=listed.ndim)
    return listed


def _cancels(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether the corners of `boxes` cancel those of the whole. [Note: corners]"""
    if 0 in shape:
        return len(boxes) == 0
    keys, signs = _corners(boxes, shape)
    # The last column is the whole, whose corners count the other way round.
    above, below = (
        np.sort(np.append(keys[signs == sign, :-1], keys[signs == -sign, -1])) for sign in (1, -1)
    )
    return bool(np.array_equal(above, below))


def _corners(boxes: Boxes, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Keys of all corners, (2**cut_dims, n + 1), and the sign of each row.

    Keys are ordered as the points are in row-major order. The last column is the whole shape.
    A dim that every box spans is left out: its corners cancel by themselves.
    """
    whole = np.array([shape], dtype=np.int64)
    starts = np.concatenate([boxes.starts, np.zeros_like(whole)])
    stops = np.concatenate([boxes.stops, whole])
    cut = np.flatnonzero((starts != 0).any(axis=0) | (stops != whole).any(axis=0))
    keys, signs, bound = np.zeros((1, len(starts)), np.int64), np.ones(1, np.int64), 1
    for dim in cut.tolist():
        low, high, extent = starts[:, dim], stops[:, dim], shape[dim] + 1
        if bound * extent >= _INT64:  # only in vast sparse shapes: number what occurs
            values, ranks = np.unique(keys, return_inverse=True)
            keys, bound = ranks.reshape(keys.shape), len(values)
        if bound * extent >= _INT64:
            values, ranks = np.unique(np.concatenate([low, high]), return_inverse=True)
            (low, high), extent = np.split(ranks, 2), len(values)
        keys = np.concatenate([keys * extent + low, keys * extent + high])
        signs = np.concatenate([signs, -signs])
        bound *= extent
    return keys, signs


def _distinct(boxes: Boxes, rows: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Rows of the first of each group of identical boxes, and (first, repeat) pairs."""
    table = np.concatenate([boxes.starts[rows], boxes.stops[rows]], axis=1)
    order = np.lexsort(table.T[::-1]) if table.shape[1] else np.arange(len(rows))
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (table[order[1:]] != table[order[:-1]]).any(axis=1)
    first_of = rows[order[np.flatnonzero(new)[np.cumsum(new) - 1]]]
    repeats = zip(first_of[~new].tolist(), rows[order[~new]].tolist(), strict=True)
    return rows[order[new]], sorted(repeats)


def _search(
    boxes: Boxes,
    rows: Ints,
    shape: tuple[int, ...],
    *,
    limit: int,
    overlaps: list[tuple[int, int]],
    gaps: list[Box],
) -> bool:
    """Adds problems in row-major order until `limit`; whether all were found.

    Each problem found is mended in a working copy (an overlap taken out of one of the two boxes,
    a gap filled), so that the next search finds the next one and reports nothing twice.
    """
    starts, stops, owner = boxes.starts[rows], boxes.stops[rows], rows
    while (point := _first_wrong(Boxes(starts, stops), shape)) is not None:
        if len(overlaps) + len(gaps) >= limit:
            return False
        covering = np.flatnonzero(((starts <= point) & (point < stops)).all(axis=1))
        if len(covering):
            keeper, other = covering[0], covering[1]
            pair = sorted((int(owner[keeper]), int(owner[other])))
            if (found := (pair[0], pair[1])) not in overlaps:
                overlaps.append(found)
            kept = Box(tuple(starts[keeper].tolist()), tuple(stops[keeper].tolist()))
            cut = Box(tuple(starts[other].tolist()), tuple(stops[other].tolist()))
            mended, number = _subtract(cut, kept), owner[other]
            starts, stops, owner = (np.delete(a, other, axis=0) for a in (starts, stops, owner))
        else:
            gaps.append(gap := _grow(point, starts, stops, shape))
            mended, number = [gap], np.int64(-1)
        extra = Boxes.of(mended, len(shape))
        starts, stops = np.concatenate([starts, extra.starts]), np.concatenate([stops, extra.stops])
        owner = np.concatenate([owner, np.full(len(extra), number)])
    return True


def _first_wrong(boxes: Boxes, shape: tuple[int, ...]) -> Ints | None:
    """First point, row-major, that is not covered exactly once. [Note: corners]"""
    keys, signs = _corners(boxes, shape)
    weights = np.repeat(signs[:, None], keys.shape[1], axis=1)
    weights[:, -1] *= -1
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    left_over = np.flatnonzero(np.bincount(group.ravel(), weights=weights.ravel()).round())
    if not len(left_over):
        return None
    corner, column = divmod(int(first[left_over[0]]), keys.shape[1])
    whole = np.array(shape, dtype=np.int64)
    start = boxes.starts[column] if column < len(boxes) else np.zeros_like(whole)
    stop = boxes.stops[column] if column < len(boxes) else whole
    spans = (boxes.starts == 0).all(axis=0) & (boxes.stops == whole).all(axis=0)
    point = start.copy()
    for bit, dim in enumerate(np.flatnonzero(~spans).tolist()):
        if corner >> bit & 1:
            point[dim] = stop[dim]
    return point


def _grow(point: Ints, starts: Ints, stops: Ints, shape: tuple[int, ...]) -> Box:
    """A maximal box from the uncovered `point` upwards that no box touches."""
    stop = point + 1
    for dim in reversed(range(len(shape))):
        others = np.arange(len(shape)) != dim
        touches = ((starts < stop) & (stops > point))[:, others].all(axis=1)
        ahead = starts[touches & (starts[:, dim] > point[dim]), dim]
        stop[dim] = ahead.min(initial=shape[dim])
    return Box(tuple(point.tolist()), tuple(stop.tolist()))


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that are `box` without `hole`, which overlaps it."""
    pieces = []
    start, stop = list(box.start), list(box.stop)
    for dim in range(box.ndim):
        if start[dim] < hole.start[dim]:
            pieces.append(Box(tuple(start), (*stop[:dim], hole.start[dim], *stop[dim + 1 :])))
            start[dim] = hole.start[dim]
        if hole.stop[dim] < stop[dim]:
            pieces.append(Box((*start[:dim], hole.stop[dim], *start[dim + 1 :]), tuple(stop)))
            stop[dim] = hole.stop[dim]
    return pieces
