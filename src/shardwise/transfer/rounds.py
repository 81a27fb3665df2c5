"""Cutting the moves of a step into rounds, so that no rank has more in flight than a cap.

Moves are taken as items, what of a tensor has to move together; items that go from the same ranks
to the same rank are a job. Jobs lie one after the other on a track, and are cut at bytes of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import flat_range_boxes
from shardwise.transfer.moves import NO_GROUP, Moves, ragged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.geometry.box import Ints
    from shardwise.transfer.plan import TransferPlan

__all__ = ["RoundCutter"]

_MOST_SIDE_BY_SIDE = 16  # reductions that a rank receives in shares, about


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


class RoundCutter:
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
        order = np.argsort(job, kind="stable")  # what is local, then job by job
        counts = np.array([len(items.job) for items in self.items])
        tensor, number = ragged(np.zeros_like(counts), counts)
        self.tensor, self.number = tensor[order], number[order]
        self.num_ranks, self.jobs = len(book.ranks), book.jobs
        bounds = np.searchsorted(job[order], np.arange(len(book.jobs) + 1)).tolist()
        self.num_local = bounds[0]
        nbytes = np.concatenate([items.nbytes for items in self.items])[order]
        slabs = np.concatenate([items.slab for items in self.items])[order]
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
