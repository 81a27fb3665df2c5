"""Layout: who holds which box of a tensor, and what still has to be reduced."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from shardwise.arguments import whole_number
from shardwise.errors import ArgumentTypeError, LayoutError
from shardwise.geometry.box import Box, Boxes, Ints, as_shape, frozen_ints
from shardwise.geometry.grid import Grid, grid_cuts
from shardwise.geometry.tiling import check_tiling
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["REDUCE_OPS", "Entry", "Layout", "ReduceOp", "check_layout"]

LAST_RANK = np.iinfo(np.int64).max  # that a layout may have
_MOST_LISTED = 256  # boxes in the listing
_MOST_PADDING = 64  # padded size of a grid, in units of the layout's
ReduceOp = Literal["sum", "avg", "max", "min", "product"]  # what a pending layout waits for
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)  # all of them


class Entry(NamedTuple):
    """One box on one rank. Entries that differ in `term` only are addends, in `rank` replicas."""

    box: Box
    rank: int
    term: int = 0


class Layout:
    """The global shape and all entries (box, rank, term): the truth about a sharded tensor.

    Immutable and hashable; equal to any layout with the same shape, entries and pending
    operation, whatever made it. Entries are kept in one order (by box, rank, term), so the local
    shards of a rank have one order too, that of `boxes_of(rank)`.

    The boxes must tile the shape. The same box may stand on several ranks (replicas) and, with a
    `pending` operation, with several terms (addends). A pending operation of which every box has
    one term is no operation: `pending` is None and terms are absent. Boxes without elements are
    entries like any other.

    >>> layout = Layout((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))], owners=[1, 0])
    >>> layout.boxes_of(0)
    (Box(start=(2, 0), stop=(4, 6)),)
    """

    shape: tuple[int, ...]
    boxes: Boxes  # (n, ndim)
    owners: Ints  # (n,): the rank of each box
    terms: Ints | None  # (n,): present only while something is pending
    pending: ReduceOp | None

    def __init__(
        self,
        shape: Sequence[int],
        boxes: Boxes | Iterable[Box],
        owners: Sequence[int] | Ints,
        *,
        terms: Sequence[int] | Ints | None = None,
        pending: ReduceOp | None = None,
    ) -> None:
        sizes = as_shape(shape)
        listed = boxes if isinstance(boxes, Boxes) else Boxes.of(boxes, len(sizes))
        ranks = _column(owners, len(listed), "owners")
        if pending is not None and pending not in REDUCE_OPS:
            raise LayoutError("pending", expected=f"None or one of {REDUCE_OPS}", got=repr(pending))
        if (terms is None) != (pending is None):
            raise LayoutError(
                "terms and pending",
                expected="both or neither",
                got="terms" if pending is None else f"pending {pending!r}",
                fix="Addends need both, e.g. terms=[0, 1], pending='sum'.",
            )
        numbers = _column([0] * len(listed) if terms is None else terms, len(listed), "terms")
        table = np.column_stack([listed.starts, listed.stops, ranks, numbers])
        order = _row_order(table)
        if order is not None:
            table, listed = table[order], listed[order]
            ranks, numbers = ranks[order], numbers[order]
        self._set(
            shape=sizes,
            boxes=listed,
            owners=frozen_ints(ranks),
            terms=frozen_ints(numbers) if pending else None,
            pending=pending,
        )
        self._check(table)
        if pending and not self._has_addends(table):
            self._set(terms=None, pending=None)

    @classmethod
    def of(
        cls, shape: Sequence[int], entries: Iterable[Entry], *, pending: ReduceOp | None = None
    ) -> Layout:
        """Layout of the given entries; other terms than 0 need a pending operation."""
        listed = [Entry(*entry) for entry in entries]
        if pending is None and any(entry.term for entry in listed):
            raise LayoutError(
                "entries with terms", expected="a pending operation", fix="Pass pending='sum'."
            )
        return cls(
            shape,
            (entry.box for entry in listed),
            [entry.rank for entry in listed],
            terms=[entry.term for entry in listed] if pending else None,
            pending=pending,
        )

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """Layout of a tensor that each of `ranks` holds whole."""
        return cls(shape, [Box.whole(shape)] * len(ranks), ranks)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __setattr__(self, name: str, value: object) -> None:
        raise LayoutError(
            f"Layout.{name} cannot be set", fix="A Layout is a value; make a new one."
        )

    def _check(self, table: Ints) -> None:
        """Raises unless the boxes tile and no rank holds one box and term twice."""
        check_tiling(self.boxes, self.shape, replicas=True).raise_if_bad(
            "layout", label=lambda row: f"{self.boxes[row]} on rank {self.owners[row]}"
        )
        twice = (table[1:] == table[:-1]).all(axis=1) & (self.boxes.is_full[1:])
        if twice.any():
            row = int(twice.argmax()) + 1
            raise LayoutError(
                f"rank {self.owners[row]} holds box {self.boxes[row]} twice",
                fix="Name each rank once per box; addends of one rank need different terms.",
            )

    def _has_addends(self, table: Ints) -> bool:
        """Whether some box has more than one term."""
        ndim = len(self.shape)
        full = table[self.boxes.is_full]
        same_box = (full[1:, : 2 * ndim] == full[:-1, : 2 * ndim]).all(axis=1)
        return bool((same_box & (full[1:, -1] != full[:-1, -1])).any())

    # -- questions about ranks ------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold at least one box, ascending."""
        return tuple(np.unique(self.owners).tolist())

    def rows_of(self, rank: int) -> Ints:
        """Rows of this layout's arrays that are on `rank`, ascending."""
        rank = whole_number(rank, "rank")
        by_rank, sorted_ranks = self._by_rank
        if rank > LAST_RANK:  # numpy would compare it as a float
            return by_rank[:0]
        first, last = (np.searchsorted(sorted_ranks, rank, side) for side in ("left", "right"))
        return by_rank[first:last]

    @cached_property
    def _by_rank(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.owners, kind="stable")
        return frozen_ints(order), frozen_ints(self.owners[order])

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """Boxes on `rank`, in the order of its local shards; empty if it holds none."""
        known: dict[int, tuple[Box, ...]] = self.__dict__.setdefault("_boxes_of", {})
        if rank not in known:
            known[rank] = tuple(self.boxes[self.rows_of(rank)])
        return known[rank]

    def terms_of(self, rank: int) -> tuple[int, ...]:
        """Term of each box of `boxes_of(rank)`; zeros when nothing is pending."""
        rows = self.rows_of(rank)
        return (0,) * len(rows) if self.terms is None else tuple(self.terms[rows].tolist())

    def replicas_of(self, box: Box, *, term: int | None = None) -> tuple[int, ...]:
        """Ranks that hold exactly `box`, ascending; of one addend only if `term` is given."""
        if getattr(box, "ndim", None) != self.ndim:
            raise LayoutError("box", expected=f"a Box of {self.ndim} dims", got=str(box))
        same = (self.boxes.starts == box.start).all(1) & (self.boxes.stops == box.stop).all(1)
        if term is not None:
            same &= self._terms_or_zero == term
        return tuple(np.unique(self.owners[same]).tolist())

    @property
    def _terms_or_zero(self) -> Ints:
        return np.zeros_like(self.owners) if self.terms is None else self.terms

    def bytes_per_rank(self, itemsize: int) -> dict[int, int]:
        """Bytes of local shards per rank of `ranks`."""
        itemsize = whole_number(itemsize, "itemsize", least=1)
        held = np.zeros(len(self.ranks), np.int64)
        np.add.at(held, np.searchsorted(self.ranks, self.owners), self.boxes.volumes)
        return {r: n * itemsize for r, n in zip(self.ranks, held.tolist(), strict=True)}

    @cached_property
    def box_rows(self) -> Ints:
        """First row of each distinct box, then the number of rows: rows `[k]:[k + 1]` are box k."""
        new = np.ones(len(self) + 1, dtype=bool)
        new[1:-1] = False
        for column in (*self.boxes.starts.T, *self.boxes.stops.T):  # faster than whole rows
            new[1:-1] |= column[1:] != column[:-1]
        return frozen_ints(np.flatnonzero(new))

    @property
    def has_every_box_once(self) -> bool:
        """Whether no box stands in two entries: no replicas, no addends."""
        return len(self.box_rows) > len(self)

    @cached_property
    def num_terms(self) -> Ints:
        """Number of different terms of each distinct box, (boxes,); ones if nothing is pending."""
        first = self.box_rows
        if self.terms is None:
            return frozen_ints(np.ones(len(first) - 1, np.int64))
        box = np.repeat(np.arange(len(first) - 1), np.diff(first))
        order = np.lexsort((self.terms, box))
        terms, box = self.terms[order], box[order]
        new = np.ones(len(self), dtype=bool)
        new[1:] = (terms[1:] != terms[:-1]) | (box[1:] != box[:-1])
        return frozen_ints(np.bincount(box[new], minlength=len(first) - 1))

    # -- questions about the whole ---------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.owners)

    def __iter__(self) -> Iterator[Entry]:
        rows = zip(self.boxes, self.owners.tolist(), self._terms_or_zero.tolist(), strict=True)
        return (Entry(*row) for row in rows)

    @cached_property
    def bar(self) -> Layout:
        """The same boxes on the same ranks with nothing pending: the layout of a gradient.

        Addends of one box on one rank become one entry.
        """
        if self.pending is None:
            return self
        table = np.column_stack([self.boxes.starts, self.boxes.stops, self.owners])
        new = np.ones(len(self), dtype=bool)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
        return Layout(self.shape, self.boxes[new], self.owners[new])

    def is_whole(self, dim: int) -> bool:
        """Whether no box cuts `dim` (negative dims count from the end)."""
        dim = whole_number(dim, "dim", least=None)
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(
                "dim", expected=f"one of the {self.ndim} dims of {self.shape}", got=dim
            )
        full = self.boxes.is_full
        return bool((self.boxes.shapes[full, dim] == self.shape[dim]).all())

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank of `ranks` holds the whole tensor and nothing is pending."""
        whole = Box.whole(self.shape)
        return self.pending is None and self.replicas_of(whole) == self.ranks

    @cached_property
    def grid(self) -> Grid | None:
        """The factored form if the boxes are a grid, else None (also for empty tensors).

        None, too, if few cells have so many owners that the padding would be most of it.
        """
        first, count = self.box_rows[:-1], np.diff(self.box_rows)
        is_full = self.boxes.is_full[first]
        first, count = first[is_full], count[is_full]
        if len(count) * count.max(initial=0) > _MOST_PADDING * len(self):
            return None
        cuts = grid_cuts(self.boxes.starts.take(first, axis=0), self.shape)
        if cuts is None:
            return None
        slot = np.arange(count.max())
        rows = np.where(slot < count[:, None], first[:, None] + slot, -1)
        owners = np.where(rows < 0, -1, self.owners[rows])
        shape = tuple(len(along) - 1 for along in cuts)
        return Grid(
            tuple(map(frozen_ints, cuts)),
            frozen_ints(owners.reshape(*shape, -1)),
            frozen_ints(rows.reshape(*shape, -1)),
        )

    # -- value semantics --------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the value, the same in every process: what ranks compare to agree."""
        digest = hashlib.blake2b(repr((self.shape, self.pending)).encode(), digest_size=16)
        for array in (self.boxes.starts, self.boxes.stops, self.owners, self._terms_or_zero):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _hash(self) -> int:
        return hash(self.fingerprint)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        # 128 bits of a cryptographic hash over all of it: equal for no two layouts that differ.
        return self.fingerprint == other.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.shape, self.boxes, self.owners, self.terms, self.pending)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    # -- words -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """One line: shape, form, ranks, what is pending."""
        return f"Layout({self.shape}: {self.summary})"

    @property
    def summary(self) -> str:
        """Form, ranks and what is pending, in few words."""
        form = f"{len(self)} irregular boxes"
        if 0 in self.shape:
            form = "no elements"
        elif self.is_replicated:
            form = "replicated" if len(self.ranks) > 1 else "whole"
        elif self.grid is not None:
            form = "grid " + ("x".join(map(str, self.grid.shape)) or "of one cell")
            if (copies := self.grid.owners.shape[-1]) > 1:
                form += f", up to {copies} {'entries' if self.pending else 'replicas'} per cell"
        pending = "" if self.pending is None else f", pending {self.pending}"
        return f"{form}, {ranks_text(self.ranks)}{pending}"

    @property
    def listing(self) -> str:
        """The first boxes with their ranks and terms, to tell layouts that look alike apart."""
        entries = [
            f"{box} on {rank}" + (f" term {term}" if self.pending else "")
            for box, rank, term in islice(self, _MOST_LISTED)
        ]
        return ", ".join([*entries, "..."] if len(self) > len(entries) else entries)

    def _repr_html_(self) -> str:
        """A small picture, for notebooks."""
        from shardwise.viz.notebook import layout_html

        return layout_html(self)

    def describe(self, *, itemsize: int | None = None, max_lines: int = 32) -> str:
        """The line of `repr`, then a line a rank: its boxes, elements and (given a size) bytes."""
        lines = [repr(self)]
        for rank in self.ranks[:max_lines]:
            rows = self.rows_of(rank)
            elements = int(self.boxes[rows].volumes.sum())
            size = f"{elements} elements" if itemsize is None else f"{elements * itemsize} bytes"
            names = [
                f"{self.boxes[row]}" + (f" term {self._terms_or_zero[row]}" if self.pending else "")
                for row in rows[:6].tolist()
            ]
            more = f" and {len(rows) - 6} more" if len(rows) > 6 else ""
            lines.append(f"  rank {rank}: {', '.join(names)}{more} ({size})")
        if len(self.ranks) > max_lines:
            lines.append(f"  and {len(self.ranks) - max_lines} more ranks")
        return "\n".join(lines)

    __str__ = __repr__


def check_layout(value: object, what: str) -> None:
    """Raises an error about `what` unless it is a Layout; most pass a spec."""
    if not isinstance(value, Layout):
        raise ArgumentTypeError(
            what,
            expected="a Layout",
            got=type(value).__name__,
            fix="Call spec.layout(shape) first.",
        )


def _restore(
    shape: tuple[int, ...], boxes: Boxes, owners: Ints, terms: Ints | None, pending: ReduceOp | None
) -> Layout:
    return Layout(shape, boxes, owners, terms=terms, pending=pending)


def _column(values: Sequence[int] | Ints, length: int, what: str) -> Ints:
    """`values` as an array of one whole number >= 0 per box."""
    column = np.asarray(values)
    if column.shape != (length,) or (length and column.dtype.kind not in "iu"):
        raise LayoutError(
            what, expected=f"{length} whole numbers, one per box", got=f"{values!r:.80}"
        )
    if length and (column.min() < 0 or column.max() >= 2**63):
        raise LayoutError(
            what, expected="numbers >= 0 and below 2**63", got=f"{column.min()} to {column.max()}"
        )
    return column.astype(np.int64)


def _row_order(table: Ints) -> Ints | None:
    """Order that sorts the rows, or None if they are sorted (the usual case, found in O(n))."""
    step = table[1:] - table[:-1]
    lead = np.take_along_axis(step, (step != 0).argmax(axis=1)[:, None], axis=1)
    return np.lexsort(table.T[::-1]) if (lead < 0).any() else None
