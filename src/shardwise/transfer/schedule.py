"""Schedule: the rounds in which plans are carried out, so that staging stays under a cap.

[Note: staging] Bytes on their way that are in neither a source nor a target shard: messages being
packed, and messages that have arrived and wait to be unpacked or added. With a cap, everything
that a rank sends or receives in a round counts, so the cap holds on every device, for every
memory format. Without one, what can go straight from shard to shard does not count, and rounds
are used only if staging would be larger than the largest output.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import cap, items, whole_number
from shardwise.errors import ArgumentTypeError, PlanError
from shardwise.geometry import flat_range_boxes
from shardwise.transfer.moves import NO_GROUP, Moves, ragged
from shardwise.transfer.program import RankProgram, contiguous_in
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.geometry.box import Ints
    from shardwise.transfer.plan import TransferPlan

__all__ = ["LEAST_CAP", "Schedule", "cut_rounds", "make_schedule"]

LEAST_CAP = 16 << 20  # bytes of staging that are always allowed when nobody asked for a cap
_MOST_SIDE_BY_SIDE = 16  # reductions that a rank receives in shares, about


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
        cap = "" if self.max_bytes is None else f", at most {self.max_bytes} bytes of staging"
        tensors, rounds = plural(len(self.plans), "tensor"), plural(len(self.rounds), "round")
        return f"Schedule({tensors} in {rounds}{cap})"


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
    """A new schedule of these plans; a single plan keeps its own (`TransferPlan.schedule`)."""
    steps = _steps(plans)
    cap = max_bytes
    if cap is None:
        outputs: dict[int, int] = defaultdict(int)
        for plan in plans:
            for rank, held in plan.output_bytes.items():
                outputs[rank] += held
        cap = max(LEAST_CAP, *outputs.values(), 0)
    is_packed = len(plans) > 1 or max_bytes is not None
    cutters: list[_Rounds | None] = []  # of each step; None if it takes one round
    for moves in steps:
        staged = max(_staging(plans, moves, is_packed=is_packed).values(), default=0)
        cutters.append(None if staged <= cap else _Rounds(plans, moves))
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
            rounds += cutter.cut(max(cap * 3 // 4, cutter.needed))
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


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """What of a tensor's moves has to move together: a row, or all rows of a reduction."""

    moves: Moves
    itemsize: int
    first: Ints  # (n,): first row
    count: Ints  # (n,): number of rows
    nbytes: Ints  # (n,): of one addend
    slab: Ints  # (n,): bytes of one slice of the outermost dim that has several
    job: Ints  # (n,): number of the item's job, or _LOCAL
    new_group: int  # larger than the numbers of the groups

    def pick(self, numbers: Ints) -> Moves:
        """The moves of these items."""
        return self.moves[ragged(self.first[numbers], self.count[numbers])[1]]

    def cut(self, cuts: Sequence[tuple[int, int, int]]) -> Moves:
        """Bytes `[low, high)` of items, given as (item, low, high), as boxes."""
        listed: list[int] = []
        boxes: list[Box] = []
        for number, low, high in cuts:
            assert low % self.itemsize == high % self.itemsize == 0
            row = self.first[number]
            shape = (self.moves.stops[row] - self.moves.starts[row]).tolist()
            found = flat_range_boxes(shape, low // self.itemsize, high // self.itemsize)
            listed += [number] * len(found)
            boxes += found
        numbers = np.array(listed, np.int64)
        box, rows = ragged(self.first[numbers], self.count[numbers])
        whole = self.moves[rows]
        # Every box is a reduction of its own.
        group = np.where(whole.group == NO_GROUP, NO_GROUP, self.new_group + box)
        starts, stops = (
            whole.starts + np.array(corners, np.int64)[box]
            for corners in ([b.start for b in boxes], [b.stop for b in boxes])
        )
        return replace(whole, starts=starts, stops=stops, group=group)


_LOCAL = -1  # the job of an item in which no other rank has a part


def _slabs(moves: Moves, rows: Ints) -> Ints:
    """Elements of a slice of the outermost dim of which a row's region has several."""
    shapes = (moves.stops - moves.starts)[rows]
    found = moves.volumes[rows]
    for dim in reversed(range(shapes.shape[1])):
        found = np.where(shapes[:, dim] > 1, shapes[:, dim + 1 :].prod(axis=1), found)
    return found


@dataclass(slots=True)
class _Job:
    """Items that go from the same ranks to the same rank, one after the other."""

    srcs: tuple[int, ...]  # slots of ranks
    dst: int
    at: int = 0  # the first item's place on the track
    stop: int = 0  # the place after the last item
    itemsize: int = 0  # of its largest element
    busiest: int = 0  # of a reduction: bytes of all reductions on the busiest of its ranks

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.dst, *self.srcs)

    @property
    def is_reduced(self) -> bool:
        """Whether it needs room on several senders at once."""
        return len(self.srcs) > 1


@dataclass(frozen=True, slots=True, eq=False)
class _Track:
    """All items of a step in a row, job by job, and so their bytes."""

    marks: list[int]  # (n + 1,): bytes before each item, and of all
    itemsizes: list[int]  # (n,)
    slabs: list[int]  # (n,)

    def nbytes(self, job: _Job) -> int:
        return self.marks[job.stop] - self.marks[job.at]

    def cut_at(self, job: _Job, done: int, position: int) -> int:
        """The last place from `done` to `position` where the job may be cut, or `done`.

        That is between two elements; in a reduction between slabs if that leaves few bytes for
        later: then messages are contiguous.
        """
        if position >= self.marks[job.stop]:
            return self.marks[job.stop]
        item = bisect_right(self.marks, position, job.at, job.stop + 1) - 1
        begin, unit = self.marks[item], self.itemsizes[item]
        if job.is_reduced and self.slabs[item] * 8 <= position - done:
            unit = self.slabs[item]
        return max(done, begin + (position - begin) // unit * unit)


class _JobBook:
    """The jobs of a step, numbered; every item is entered under its senders and receiver."""

    def __init__(self, moves: Sequence[Moves]) -> None:
        ends = [ranks[part.is_wire] for part in moves for ranks in (part.src, part.dst)]
        self.ranks: Ints = np.unique(np.concatenate(ends))
        self.jobs: list[_Job] = []
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}

    def items(self, moves: Moves, itemsize: int) -> _Items:
        """The items of a tensor's moves."""
        new = np.ones(len(moves), dtype=bool)
        new[1:] = (moves.group[1:] == NO_GROUP) | (moves.group[1:] != moves.group[:-1])
        first = np.flatnonzero(new)
        return _Items(
            moves=moves,
            itemsize=itemsize,
            first=first,
            count=np.diff(first, append=len(moves)),
            nbytes=moves.volumes[first] * itemsize,
            slab=_slabs(moves, first) * itemsize,
            job=self._job_of_each(moves, np.cumsum(new) - 1, len(first)),
            new_group=int(moves.group.max(initial=NO_GROUP)) + 1,
        )

    def _job_of_each(self, moves: Moves, item: Ints, num_items: int) -> Ints:
        """Number of each item's job; `item` is that of each row."""
        found = np.full(num_items, _LOCAL)
        wire = np.flatnonzero(moves.is_wire)
        src, dst = (np.searchsorted(self.ranks, ranks[wire]) for ranks in (moves.src, moves.dst))
        num_srcs = np.bincount(item[wire], minlength=num_items)
        is_single = num_srcs[item[wire]] == 1
        pair = (src * len(self.ranks) + dst)[is_single]
        pairs, which = np.unique(pair, return_inverse=True)
        numbers = [
            self._number((p // len(self.ranks),), p % len(self.ranks)) for p in pairs.tolist()
        ]
        found[item[wire][is_single]] = np.array(numbers, np.int64)[which]
        stops = np.cumsum(num_srcs)
        for number in np.flatnonzero(num_srcs > 1).tolist():
            mine = slice(stops[number] - num_srcs[number], stops[number])
            found[number] = self._number(tuple(src[mine].tolist()), int(dst[mine][0]))
        return found

    def _number(self, srcs: tuple[int, ...], dst: int) -> int:
        number = self._numbers.setdefault((srcs, dst), len(self.jobs))
        if number == len(self.jobs):
            self.jobs.append(_Job(srcs, dst))
        return number


@dataclass(slots=True)
class _Round:
    """What one round carries out."""

    used: list[int]  # bytes that each rank sends and receives
    spans: list[tuple[int, int]] = field(default_factory=list)  # of items that it moves whole
    cuts: list[tuple[int, int, int]] = field(default_factory=list)  # (place, low, high) in bytes

    def add(self, track: _Track, job: _Job, start: int, stop: int) -> None:
        """Bytes `[start, stop)` of the track, which are the job's."""
        marks = track.marks
        first = bisect_left(marks, start, job.at, job.stop + 1)
        last = bisect_right(marks, stop, job.at, job.stop + 1) - 1
        if last < first:  # inside one item
            self.cuts.append((last, start - marks[last], stop - marks[last]))
            return
        if start < marks[first]:
            begin = marks[first - 1]
            self.cuts.append((first - 1, start - begin, marks[first] - begin))
        if first < last:
            self.spans.append((first, last))
        if marks[last] < stop:
            self.cuts.append((last, 0, stop - marks[last]))


class _Rounds:
    """Cuts the moves of one step into rounds.

    Jobs are dealt out in turn: first everybody's to the next rank, then to the one after, and so
    on. A message takes in every round all the room that both its ends have left, and goes on in the
    next. So no round leaves out a message of which both ends have room.

    Reductions come before, and none takes all the room. The addends of an element arrive together,
    so a reduction needs room on all its senders at once, and in a reduce-scatter everybody sends to
    everybody: one that filled its receiver would leave no room for the others. It gets a share: in
    every round that part of the cap which it is of all reductions on the busiest of its ranks. So
    they go on side by side and are over at the same time. Of many small ones each goes as a whole,
    as soon as there is room: in shares, all of them would be cut in all rounds. Shares are rounded
    down to whole slabs if they have many.
    """

    def __init__(self, plans: Sequence[TransferPlan], moves: Sequence[Moves]) -> None:
        self.ndims = [plan.source.ndim for plan in plans]
        self.least = min(plan.itemsize for plan in plans)
        distinct = {id(part): (part, plan) for plan, part in zip(plans, moves, strict=True)}
        book = _JobBook([part for part, _ in distinct.values()])
        known = {key: book.items(part, plan.itemsize) for key, (part, plan) in distinct.items()}
        self.items = [known[id(part)] for part in moves]  # of each tensor; some share theirs
        job = np.concatenate([items.job for items in self.items])
        self.order = np.argsort(job, kind="stable")  # what is local, then job by job
        counts = np.array([len(items.job) for items in self.items])
        tensor, number = ragged(np.zeros_like(counts), counts)
        self.tensor, self.number = tensor[self.order], number[self.order]
        self.num_ranks, self.jobs = len(book.ranks), book.jobs
        bounds = np.searchsorted(job[self.order], np.arange(len(book.jobs) + 1)).tolist()
        self.num_local = bounds[0]
        nbytes = np.concatenate([items.nbytes for items in self.items])[self.order]
        slabs = np.concatenate([items.slab for items in self.items])[self.order]
        itemsizes = np.array([plan.itemsize for plan in plans])[self.tensor]
        marks = [0, *np.cumsum(nbytes).tolist()]
        self.track = _Track(marks, itemsizes.tolist(), slabs.tolist())
        for one, (at, stop) in zip(self.jobs, pairwise(bounds), strict=True):
            one.at, one.stop, one.itemsize = at, stop, max(self.track.itemsizes[at:stop])
        self._find_busiest()
        self.needed = max((one.itemsize * len(one.srcs) for one in self.jobs), default=0)

    def cut(self, cap: int) -> list[tuple[Moves, ...]]:
        """The rounds; what stays on its rank is in the first."""
        rounds: list[_Round] = []
        first_open = [0] * self.num_ranks  # of each rank: the first round in which it has room
        for job in self._in_turn():
            number = max(first_open[end] for end in job.ends)
            self._deal(job, rounds, number, cap)
            for end in job.ends:
                number = first_open[end]
                while number < len(rounds) and cap - rounds[number].used[end] < self.least:
                    number += 1
                first_open[end] = number
        rounds = [round_ for round_ in rounds if round_.spans or round_.cuts]
        if self.num_local:
            rounds[0].spans.append((0, self.num_local))
        return self._moves(rounds)

    def _in_turn(self) -> list[_Job]:
        src = np.array([job.srcs[0] for job in self.jobs])
        dst = np.array([job.dst for job in self.jobs])
        is_message = np.array([not job.is_reduced for job in self.jobs])
        order = np.lexsort((dst, (dst - src) % self.num_ranks, is_message))
        return [self.jobs[number] for number in order.tolist()]

    def _find_busiest(self) -> None:
        traffic = [0] * self.num_ranks
        reduced = [job for job in self.jobs if job.is_reduced]
        for job in reduced:
            traffic[job.dst] += self.track.nbytes(job) * len(job.srcs)
            for src in job.srcs:
                traffic[src] += self.track.nbytes(job)
        for job in reduced:
            job.busiest = max(traffic[end] for end in job.ends)

    def _deal(self, job: _Job, rounds: list[_Round], number: int, cap: int) -> None:
        """Puts a job into rounds, from this number on."""
        done, stop = self.track.marks[job.at], self.track.marks[job.stop]
        share = self._share(job, cap) if job.is_reduced else cap
        while done < stop:
            if number == len(rounds):
                rounds.append(_Round([0] * self.num_ranks))
            used = rounds[number].used
            room = min(share, (cap - used[job.dst]) // len(job.srcs))
            for src in job.srcs:
                room = min(room, cap - used[src])
            if room >= self.least:
                cut = self.track.cut_at(job, done, done + room)
                if cut > done:
                    rounds[number].add(self.track, job, done, cut)
                    used[job.dst] += (cut - done) * len(job.srcs)
                    for src in job.srcs:
                        used[src] += cut - done
                    done = cut
            number += 1

    def _share(self, job: _Job, cap: int) -> int:
        """Bytes of a reduction that any round may take; all the same, so that memory is reused."""
        nbytes = self.track.nbytes(job)
        small = max(cap // (_MOST_SIDE_BY_SIDE * len(job.srcs)), job.itemsize)
        return max(cap * nbytes // job.busiest, min(nbytes, small))

    def _moves(self, rounds: Sequence[_Round]) -> list[tuple[Moves, ...]]:
        """The moves of each round, tensor by tensor; the same object where tensors move alike."""
        picked: dict[tuple[int, bytes], Moves] = {}
        found = []
        for round_ in rounds:
            spans = np.array(round_.spans, np.int64).reshape(-1, 2)
            places = ragged(spans[:, 0], spans[:, 1] - spans[:, 0])[1]
            places = places[np.lexsort((self.number[places], self.tensor[places]))]
            numbers = self.number[places]
            bounds = np.searchsorted(self.tensor[places], np.arange(len(self.items) + 1)).tolist()
            cuts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for place, low, high in round_.cuts:
                cuts[int(self.tensor[place])].append((int(self.number[place]), low, high))
            parts = []
            for tensor, whole in enumerate(self.items):
                mine = numbers[bounds[tensor] : bounds[tensor + 1]]
                key = id(whole), mine.tobytes()
                if key not in picked:
                    picked[key] = whole.pick(mine)
                part = picked[key]
                if tensor in cuts:
                    both = [part, whole.cut(cuts[tensor])]
                    part = Moves.concatenate(both, self.ndims[tensor]).in_order()
                parts.append(part)
            found.append(tuple(parts))
        return found
