"""Schedule: the rounds in which plans are carried out, so that staging stays under a cap.

[Note: staging] Bytes on their way that are in neither a source nor a target shard: messages being
packed, and messages that have arrived and wait to be unpacked or added. With a cap, everything
that a rank sends or receives in a round counts, so the cap holds on every device, for every
memory format. Without one, what can go straight from shard to shard does not count, and rounds
are used only if staging would be larger than the largest output.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import cap, items, whole_number
from shardwise.errors import ArgumentTypeError, PlanError
from shardwise.transfer.moves import NO_GROUP, Moves
from shardwise.transfer.program import RankProgram, contiguous_in
from shardwise.transfer.rounds import RoundCutter
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.transfer.plan import TransferPlan

__all__ = ["LEAST_CAP", "Schedule", "cut_rounds", "make_schedule"]

LEAST_CAP = 16 << 20  # bytes of staging that are always allowed when nobody asked for a cap


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rounds of moves for a set of tensors. Round k+1 of a rank starts when its round k is over.

    `rounds[k][t]` are the moves of tensor t in round k; a move's step decides as in the plan
    whether it leaves a source or a target shard. Rounds of step 0 come before those of step 1.
    """

    plans: tuple[TransferPlan, ...]
    max_bytes: int | None
    rounds: tuple[tuple[Moves, ...], ...]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Ranks that hold something before or after."""
        return frozenset(rank for plan in set(self.plans) for rank in plan.ranks)

    @cached_property
    def _staging(self) -> tuple[dict[int, int], ...]:
        """Per round, the bytes of staging of each rank that has any."""
        is_packed = len(self.plans) > 1 or self.max_bytes is not None
        return tuple(_staging(self.plans, moves, is_packed=is_packed) for moves in self.rounds)

    def staging_bytes(self, rank: int) -> int:
        """Most bytes of staging that `rank` has in a round. [Note: staging]"""
        rank = whole_number(rank, "rank")
        return max((staged.get(rank, 0) for staged in self._staging), default=0)

    def program(self, rank: int) -> RankProgram:
        """What `rank` does; cached."""
        known: dict[int, RankProgram] = self.__dict__.setdefault("_programs", {})
        if type(rank) is int and rank in known:  # every exchange asks: no further look at the rank
            return known[rank]
        rank = whole_number(rank, "rank")
        if rank not in known:
            known[rank] = RankProgram.of(self, rank)
        return known[rank]

    def __repr__(self) -> str:
        most = "" if self.max_bytes is None else f", at most {self.max_bytes} bytes of staging"
        tensors, rounds = plural(len(self.plans), "tensor"), plural(len(self.rounds), "round")
        return f"Schedule({tensors} in {rounds}{most})"


def make_schedule(plans: Sequence[TransferPlan], max_bytes: int | None = None) -> Schedule:
    """The rounds of `plans`, which are carried out together; cached."""
    listed = items(plans, "plans of a schedule", of="TransferPlans")
    # By what they have, because the file of TransferPlan imports this one.
    if strange := [
        kind for kind in dict.fromkeys(map(type, listed)) if not hasattr(kind, "schedule")
    ]:
        raise ArgumentTypeError(
            "plans of a schedule",
            expected="TransferPlans",
            got=f"a {strange[0].__name__} among them",
            fix="Make each with shardwise.plan_reshard(source, target, itemsize).",
        )
    if not listed:
        return cut_rounds((), cap(max_bytes))
    # Kept by the first plan, in whose weight its moves count, and forgotten with it.
    first: TransferPlan = listed[0]
    return first.schedule_with(tuple(listed[1:]), cap(max_bytes))


def cut_rounds(plans: tuple[TransferPlan, ...], max_bytes: int | None) -> Schedule:
    """A new schedule of these plans, which the first of them keeps."""
    steps = _steps(plans)
    most = max_bytes
    if most is None:
        outputs: dict[int, int] = defaultdict(int)
        for plan in plans:
            for rank, held in plan.output_bytes.items():
                outputs[rank] += held
        most = max(LEAST_CAP, *outputs.values(), 0)
    is_packed = len(plans) > 1 or max_bytes is not None
    cutters: list[RoundCutter | None] = []  # of each step; None if it takes one round
    for moves in steps:
        staged = max(_staging(plans, moves, is_packed=is_packed).values(), default=0)
        cutters.append(None if staged <= most else RoundCutter(plans, moves))
    if max_bytes is not None:
        _check_cap(max_bytes, max((cutter.needed for cutter in cutters if cutter), default=0))
    rounds: list[tuple[Moves, ...]] = []
    for moves, cutter in zip(steps, cutters, strict=True):
        if cutter is None:
            rounds.append(moves)
        elif max_bytes is not None:
            rounds += cutter.cut(max_bytes)
        else:
            # Somewhat less than it may be, since rounds leave holes in the allocator's memory.
            rounds += cutter.cut(max(most * 3 // 4, cutter.needed))
    return Schedule(plans, max_bytes, tuple(rounds))


def _check_cap(max_bytes: int, needed: int) -> None:
    if max_bytes < needed:
        raise PlanError(
            "max_bytes",
            expected=f"at least {needed}, which hold one element of every message to a rank",
            got=max_bytes,
            fix="Allow more bytes of staging.",
        )


def _steps(plans: Sequence[TransferPlan]) -> list[tuple[Moves, ...]]:
    """The moves of each step, tensor by tensor; no second step if nothing is spread."""
    by_step = {
        plan: [plan.moves[plan.moves.step == step] for step in (0, 1)]
        if plan.moves.step.any()
        else [plan.moves, Moves.concatenate([], plan.source.ndim)]
        for plan in set(plans)
    }
    steps = [tuple(by_step[plan][step] for plan in plans) for step in (0, 1)]
    return steps if any(len(moves) for moves in steps[1]) else steps[:1]


def _staging(
    plans: Sequence[TransferPlan], moves: Sequence[Moves], *, is_packed: bool
) -> dict[int, int]:
    """Bytes of staging per rank in a round; `is_packed` if everything counts. [Note: staging]"""
    times: dict[tuple[TransferPlan, int], int] = defaultdict(int)
    listed: dict[tuple[TransferPlan, int], Moves] = {}
    for plan, part in zip(plans, moves, strict=True):
        if len(part):
            times[plan, id(part)] += 1
            listed[plan, id(part)] = part
    nothing = np.zeros(0, np.int64)
    ends = [(nothing, nothing)]  # ranks, and bytes on each
    for (plan, key), count in times.items():
        part = listed[plan, key]
        wire = np.flatnonzero(part.is_wire)
        nbytes = part.volumes[wire] * plan.itemsize * count
        every = np.ones(len(wire), dtype=bool)
        sends, receives = (every, every) if is_packed else _is_staged(plan, part, part[wire])
        ends += [
            (part.src[wire[sends]], nbytes[sends]),
            (part.dst[wire[receives]], nbytes[receives]),
        ]
    ranks, sizes = (np.concatenate(columns) for columns in zip(*ends, strict=True))
    distinct, slot = np.unique(ranks, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, slot, sizes)
    return dict(zip(distinct.tolist(), sums.tolist(), strict=True))


def _is_staged(plan: TransferPlan, part: Moves, wire: Moves) -> tuple[np.ndarray, np.ndarray]:
    """Which messages cannot leave from, and arrive in, the shard itself."""
    ranks = np.array(plan.ranks, np.int64)
    src, dst = np.searchsorted(ranks, wire.src), np.searchsorted(ranks, wire.dst)
    pair = src * len(ranks) + dst
    _, slot, num_pieces = np.unique(pair, return_inverse=True, return_counts=True)
    alone = num_pieces[slot] == 1
    item = np.cumsum(part.is_head) - 1
    is_summed = (np.bincount(item)[item] > 1)[part.is_wire] if len(part) else np.empty(0, bool)
    leaves = np.zeros(len(wire), dtype=bool)
    for step, layout in enumerate((plan.source, plan.target)):
        rows = wire.step == step
        leaves[rows] = contiguous_in(layout, wire.source_row[rows], wire[rows])
    arrives = contiguous_in(plan.target, wire.target_row, wire) & (wire.group == NO_GROUP)
    return ~(alone & leaves & ~is_summed), ~(alone & arrives)
