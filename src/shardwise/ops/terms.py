"""Who has what of the result of a reduction.

[Note: cells and terms] The result is cut where the tensor is cut along the dims that are kept;
its boxes are *cells*. Where boxes of the tensor lie askew, so that what they project to overlaps in
part, the cells are cut along all of their edges. Each box of the tensor is a share of every cell
that it projects to. The shares of a cell that a rank holds are put together at once if ranks
hold equal or disjoint sets of them; else each stays its own. What comes of it are the *terms* of
the cell: ranks with the same shares are replicas of one term.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.geometry import Box, Layout
from shardwise.ops.work import number_work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.geometry import ReduceOp
    from shardwise.ops.rule import Operand

__all__ = ["Reduced", "Share", "Terms", "kept_box", "reduced_of", "terms_of"]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Which dims of a tensor a call reduces, and what is left of them."""

    shape: tuple[int, ...]  # of the tensor
    dims: tuple[int, ...]  # ascending
    keepdim: bool = False
    width: int = 1  # what is left of a reduced dim, if it is kept
    group: tuple[int, int] | None = None  # a dim that is kept, of so many neighbours one

    @property
    def is_full(self) -> bool:
        """Whether all dims are reduced, to one number."""
        return len(self.dims) == len(self.shape) and self.width == 1

    @property
    def count(self) -> int:
        """How many elements make one of the result."""
        count = math.prod(self.shape[dim] for dim in self.dims)
        return count if self.group is None else count * self.group[1]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the result, if reduced dims are kept."""
        kept = [self.width if d in self.dims else n for d, n in enumerate(self.shape)]
        if self.group is not None:
            kept[self.group[0]] //= self.group[1]
        return tuple(kept)

    def squeezed(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """What is one per dim of the tensor, for the dims of the result."""
        kept = (n for d, n in enumerate(sizes) if self.keepdim or d not in self.dims)
        return tuple(kept)

    def result_box(self, cell: Box) -> Box:
        """A cell, in the result."""
        return Box(self.squeezed(cell.start), self.squeezed(cell.stop))

    def result_shape(self) -> tuple[int, ...]:
        """The shape that the op gives."""
        return self.squeezed(self.kept_shape)


class Share(NamedTuple):
    """What a local piece has for a cell: the part of what the piece is reduced to."""

    piece: int
    part: tuple[slice, ...] | None = None  # per dim of the tensor; None: all of it


@dataclass(frozen=True, slots=True)
class Terms:
    """Who has what of the result of a reduction. [Note: cells and terms]"""

    reduced: Reduced
    holders: dict[Box, dict[int, tuple[int, ...]]]  # cell -> rank -> its terms
    shares: dict[tuple[Box, int], tuple[Share, ...]]  # of this rank: (cell, term) -> shares
    is_whole: bool  # whether no reduced dim is cut: every cell has one share

    @property
    def num_slots(self) -> int:
        """The largest number of terms of a cell."""
        return max((self.count(cell) for cell in self.holders), default=1)

    def count(self, cell: Box) -> int:
        """The number of terms of a cell."""
        return 1 + max(max(terms) for terms in self.holders[cell].values())

    def layout(self, op: ReduceOp | None) -> Layout:
        """The result with its terms pending; None: where there is one term per cell."""
        rows = [
            (self.reduced.result_box(cell), rank, term)
            for cell, ranks in self.holders.items()
            for rank, terms in ranks.items()
            for term in terms
        ]
        boxes, owners = [box for box, _, _ in rows], [rank for _, rank, _ in rows]
        shape = self.reduced.result_shape()
        if op is None:
            return Layout(shape, boxes, owners)
        return Layout(shape, boxes, owners, terms=[term for _, _, term in rows], pending=op)


def reduced_of(
    operand: Operand, dim: Any, keepdim: bool = False, *, width: int = 1
) -> Reduced | None:
    """The dims that torch means by `dim`: one, several, none or None for all; None: unclear."""
    ndim = len(operand.shape)
    listed = dim if isinstance(dim, list | tuple) else (dim,)
    if dim is None or not listed or not ndim:
        return Reduced(operand.shape, tuple(range(ndim)), keepdim, width)
    if not all(type(one) is int for one in listed):
        return None
    return Reduced(operand.shape, tuple(sorted({one % ndim for one in listed})), keepdim, width)


def kept_box(box: Box, reduced: Reduced) -> Box:
    """The part of the result that a box has a share of, reduced dims kept."""
    dims, width = reduced.dims, reduced.width
    start = [0 if d in dims else low for d, low in enumerate(box.start)]
    stop = [width if d in dims else high for d, high in enumerate(box.stop)]
    if reduced.group is not None:
        dim, size = reduced.group
        start[dim], stop[dim] = start[dim] // size, -(-stop[dim] // size)
    return Box(tuple(start), tuple(stop))


def terms_of(layout: Layout, reduced: Reduced, rank: int, *, along: int | None = None) -> Terms:
    """Who has which terms, of a tensor with elements.

    `along`: shares are not put together, and the terms of a cell are in the order of this dim.
    """
    empty = {(box, owner) for box, owner, _ in layout if not box.volume}
    full = [entry for entry in layout if entry.box.volume]
    cells = _cells({kept_box(entry.box, reduced) for entry in full}, reduced.kept_shape)
    users: dict[Box, dict[int, dict[Any, None]]] = defaultdict(lambda: defaultdict(dict))
    for box, owner, term in full:
        for cell in cells[kept_box(box, reduced)]:
            users[cell][owner][box, term] = None
    holders: dict[Box, dict[int, tuple[int, ...]]] = {}
    shares: dict[tuple[Box, int], tuple[Share, ...]] = {}
    mine = {
        entry: k
        for k, entry in enumerate(zip(layout.boxes_of(rank), layout.terms_of(rank), strict=True))
    }
    for cell, ranks in users.items():
        number = number_work(cell, ranks) if along is None else _in_order(ranks, along)
        holders[cell] = {
            owner: tuple(sorted({number[one] for one in held})) for owner, held in ranks.items()
        }
        found: dict[int, list[Share]] = defaultdict(list)
        for one in ranks.get(rank, ()):
            found[number[one]].append(_share(mine[one], kept_box(one[0], reduced), cell))
        shares |= {(cell, term): tuple(listed) for term, listed in found.items()}
    # A box without elements that is so along a dim that is kept is one of the result, too.
    for box, owner in sorted(empty):
        cell = kept_box(box, reduced)
        if not cell.volume:
            holders.setdefault(cell, {})[owner] = (0,)
    is_whole = all(len({*_all_shares(ranks)}) == 1 for ranks in users.values())
    return Terms(reduced, holders, shares, is_whole)


def _all_shares(ranks: Mapping[int, Mapping[tuple[Box, int], None]]) -> list[tuple[Box, int]]:
    return [one for held in ranks.values() for one in held]


def _in_order(
    ranks: Mapping[int, Mapping[tuple[Box, int], None]], along: int
) -> dict[tuple[Box, int], int]:
    listed = sorted({*_all_shares(ranks)}, key=lambda one: one[0].start[along])
    return {one: k for k, one in enumerate(listed)}


def _cells(parts: set[Box], shape: tuple[int, ...]) -> dict[Box, list[Box]]:
    """The cells that each part of the result consists of. [Note: cells and terms]"""
    if sum(part.volume for part in parts) == math.prod(shape):
        return {part: [part] for part in parts}
    cuts = [
        sorted({edge for part in parts for edge in (part.start[d], part.stop[d])})
        for d in range(len(shape))
    ]
    found = {}
    for part in parts:
        steps = [
            [(a, b) for a, b in pairwise(along) if low <= a and b <= high]
            for along, low, high in zip(cuts, part.start, part.stop, strict=True)
        ]
        found[part] = [Box.of(step) for step in product(*steps)]
    return found


def _share(piece: int, part: Box, cell: Box) -> Share:
    return Share(piece, None if part == cell else cell.relative_to(part).slices())
