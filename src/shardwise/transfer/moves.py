"""Moves: what goes from which entry of a layout to which entry of another, as arrays.

[Note: steps] A plan has at most two steps. In step 0 data leaves source shards: it is copied into
target shards, or reduced there. In step 1 what was reduced is spread: it leaves one target shard
for the same box on other ranks. Nothing is held in between: every reduction lands in a target
shard of its own rank.

[Note: groups] Moves of one group are contributions to one region of one target shard, in the order
in which they are added up: that of their terms, except that what one rank holds is added up first
and sent once. Neighbours of one group and one sender are therefore one *item*: the first of them,
the head, counts on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry.layout import LAST_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints

__all__ = ["NO_GROUP", "Moves", "ragged"]

_FEW = 256  # that are looked through for one rank sooner than they are sorted for all
NO_GROUP = -1  # of a move that is a plain copy

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Moves:
    """One row a move, ordered by step, start, target row, contribution. [Note: steps, groups]"""

    starts: Ints  # (n, ndim): the region, in global coordinates
    stops: Ints  # (n, ndim)
    source_row: Ints  # (n,): row of the source layout; of the target layout in step 1
    target_row: Ints  # (n,): row of the target layout
    src: Ints  # (n,): rank that has it
    dst: Ints  # (n,): rank that gets it
    step: Ints  # (n,): 0 or 1
    group: Ints  # (n,): number of a reduction, or NO_GROUP

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, rows: Ints | Mask) -> Moves:
        picked = np.flatnonzero(rows) if rows.dtype == bool else rows
        columns = (getattr(self, field.name) for field in fields(self))
        return Moves(*(column.take(picked, axis=0) for column in columns))  # faster than an index

    @classmethod
    def concatenate(cls, parts: Sequence[Moves], ndim: int) -> Moves:
        """All moves of the parts."""
        if not parts:
            empty = np.empty(0, np.int64)
            corner = np.empty((0, ndim), np.int64)
            return cls(corner, corner, *[empty] * 6)
        columns = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        return cls(*map(np.concatenate, columns))

    def in_order(self) -> Moves:
        """The same moves in the one order that all ranks use."""
        return self[np.lexsort((self.target_row, *self.starts.T[::-1], self.step))]

    @cached_property
    def volumes(self) -> Ints:
        """Elements per move, (n,)."""
        volumes: Ints = np.prod(self.stops - self.starts, axis=1, dtype=np.int64)
        return volumes

    @cached_property
    def is_head(self) -> Mask:
        """Which moves are the first of their item, (n,). [Note: groups]"""
        head = np.ones(len(self), dtype=bool)
        head[1:] = (
            (self.group[1:] == NO_GROUP)
            | (self.group[1:] != self.group[:-1])
            | (self.src[1:] != self.src[:-1])
        )
        return head

    @cached_property
    def is_wire(self) -> Mask:
        """Which moves are counted as messages: heads of items that change ranks, (n,)."""
        wire: Mask = self.is_head & (self.src != self.dst)
        return wire

    def of_rank(self, rank: int) -> Moves:
        """The moves in which `rank` takes part, in the same order."""
        if rank > LAST_RANK:  # numpy would compare it as a float
            return self[np.zeros(0, np.int64)]
        if len(self) <= _FEW:
            return self[(self.src == rank) | (self.dst == rank)]
        rows = [
            order[np.searchsorted(ends, rank, "left") : np.searchsorted(ends, rank, "right")]
            for order, ends in self._ends
        ]
        return self[np.union1d(*rows)]

    @cached_property
    def _ends(self) -> list[tuple[Ints, Ints]]:
        """Rows in order of sender, and of receiver, each with the ranks in that order."""
        orders = [(np.argsort(ranks, kind="stable"), ranks) for ranks in (self.src, self.dst)]
        return [(order, ranks[order]) for order, ranks in orders]

    @cached_property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return int(sum(getattr(self, field.name).nbytes for field in fields(self)))


def ragged(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """For every k all of `first[k] ... first[k] + count[k] - 1`: (the k of each, the numbers)."""
    owner = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    return owner, np.arange(len(owner)) + np.repeat(first - (ends - count), count)
