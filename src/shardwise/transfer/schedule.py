"""Schedule: the rounds in which plans are carried out, so that staging stays under a cap.

[Note: staging] Bytes on their way that are in neither a source nor a target shard: messages being
packed, and messages that have arrived and wait to be unpacked or added. With a cap, everything
that a rank sends or receives in a round counts, so the cap holds on every device, for every
memory format. Without one, what can go straight from shard to shard does not count, and rounds
are used only if staging would be larger than the largest output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.arguments import whole_number
from shardwise.errors import PlanError
from shardwise.geometry import flat_range_boxes
from shardwise.transfer.moves import NO_GROUP, Moves
from shardwise.transfer.program import RankProgram, contiguous_in
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.geometry.box import Ints
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
        return max((staged.get(rank, 0) for staged in self._staging), default=0)

    def program(self, rank: int) -> RankProgram:
        """What `rank` does; cached."""
        known: dict[int, RankProgram] = self.__dict__.setdefault("_programs", {})
        if rank not in known:
            known[rank] = RankProgram.of(self, rank)
        return known[rank]

    def __repr__(self) -> str:
        cap = "" if self.max_bytes is None else f", at most {self.max_bytes} bytes of staging"
        tensors, rounds = plural(len(self.plans), "tensor"), plural(len(self.rounds), "round")
        return f"Schedule({tensors} in {rounds}{cap})"


def make_schedule(plans: Sequence[TransferPlan], max_bytes: int | None = None) -> Schedule:
    """The rounds of `plans`, which are carried out together; cached."""
    if len(plans) == 1:
        return plans[0].schedule(max_bytes)
    if max_bytes is not None:
        max_bytes = whole_number(max_bytes, "max_bytes", least=1)
    return _schedule_of_set(tuple(plans), max_bytes)


@lru_cache(maxsize=32)
def _schedule_of_set(plans: tuple[TransferPlan, ...], max_bytes: int | None) -> Schedule:
    return cut_rounds(plans, max_bytes)


def cut_rounds(plans: tuple[TransferPlan, ...], max_bytes: int | None) -> Schedule:
    """A new schedule of these plans; a single plan keeps its own (`TransferPlan.schedule`)."""
    steps = _steps(plans)
    cap = max_bytes
    if cap is None:
        outputs: dict[int, int] = defaultdict(int)
        for plan in plans:
            for rank, held in plan.output_bytes.items():
                outputs[rank] += held
        cap = max(LEAST_CAP, *outputs.values(), 0)
    rounds: list[tuple[Moves, ...]] = []
    for moves in steps:
        staged = _staging(plans, moves, is_packed=len(plans) > 1 or max_bytes is not None)
        if max(staged.values(), default=0) <= cap:
            rounds.append(moves)
        else:
            rounds += _Rounds(plans, moves, cap, is_asked=max_bytes is not None).cut()
    return Schedule(plans, max_bytes, tuple(rounds))


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
        times[plan, id(part)] += 1
        listed[plan, id(part)] = part
    found: dict[int, int] = defaultdict(int)
    for (plan, key), count in times.items():
        part = listed[plan, key]
        wire = part[part.is_wire]
        sends, receives = (np.ones(len(wire), dtype=bool) for _ in range(2))
        if not is_packed:
            sends, receives = _is_staged(plan, part, wire)
        nbytes = wire.volumes * plan.itemsize * count
        for ranks, staged in ((wire.src, sends), (wire.dst, receives)):
            distinct, slot = np.unique(ranks[staged], return_inverse=True)
            sums = np.zeros(len(distinct), np.int64)
            np.add.at(sums, slot, nbytes[staged])
            for rank, total in zip(distinct.tolist(), sums.tolist(), strict=True):
                found[rank] += total
    return found


def _is_staged(plan: TransferPlan, part: Moves, wire: Moves) -> tuple[np.ndarray, np.ndarray]:
    """Which messages cannot leave from, and arrive in, the shard itself."""
    pair = wire.src * (int(wire.dst.max(initial=0)) + 1) + wire.dst
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


class _Piece(NamedTuple):
    """An item of a job: the rows (of a tensor's moves) that have to move together."""

    tensor: int
    rows: list[int]
    nbytes: int


@dataclass(slots=True)
class _Job:
    """Pieces that go from the same ranks to the same rank, one after the other."""

    srcs: tuple[int, ...]
    dst: int
    pieces: list[_Piece] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # bytes up to the end of each piece
    itemsizes: list[int] = field(default_factory=list)  # of each piece

    def append(self, piece: _Piece, itemsize: int) -> None:
        self.ends.append(self.nbytes + piece.nbytes)
        self.pieces.append(piece)
        self.itemsizes.append(itemsize)

    @property
    def itemsize(self) -> int:
        """Size of the largest element."""
        return max(self.itemsizes)

    def cut_at(self, position: int) -> int:
        """The last place between two elements that is not after `position`, in bytes."""
        number = bisect_right(self.ends, position)
        if number == len(self.ends):
            return self.nbytes
        begin, itemsize = self.ends[number - 1] if number else 0, self.itemsizes[number]
        return begin + (position - begin) // itemsize * itemsize

    @property
    def nbytes(self) -> int:
        return self.ends[-1] if self.ends else 0


class _Rounds:
    """Cuts the moves of one step into rounds.

    Jobs are dealt out in turn: first everybody's to the next rank, then to the one after, and so
    on. A job takes in every round all the room that both its ends have left, and goes on in the
    next. So no round leaves out a job of which both ends have room.
    """

    def __init__(
        self, plans: Sequence[TransferPlan], moves: Sequence[Moves], cap: int, *, is_asked: bool
    ) -> None:
        self.plans, self.moves, self.cap = plans, moves, cap
        self._picked: dict[tuple[int, tuple[int, ...]], Moves] = {}
        self.jobs = self._jobs()
        self.ranks = sorted({rank for job in self.jobs for rank in (job.dst, *job.srcs)})
        self.least = min(plan.itemsize for plan in plans)
        needed = max((job.itemsize * len(job.srcs) for job in self.jobs), default=0)
        if not is_asked:
            # Somewhat less than it may be, since rounds leave holes in the allocator's memory.
            self.cap = max(cap * 3 // 4, needed)
        elif needed > cap:
            raise PlanError(
                "max_bytes",
                expected=f"at least {needed}, which hold one element of every message to a rank",
                got=cap,
                fix="Allow more bytes of staging.",
            )

    def _jobs(self) -> list[_Job]:
        """What crosses ranks, by sender and receiver."""
        jobs: dict[tuple[tuple[int, ...], int], _Job] = {}
        items: dict[int, list[_Item]] = {}  # of equal moves, which tensors may share
        for tensor, moves in enumerate(self.moves):
            itemsize = self.plans[tensor].itemsize
            if id(moves) not in items:
                items[id(moves)] = list(_items(moves))
            for rows, srcs, dst, volume in items[id(moves)]:
                job = jobs.setdefault((srcs, dst), _Job(srcs, dst))
                job.append(_Piece(tensor, rows, volume * itemsize), itemsize)
        return list(jobs.values())

    def cut(self) -> list[tuple[Moves, ...]]:
        """The rounds; what stays on its rank is in the first."""
        slot = {rank: k for k, rank in enumerate(self.ranks)}
        turn = sorted(
            self.jobs, key=lambda job: ((slot[job.dst] - slot[job.srcs[0]]) % len(slot), job.dst)
        )
        used: list[dict[int, int]] = []
        rounds: list[_RoundWriter] = []
        first_open = dict.fromkeys(self.ranks, 0)
        for job in turn:
            done, total = 0, job.nbytes
            number = max(first_open[rank] for rank in (job.dst, *job.srcs))
            while done < total:
                if number == len(rounds):
                    rounds.append(_RoundWriter(self))
                    used.append(dict.fromkeys(self.ranks, 0))
                taken = job.cut_at(done + self._room(job, used[number])) - done
                if taken > 0:
                    rounds[number].add(job, done, done + taken)
                    done += taken
                    used[number][job.dst] += taken * len(job.srcs)
                    for src in job.srcs:
                        used[number][src] += taken
                number += 1
            for rank in (job.dst, *job.srcs):
                while (
                    first_open[rank] < len(used)
                    and self.cap - used[first_open[rank]][rank] < self.least
                ):
                    first_open[rank] += 1
        if not rounds:
            rounds.append(_RoundWriter(self))
        rounds[0].add_local()
        return [writer.moves() for writer in rounds]

    def pick(self, moves: Moves, rows: tuple[int, ...]) -> Moves:
        """These rows; the same object for tensors that share moves and pick alike."""
        key = (id(moves), rows)
        if key not in self._picked:
            self._picked[key] = moves[np.array(rows, np.int64)]
        return self._picked[key]

    def _room(self, job: _Job, used: dict[int, int]) -> int:
        return min(
            (self.cap - used[job.dst]) // len(job.srcs), *(self.cap - used[s] for s in job.srcs)
        )


_Item = tuple[list[int], tuple[int, ...], int, int]


def _items(moves: Moves) -> Iterator[_Item]:
    """Rows that move together, the ranks they come from, where they go, and elements.

    That is a message's box, or a whole reduction with at least one addend from elsewhere.
    """
    away = moves.src != moves.dst
    rows = np.flatnonzero(away & (moves.group == NO_GROUP))
    columns = (rows, moves.src[rows], moves.dst[rows], moves.volumes[rows])
    for row, src, dst, volume in zip(*(column.tolist() for column in columns), strict=True):
        yield [row], (src,), dst, volume
    for row_of in _groups(moves):
        if away[row_of].any():
            srcs = dict.fromkeys(moves.src[row_of][away[row_of]].tolist())
            first = row_of[0]
            yield row_of.tolist(), tuple(srcs), int(moves.dst[first]), int(moves.volumes[first])


def _groups(moves: Moves) -> list[Ints]:
    """Rows of every reduction."""
    rows = np.flatnonzero(moves.group != NO_GROUP)
    if not len(rows):
        return []
    new = np.flatnonzero(np.diff(moves.group[rows])) + 1
    return np.split(rows, new)


class _RoundWriter:
    """Collects the parts of jobs that one round carries out."""

    def __init__(self, rounds: _Rounds) -> None:
        self.rounds = rounds
        self.whole: list[list[int]] = [[] for _ in rounds.plans]  # rows of each tensor's moves
        self.cut: list[list[Moves]] = [[] for _ in rounds.plans]

    def add(self, job: _Job, start: int, stop: int) -> None:
        """Bytes `[start, stop)` of the job's pieces, laid end to end."""
        first = bisect_right(job.ends, start)
        begin = job.ends[first - 1] if first else 0
        for piece in job.pieces[first:]:
            if begin >= stop:
                break
            low, high = max(start - begin, 0), min(stop - begin, piece.nbytes)
            begin += piece.nbytes
            if low == 0 and high == piece.nbytes:
                self.whole[piece.tensor] += piece.rows
            elif low < high:
                self._add_cut(piece, low, high)

    def _add_cut(self, piece: _Piece, low: int, high: int) -> None:
        """Bytes `[low, high)` of a piece, as boxes."""
        itemsize = self.rounds.plans[piece.tensor].itemsize
        moves = self.rounds.moves[piece.tensor][np.array(piece.rows)]
        corner, shape = moves.starts[0], (moves.stops - moves.starts)[0].tolist()
        assert low % itemsize == high % itemsize == 0
        for box in flat_range_boxes(shape, low // itemsize, high // itemsize):
            starts = np.broadcast_to(corner + np.array(box.start, np.int64), moves.starts.shape)
            stops = np.broadcast_to(corner + np.array(box.stop, np.int64), moves.starts.shape)
            part = replace(moves, starts=starts, stops=stops)
            if moves.group[0] != NO_GROUP:  # every box is a reduction of its own
                known = self.rounds.moves[piece.tensor].group
                number = int(known.max()) + 1 + len(self.cut[piece.tensor])
                part = replace(part, group=np.full(len(part), number))
            self.cut[piece.tensor].append(part)

    def add_local(self) -> None:
        """What no other rank has a part in, which needs no staging."""
        for tensor, moves in enumerate(self.rounds.moves):
            away = moves.src != moves.dst
            self.whole[tensor] += np.flatnonzero(~away & (moves.group == NO_GROUP)).tolist()
            for rows in _groups(moves):
                if not away[rows].any():
                    self.whole[tensor] += rows.tolist()

    def moves(self) -> tuple[Moves, ...]:
        found = []
        for plan, moves, rows, cut in zip(
            self.rounds.plans, self.rounds.moves, self.whole, self.cut, strict=True
        ):
            whole = self.rounds.pick(moves, tuple(sorted(rows)))
            parts = [whole, *cut]
            found.append(Moves.concatenate(parts, plan.source.ndim).in_order() if cut else whole)
        return tuple(found)
