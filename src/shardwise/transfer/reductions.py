"""Reductions: where addends meet, and how the result reaches every rank that wants it.

[Note: two steps] A region with t addends (what one rank holds counts as one) and d destinations
costs at least n(t + d - 2) bytes if a destination holds an addend, else n(t + d - 1). That is what
is planned: the region is cut evenly over the destinations that hold an addend (over all of them if
none does), each reduces its part, and then spreads it to the others. A small region is not cut: one
of them reduces it all, which takes as many bytes and far fewer messages, 6 instead of 24 for 4
ranks. A destination that holds every addend needs nothing from anybody. Two ranks that have an
addend each and both want the sum send each other theirs: as many bytes, in one step.

[Note: replicas] Of ranks that can contribute the same, or give the same result, the one that has
the least to send so far does. If the largest sender is then far above the mean, large regions are
cut and dealt out part by part.

[Note: pending targets] If the target is pending too, the region's value may lie in any of the
target's terms, and the others hold the identity of the operation. With another operation, or if
there is one addend, all go to the one term that costs least; the lowest wins a tie. With the same
operation addends may part: each goes to the term that costs it least (one that is on its own rank),
unless they move less in company, since addends that meet are spread once. If there are few ways to
deal them out, all are tried; else that one and, if that is not long, those with all in one term.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Box, flat_range_boxes
from shardwise.transfer.moves import NO_GROUP, Moves

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints
    from shardwise.transfer.regions import Regions

__all__ = ["least_elements", "most_reduced", "reductions"]

Rows = dict[int, int]  # rank -> row of a layout
_FEW = 16 << 10  # bytes of a region that is not cut: its messages cost more than what is in them
_MOST_WAYS = 256  # to deal out addends, or to choose ranks that contribute, that are all tried
_MOST_COMPARED = 1 << 16  # about the steps of comparing the ways with all addends in one term
_LEAST_PART = 1 << 16  # bytes: a smaller part is not cut further among those who could send it
_MOST_PARTS = 12  # unless there are more to share them
_TOLERANCE = 1.25  # how far above the mean the largest sender may be before regions are cut


@dataclass(frozen=True, slots=True)
class _Problem:
    """Addends of a region that are to be reduced, and the rows that want the result."""

    addends: Mapping[int, Rows]  # term -> its holders
    wanted: Rows

    @property
    def held(self) -> dict[int, list[int]]:
        """rank -> the terms that it holds, ascending."""
        held = defaultdict(list)
        for term, holders in sorted(self.addends.items()):
            for rank in holders:
                held[rank].append(term)
        return held

    def is_plain(self, held: Mapping[int, Sequence[int]]) -> bool:
        """Whether every rank holds one addend and nobody else does: then all of them send it."""
        return len(held) == len(self.addends) and all(len(terms) == 1 for terms in held.values())

    def least(self) -> int:
        """Regions that have to change ranks at the least. [Note: two steps]"""
        held = self.held
        complete = {rank for rank, terms in held.items() if len(terms) == len(self.addends)}
        if complete & self.wanted.keys():
            return len(self.wanted.keys() - complete)
        able = [rank for rank in self.wanted if rank in held]
        if all(len(terms) == 1 for terms in held.values()):
            least = len(self.addends)
        elif able:
            least = min(len(_cover(held, len(self.addends), first=rank)) for rank in able)
        else:
            least = len(_cover(held, len(self.addends)))
        return least + len(self.wanted) - (2 if able else 1)


def reductions(source: Layout, target: Layout, regions: Regions, itemsize: int) -> Moves:
    """Moves that reduce the regions and spread the results. [Note: two steps] [Note: replicas]"""
    problems = _problems(source, target, regions)
    first = sum(source.shape)  # so that sums of several tensors do not all meet on the same rank
    plain, split = (_Writer(source.ndim, itemsize, is_split) for is_split in (False, True))
    for writer in (plain, split):
        for turn, (box, problem) in enumerate(problems, start=first):
            writer.solve(box, problem, turn=turn)
        if not writer.is_uneven:
            return writer.moves(source, target)
    return min(plain, split, key=lambda writer: writer.most_sent).moves(source, target)


def most_reduced(source: Layout, target: Layout, regions: Regions, itemsize: int) -> Ints:
    """Moves for each region as a reduction, that many or fewer. [Note: two steps]"""
    held = np.diff(source.box_rows)[regions.source_box]
    wanted = np.diff(target.box_rows)[regions.target_box]
    nbytes = regions.volumes * itemsize
    # In how many parts: one a reducer, or more that replicas of addends share.
    has_replicas = held > source.num_terms[regions.source_box]
    more = np.minimum(nbytes // _LEAST_PART, wanted * np.maximum(held, _MOST_PARTS))
    parts = np.where(nbytes > _FEW, wanted + np.where(has_replicas, more, 0), 1)
    # Where no dim has room for them, a part is a flat range: several boxes, and parts of it again.
    sides = (regions.stops - regions.starts).max(axis=1, initial=1)
    flat = np.where(has_replicas, 2, 1) * np.where(sides < parts, 1, 0)
    most_boxes = max(2 * source.ndim - 1, 1)  # of a flat range
    boxes = np.minimum(parts * most_boxes**flat, np.maximum(regions.volumes, 1))
    most: Ints = boxes * (held + wanted)
    return most


def least_elements(source: Layout, target: Layout, regions: Regions) -> int:
    """Elements that have to change ranks for these regions at the least."""
    return sum(box.volume * problem.least() for box, problem in _problems(source, target, regions))


def _problems(source: Layout, target: Layout, regions: Regions) -> Sequence[tuple[Box, _Problem]]:
    """What has to be reduced where, region by region. [Note: pending targets]"""
    found = []
    known: dict[object, dict[int, int]] = {}  # many regions are on the same ranks
    boxes = zip(regions.starts.tolist(), regions.stops.tolist(), strict=True)
    pairs = zip(regions.source_box.tolist(), regions.target_box.tolist(), strict=True)
    for (start, stop), (a, b) in zip(boxes, pairs, strict=True):
        box = Box._trusted(tuple(start), tuple(stop))
        addends, wanted = _entries_by_term(source, a), _entries_by_term(target, b)
        if len(wanted) > 1 and len(addends) > 1 and source.pending == target.pending:
            key = tuple(
                tuple((term, *rows) for term, rows in terms.items()) for terms in (addends, wanted)
            )
            if key not in known:
                known[key] = _dealt_out(addends, wanted)
            chosen: dict[int, dict[int, Rows]] = defaultdict(dict)
            for term, holders in addends.items():
                chosen[known[key][term]][term] = holders
            found += [(box, _Problem(chosen[term], wanted[term])) for term in sorted(chosen)]
        else:
            found.append((box, _Problem(addends, wanted[_cheapest(wanted, addends)])))
    return found


def _dealt_out(addends: Mapping[int, Rows], wanted: Mapping[int, Rows]) -> dict[int, int]:
    """The target's term to which each addend goes. [Note: pending targets]"""
    apart = {
        term: min(wanted, key=lambda to: (len(wanted[to].keys() - holders.keys()), to))
        for term, holders in addends.items()
    }
    costs: dict[tuple[int, tuple[int, ...]], int] = {}

    def cost(way: Mapping[int, int]) -> int:
        total = 0
        for to in set(way.values()):
            terms = tuple(term for term in addends if way[term] == to)
            if (to, terms) not in costs:
                part = {term: addends[term] for term in terms}
                costs[to, terms] = _Problem(part, wanted[to]).least()
            total += costs[to, terms]
        return total

    num_held = sum(map(len, addends.values()))
    is_alone = num_held == len({rank for holders in addends.values() for rank in holders})
    if cost(apart) == 0 or (is_alone and max(map(len, wanted.values())) == 1):
        return apart  # nothing is sent together and nothing spread, so nothing can be shared
    if len(wanted) ** len(addends) <= _MOST_WAYS:
        choices = itertools.product(wanted, repeat=len(addends))
        ways = [dict(zip(addends, choice, strict=True)) for choice in choices]
    elif len(wanted) * num_held**2 <= _MOST_COMPARED:
        ways = [dict.fromkeys(addends, to) for to in wanted]
    else:
        ways = []
    return min([apart, *ways], key=cost)


def _entries_by_term(layout: Layout, box: int) -> dict[int, Rows]:
    first, last = layout.box_rows[box : box + 2].tolist()
    owners = layout.owners[first:last].tolist()
    terms = [0] * len(owners) if layout.terms is None else layout.terms[first:last].tolist()
    found: dict[int, Rows] = defaultdict(dict)
    for row, (rank, term) in enumerate(zip(owners, terms, strict=True), start=first):
        found[term][rank] = row
    return dict(sorted(found.items()))


def _cheapest(wanted: Mapping[int, Rows], addends: Mapping[int, Rows]) -> int:
    """The target's term to which these addends go at the least cost; the lowest of equals."""
    if len(wanted) == 1:
        return next(iter(wanted))
    return min(wanted, key=lambda term: (_Problem(addends, wanted[term]).least(), term))


def _cover(
    held: Mapping[int, Sequence[int]],
    num_terms: int,
    *,
    first: int | None = None,
    load: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """The fewest ranks that hold all terms together, and the terms that each contributes.

    Found greedily: each time the rank with the most terms that are still missing, `first` before
    all others. Then fewer are tried, if the ways to choose them are not too many. Of as many, those
    with the least `load`: how many it are does not depend on it, so `least` has the same number.
    """
    ranks = sorted(held, key=lambda r: (load[r] if load else 0, r))
    fixed = [] if first is None else [first]
    most = max(map(len, held.values()))
    if most == 1:
        holder = {held[rank][0]: rank for rank in (*reversed(ranks), *fixed)}
        others = sorted(set(holder.values()) - set(fixed))
        return _contributions(held, [*fixed, *others])
    chosen = _greedy(held, num_terms, sorted(held), fixed)
    for size in range(-(-num_terms // most), len(chosen)):
        if math.comb(len(ranks), size - len(fixed)) > _MOST_WAYS:
            break
        for more in itertools.combinations(ranks, size - len(fixed)):
            if len({term for rank in (*fixed, *more) for term in held[rank]}) == num_terms:
                return _contributions(held, [*fixed, *more])
    if load:
        by_load = _greedy(held, num_terms, ranks, fixed)
        chosen = by_load if len(by_load) == len(chosen) else chosen
    return _contributions(held, chosen)


def _greedy(
    held: Mapping[int, Sequence[int]], num_terms: int, ranks: Sequence[int], fixed: Sequence[int]
) -> list[int]:
    """The fixed ranks, and each time the first of those with the most terms that are missing."""
    chosen, missing = list(fixed), {term for terms in held.values() for term in terms}
    assert len(missing) == num_terms
    missing.difference_update(*(held[rank] for rank in chosen))
    while missing:
        chosen.append(min(ranks, key=lambda r: -len(missing.intersection(held[r]))))
        missing.difference_update(held[chosen[-1]])
    return chosen


def _contributions(held: Mapping[int, Sequence[int]], ranks: Sequence[int]) -> dict[int, list[int]]:
    """The terms that each of these contributes: those that none before it holds."""
    found: dict[int, list[int]] = {}
    taken: set[int] = set()
    for rank in ranks:
        if terms := [term for term in held[rank] if term not in taken]:
            found[rank] = terms
            taken.update(terms)
    return found


@dataclass(slots=True)
class _Writer:
    """Collects moves region by region; `is_split` if large ones are cut among equal senders."""

    ndim: int
    itemsize: int
    is_split: bool
    blocks: list[tuple[Box, list[list[int]]]] = field(default_factory=list)
    num_groups: int = 0
    load: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # elements sent
    able: set[int] = field(default_factory=set)  # ranks that could send more or less of large parts

    @property
    def most_sent(self) -> int:
        return max((self.load[rank] for rank in self.able), default=0)

    @property
    def is_uneven(self) -> bool:
        """Whether another choice of senders might be fairer."""
        total = sum(self.load[rank] for rank in self.able)
        return self.most_sent * len(self.able) > _TOLERANCE * total

    def solve(self, box: Box, problem: _Problem, *, turn: int) -> None:
        held, wanted = problem.held, problem.wanted
        num_terms = len(problem.addends)
        complete = sorted(r for r in wanted if len(held.get(r, ())) == num_terms)
        if complete:
            for rank in complete:
                self._reduce(box, problem, {rank: held[rank]}, rank)
            others = sorted(wanted.keys() - set(complete))
            shared = len(others) // len(complete) * len(complete)  # go round without being cut
            for k, rank in enumerate(others):
                cut = self._cut(box, complete, len(complete) if k >= shared else 1)
                for part in cut:
                    giver = min(complete, key=lambda r: (self.load[r], r))
                    self._spread(part, wanted[giver], [wanted[rank]], giver)
            return
        reducers = sorted(rank for rank in wanted if rank in held)
        is_plain = problem.is_plain(held)
        if reducers and not is_plain:
            sizes = {r: len(_cover(held, num_terms, first=r)) for r in reducers}
            fewest = min(sizes.values())
            reducers = [r for r in reducers if sizes[r] == fewest]
        if is_plain and len(held) == 2 and wanted.keys() == held.keys():
            for rank in reducers:
                self._reduce(box, problem, held, rank)
            return
        reducers = reducers or sorted(wanted)
        turn %= len(reducers)
        reducers = reducers[turn:] + reducers[:turn]  # so that small regions take turns
        if box.volume * self.itemsize <= _FEW:
            del reducers[1:]
        plain = {rank: held[rank] for rank in sorted(held)} if is_plain else None
        num_holders = {len(holders) for holders in problem.addends.values()}
        evenly = math.lcm(*num_holders)  # so many parts every term's holders can share alike
        evenly = evenly if evenly <= _MOST_PARTS else max(num_holders)
        for rank, parts in zip(reducers, _even_parts(box, len(reducers)), strict=True):
            others = [row for r, row in wanted.items() if r != rank]
            first = rank if rank in held else None
            for part in parts:
                for piece in self._cut(part, () if plain else held.keys() - {rank}, evenly):
                    cover = plain or _cover(held, num_terms, first=first, load=self.load)
                    self._reduce(piece, problem, cover, rank)
                    self._spread(piece, wanted[rank], others, rank)

    def _cut(self, box: Box, able: Collection[int], num_parts: int) -> list[Box]:
        """The box in parts that these ranks can share; whole if it is too small for that."""
        num_parts = min(num_parts, box.volume * self.itemsize // _LEAST_PART)
        if len(able) < 2 or num_parts < 2:
            return [box]
        self.able.update(able)
        if not self.is_split:
            return [box]
        return [part for parts in _even_parts(box, num_parts) for part in parts]

    def _reduce(
        self, box: Box, problem: _Problem, cover: Mapping[int, Sequence[int]], reducer: int
    ) -> None:
        by_term = sorted(cover.items(), key=lambda item: item[1][0])
        rows = []
        for rank, terms in by_term:
            rows += [
                [problem.addends[term][rank], problem.wanted[reducer], 0, self.num_groups]
                for term in terms
            ]
            if rank != reducer:
                self.load[rank] += box.volume
        self.num_groups += 1
        self.blocks.append((box, rows))

    def _spread(self, box: Box, giver_row: int, rows: Sequence[int], giver: int) -> None:
        if rows:
            self.load[giver] += box.volume * len(rows)
            self.blocks.append((box, [[giver_row, row, 1, NO_GROUP] for row in rows]))

    def moves(self, source: Layout, target: Layout) -> Moves:
        """All of them, in order."""
        if not self.blocks:
            return Moves.concatenate([], self.ndim)
        count = [len(rows) for _, rows in self.blocks]
        corners = np.array([(*box.start, *box.stop) for box, _ in self.blocks], np.int64)
        corners = np.repeat(corners.reshape(len(count), 2 * self.ndim), count, axis=0)
        table = np.array([row for _, rows in self.blocks for row in rows], np.int64)
        source_row, target_row, step, group = table.T.copy()
        src = np.empty(len(table), np.int64)
        src[step == 0] = source.owners[source_row[step == 0]]
        src[step == 1] = target.owners[source_row[step == 1]]
        return Moves(
            corners[:, : self.ndim],
            corners[:, self.ndim :],
            source_row,
            target_row,
            src,
            target.owners[target_row],
            step,
            group,
        ).in_order()


def _even_parts(box: Box, num_parts: int) -> list[list[Box]]:
    """The box in even parts: along its first dim that has room for them, else by flat ranges."""
    for dim, size in enumerate(box.shape):
        if size >= num_parts:
            low = box.start[dim]
            cuts = [low + k * size // num_parts for k in range(num_parts + 1)]
            return [[box.with_range(dim, a, b)] for a, b in itertools.pairwise(cuts)]
    ends = [k * box.volume // num_parts for k in range(num_parts + 1)]
    return [
        [part.shift(box.start) for part in flat_range_boxes(box.shape, a, b)]
        for a, b in itertools.pairwise(ends)
    ]
