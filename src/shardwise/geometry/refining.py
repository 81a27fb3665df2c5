"""Boxes that overlap in part, cut until any two pieces are the same or apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry.box import Box, Boxes
from shardwise.geometry.overlap import intersecting_pairs
from shardwise.geometry.splits import product_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints

__all__ = ["common_pieces"]


def common_pieces(boxes: Sequence[Box]) -> dict[Box, tuple[Box, ...]]:
    """For each box the pieces that it is made of; boxes that overlap nothing stay whole.

    >>> common_pieces([Box((0,), (3,)), Box((2,), (4,))])[Box((2,), (4,))]
    (Box(start=(2,), stop=(3,)), Box(start=(3,), stop=(4,)))
    """
    distinct = list(dict.fromkeys(boxes))
    found: dict[Box, tuple[Box, ...]] = {box: (box,) for box in distinct}
    if len(distinct) < 2:
        return found
    listed = Boxes.of(distinct, distinct[0].ndim)
    for group in _touching(listed):
        cuts = [
            np.unique(np.concatenate([listed.starts[group, dim], listed.stops[group, dim]]))
            for dim in range(listed.ndim)
        ]
        found |= {distinct[k]: _cut(distinct[k], cuts) for k in group}
    return found


def _touching(boxes: Boxes) -> list[list[int]]:
    """Groups of two or more boxes, each of which overlaps another of its group."""
    group_of = list(range(len(boxes)))

    def root(k: int) -> int:
        while group_of[k] != k:
            group_of[k] = k = group_of[group_of[k]]
        return k

    for i, j in zip(*(rows.tolist() for rows in intersecting_pairs(boxes, boxes)), strict=True):
        group_of[root(i)] = root(j)
    groups: dict[int, list[int]] = {}
    for k in range(len(boxes)):
        groups.setdefault(root(k), []).append(k)
    return [group for group in groups.values() if len(group) > 1]


def _cut(box: Box, cuts: Sequence[Ints]) -> tuple[Box, ...]:
    intervals = []
    for low, high, along in zip(box.start, box.stop, cuts, strict=True):
        inside = along[(along >= low) & (along <= high)]
        intervals.append((inside[:-1], inside[1:]))
    return tuple(Boxes(*product_boxes(intervals)))
