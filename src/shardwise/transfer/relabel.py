"""Relabelling: which rank should take which part of the target, so that the least has to move.

[Note: credit] Label l is a rank as the targets name it. Without pending reductions, a label's part
costs the bytes of it that its rank does not hold before. So a choice of ranks saves the sum of
`credit[rank, label]`, the bytes that the rank holds of the label's part, and the best choice is an
assignment problem, solved exactly.

A reduction is cheaper by one region if a destination holds an addend, so such regions are credited
in the same way. That is exact if the region has one destination and every rank holds one addend at
most; otherwise it is a guess, whose outcome is measured: the answer is never worse than to change
nothing, as long as that is allowed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import items, whole_number, whole_numbers
from shardwise.errors import ArgumentTypeError, PlanError
from shardwise.geometry import Layout, check_layout
from shardwise.transfer.moves import ragged
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.units import format_bytes
from shardwise.words import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.geometry.box import Ints

__all__ = ["Relabelling", "relabel"]

_BATCH = 1 << 22  # pairs of a holder and a label at a time, to bound memory


@dataclass(frozen=True, slots=True)
class Relabelling:
    """New ranks for the labels of a set of targets, and what that saves.

    The bytes are those of the plans, before with the targets as they were given.
    """

    labels: tuple[int, ...]  # ascending
    ranks: tuple[int, ...]  # of each label
    bytes_before: int
    bytes_after: int

    @property
    def new_rank(self) -> Mapping[int, int]:
        """label -> rank"""
        return MappingProxyType(dict(zip(self.labels, self.ranks, strict=True)))

    @property
    def is_identity(self) -> bool:
        """Whether every label keeps its rank."""
        return self.labels == self.ranks

    @property
    def saving(self) -> int:
        """Bytes that need not move; below 0 if the ranks that were allowed cost more."""
        return self.bytes_before - self.bytes_after

    @property
    def saving_share(self) -> float:
        """The part of the bytes before that need not move, 0.0 to 1.0."""
        return self.saving / self.bytes_before if self.bytes_before else 0.0

    def apply(self, layout: Layout) -> Layout:
        """`layout` with its labels on their new ranks."""
        check_layout(layout, "layout")
        labels = np.array(self.labels, np.int64)
        unknown = np.setdiff1d(layout.owners, labels)
        if len(unknown):
            raise PlanError(
                "ranks of a layout to relabel",
                expected="ranks of the targets that the relabelling was made for",
                got=ranks_text(unknown.tolist()),
                fix="Pass every target to relabel().",
            )
        owners = np.array(self.ranks, np.int64)[np.searchsorted(labels, layout.owners)]
        return Layout(
            layout.shape, layout.boxes, owners, terms=layout.terms, pending=layout.pending
        )

    def explain(self, *, max_lines: int = 24) -> str:
        """What it saves, and which labels change ranks, for people."""
        max_lines = whole_number(max_lines, "max_lines")
        changed = [(a, b) for a, b in zip(self.labels, self.ranks, strict=True) if a != b]
        size = f"{format_bytes(self.bytes_after)} to move"
        if not changed:
            return f"every one of {plural(len(self.labels), 'label')} keeps its rank: {size}"
        verb, change = ("saves", self.saving) if self.saving >= 0 else ("costs", -self.saving)
        lines = [
            f"{len(changed):,} of {plural(len(self.labels), 'label')} change ranks: {size} "
            f"instead of {format_bytes(self.bytes_before)}",
            f"{verb} {format_bytes(change)} ({abs(self.saving_share):.1%})",
            *(f"  label {label} -> rank {rank}" for label, rank in changed[:max_lines]),
        ]
        if len(changed) > max_lines:
            lines.append(f"  ... and {len(changed) - max_lines:,} more")
        return "\n".join(lines)


def relabel(
    pairs: Iterable[tuple[Layout, Layout, int]], *, ranks: Iterable[int] | None = None
) -> Relabelling:
    """The ranks for the parts of a set of targets with which the fewest bytes move in total.

    Each pair is (source, target, itemsize) of one tensor. The ranks of the targets are labels: all
    that one label holds goes to one rank, one of `ranks` (by default the targets' own). Exact if
    nothing is pending, else a good guess that is never worse than the targets as they are (unless
    `ranks` leaves some of those out). A label that gains nothing keeps its rank.

    >>> from shardwise.geometry import Box
    >>> halves = [Box((0,), (2,)), Box((2,), (4,))]
    >>> source, target = Layout((4,), halves, [0, 1]), Layout((4,), halves, [1, 0])
    >>> relabelling = relabel([(source, target, 4)])
    >>> dict(relabelling.new_rank), relabelling.saving
    ({0: 1, 1: 0}, 16)
    """
    tensors = _counted(pairs)
    labels = tuple(sorted({rank for plan in tensors for rank in plan.target.ranks}))
    allowed = labels if ranks is None else _allowed(ranks, labels)
    everyone = tuple(sorted({*labels, *allowed}))
    credit = _credits(tensors, everyone, labels)
    identity = np.searchsorted(everyone, labels)
    chosen = _assigned(credit, np.searchsorted(everyone, allowed), identity)
    before = _measured(tensors, labels, labels)
    new_ranks = tuple(np.array(everyone, np.int64)[chosen].tolist())
    after = before if new_ranks == labels else _measured(tensors, labels, new_ranks)
    if after >= before and set(labels) <= set(allowed):
        new_ranks, after = labels, before
    return Relabelling(labels, new_ranks, before, after)


def _counted(pairs: Iterable[tuple[Layout, Layout, int]]) -> Counter[TransferPlan]:
    """Plans and how often each occurs: models have many tensors and few layouts."""
    tensors: Counter[TransferPlan] = Counter()
    for pair in items(pairs, "pairs", of="(source, target, itemsize)"):
        if not isinstance(pair, Sequence) or len(pair) != 3:
            raise ArgumentTypeError(
                "pairs", expected="triples (source, target, itemsize)", got=f"{pair!r:.80}"
            )
        tensors[TransferPlan(*pair)] += 1
    return tensors


def _allowed(ranks: Iterable[int], labels: Sequence[int]) -> tuple[int, ...]:
    listed = whole_numbers(ranks, "ranks")
    if len(set(listed)) != len(listed):
        twice = next(rank for rank, count in Counter(listed).items() if count > 1)
        raise PlanError("ranks", expected="each rank once", got=f"rank {twice} twice")
    if len(listed) < len(labels):
        raise PlanError(
            "ranks",
            expected=f"at least {len(labels)}, one for every rank of the targets",
            got=len(listed),
            fix="Allow more ranks, or make targets for fewer.",
        )
    return tuple(sorted(listed))


# -- credit ----------------------------------------------------------------------------------


def _credits(
    tensors: Mapping[TransferPlan, int], ranks: Sequence[int], labels: Sequence[int]
) -> Ints:
    """Bytes that each rank holds of each label's part, (ranks, labels). [Note: credit]"""
    found = np.zeros(len(ranks) * len(labels), np.int64)
    for plan, count in tensors.items():
        holders, wanting = _Holders.of(plan.source, ranks), _Holders.of(plan.target, labels)
        regions = plan.regions
        nbytes = regions.volumes * plan.itemsize * count
        num_holders = holders.count[regions.source_box]
        num_pairs = num_holders * wanting.count[regions.target_box]
        for rows in _batches(num_pairs):
            region, pair = ragged(np.zeros(len(num_pairs[rows]), np.int64), num_pairs[rows])
            region += rows.start
            wanted, held = np.divmod(pair, num_holders[region])
            rank = holders.slots[holders.first[regions.source_box[region]] + held]
            label = wanting.slots[wanting.first[regions.target_box[region]] + wanted]
            np.add.at(found, rank * len(labels) + label, nbytes[region])
    return found.reshape(len(ranks), len(labels))


@dataclass(frozen=True, slots=True, eq=False)
class _Holders:
    """Who holds each distinct box of a layout, as places in a list of ranks; others are left out.

    Box k is with `slots[first[k] : first[k] + count[k]]`, each once, whatever terms it has.
    """

    slots: Ints
    first: Ints
    count: Ints

    @classmethod
    def of(cls, layout: Layout, ranks: Sequence[int]) -> _Holders:
        listed = np.array(ranks, np.int64)
        box = np.repeat(np.arange(len(layout.box_rows) - 1), np.diff(layout.box_rows))
        keep = np.isin(layout.owners, listed)
        # Rows of one box and one rank are neighbours, as a layout is sorted by box, rank, term.
        keep[1:] &= (box[1:] != box[:-1]) | (layout.owners[1:] != layout.owners[:-1])
        count = np.bincount(box[keep], minlength=len(layout.box_rows) - 1).astype(np.int64)
        slots = np.searchsorted(listed, layout.owners[keep])
        return cls(slots, np.cumsum(count) - count, count)


def _batches(num_pairs: Ints) -> list[slice]:
    """Runs of regions that have about `_BATCH` pairs together."""
    number = (np.cumsum(num_pairs) - num_pairs) // _BATCH
    ends = (np.flatnonzero(np.diff(number)) + 1).tolist()
    return [slice(a, b) for a, b in itertools.pairwise([0, *ends, len(num_pairs)])]


# -- assignment ------------------------------------------------------------------------------


def _assigned(credit: Ints, allowed: Ints, identity: Ints) -> Ints:
    """The row of `credit` for every label: the most credit, and then the fewest changes."""
    num_labels = len(identity)
    own = credit[identity, np.arange(num_labels)]
    best = credit[allowed].max(axis=0, initial=0)
    if np.isin(identity, allowed).all() and (own == best).all():
        return identity  # nobody can do better, which is common, and needs no scipy
    from scipy.optimize import linear_sum_assignment  # takes a while to load

    value = credit // max(
        int(np.gcd.reduce(credit, axis=None)), 1
    )  # small numbers, exact as floats
    score = value[allowed].astype(np.float64) * (num_labels + 1)
    score += allowed[:, None] == identity  # to keep a rank is worth less than any byte
    label, slot = linear_sum_assignment(score.T, maximize=True)
    chosen = np.empty(num_labels, np.int64)
    chosen[label] = allowed[slot]
    return chosen


# -- bytes -----------------------------------------------------------------------------------


def _measured(
    tensors: Mapping[TransferPlan, int], labels: tuple[int, ...], ranks: tuple[int, ...]
) -> int:
    """Bytes of the plans with the labels on these ranks."""
    change = Relabelling(labels, ranks, 0, 0)
    total = 0
    for given, count in tensors.items():
        plan = given
        if not change.is_identity:
            plan = TransferPlan(given.source, change.apply(given.target), given.itemsize)
        # Copies meet their lower bound, which is found faster than the plan.
        total += count * (plan.total_bytes if plan.has_pending else plan.lower_bound)
    return total
