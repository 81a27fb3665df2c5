"""What one rank does in a schedule: its messages, copies and reductions, ready to be run.

Pieces are named by tensor, local shard (in the order of `Layout.boxes_of(rank)`) and an index into
that shard. Sender and receiver lay out a message alike: by alignment (the largest power of two that
divides the size of an element), the largest first, then in the order of the tensors, then of their
moves. So every element stands at a multiple of its alignment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.transfer.moves import NO_GROUP, Moves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints
    from shardwise.transfer.plan import TransferPlan
    from shardwise.transfer.schedule import Schedule

__all__ = [
    "Addend",
    "Copy",
    "LocalShapes",
    "MessagePart",
    "PeerMessage",
    "Place",
    "RankProgram",
    "Reduction",
    "Round",
    "Scale",
    "contiguous_in",
]

Index = tuple[slice, ...]


class Scale(NamedTuple):
    """A value is multiplied by `times`, then divided by `over`: how averages are kept."""

    times: int
    over: int


class Place(NamedTuple):
    """A region of a local shard: of a target shard if `is_target`, else of a source shard."""

    is_target: bool
    shard: int
    region: Index | None  # None: the whole shard
    is_contiguous: bool  # in a row-major shard


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One box of a message."""

    tensor: int
    shape: tuple[int, ...]
    numel: int
    places: tuple[Place, ...]  # where it is; several are added up first. Received addends: none


@dataclass(slots=True)
class PeerMessage:
    """Everything that goes to or comes from one rank in a round."""

    peer: int
    parts: list[MessagePart] = field(default_factory=list)
    nbytes: int = 0
    has_sums: bool = False  # whether a part is added up from several places
    single: tuple[int, Place] | None = None  # (tensor, place) if it is one region as it lies there


class Copy(NamedTuple):
    """A region that stays on this rank."""

    tensor: int
    source: Place
    target: Place


class Addend(NamedTuple):
    """One addend of a reduction: local places to add up, or a part of a received message."""

    places: tuple[Place, ...]
    message: int = -1  # index among the round's receives
    part: int = -1  # index among the message's parts


@dataclass(frozen=True, slots=True)
class Reduction:
    """Addends, in order, whose reduction becomes a region of a target shard."""

    tensor: int
    target: Place
    addends: tuple[Addend, ...]


@dataclass(slots=True)
class Round:
    """One round of one rank."""

    receives: list[PeerMessage]
    sends: list[PeerMessage]
    copies: list[Copy]
    reductions: list[Reduction]
    scales: list[tuple[int, Place, Scale]]  # (tensor, region of a target shard, by how much)


class LocalShapes(NamedTuple):
    """Shapes of one rank's shards of a tensor, before and after."""

    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: TransferPlan, rank: int) -> LocalShapes:
        """Those of one rank."""
        layouts = (plan.source, plan.target)
        return cls(*(tuple(box.shape for box in layout.boxes_of(rank)) for layout in layouts))


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Everything that one rank does; `cleared` target shards start as the operation's identity."""

    rank: int
    rounds: tuple[Round, ...]
    cleared: tuple[tuple[int, int], ...]  # (tensor, local target shard)

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankProgram:
        """The part of `rank`; costs the rows of all ranks once, then only its own."""
        ranks = sorted(schedule.ranks)
        rounds = []
        for moves in schedule.rounds:
            round_ = _RoundBuilder(schedule.plans, rank, ranks).build(moves)
            if round_.receives or round_.sends or round_.copies or round_.reductions:
                rounds.append(round_)
        cleared = [
            (tensor, shard)
            for tensor, plan in enumerate(schedule.plans)
            if plan.target.pending is not None
            for shard in _local(plan.target, rank, plan.cleared_rows).tolist()
        ]
        return cls(rank, tuple(rounds), tuple(cleared))


def _local(layout: Layout, rank: int, rows: Ints) -> Ints:
    """Numbers of those of `rows` that are local shards of `rank`."""
    mine = rows[layout.owners[rows] == rank]
    numbers: Ints = np.searchsorted(layout.rows_of(rank), mine)
    return numbers


@dataclass(frozen=True, slots=True)
class _Row:
    """A move as this rank sees it."""

    source: Place | None  # None: on another rank
    target: Place | None
    shape: tuple[int, ...]
    src: int
    dst: int
    group: int
    scale: Scale | None


class _RoundBuilder:
    def __init__(self, plans: Sequence[TransferPlan], rank: int, ranks: Sequence[int]) -> None:
        self.plans, self.rank = plans, rank
        self.slot = {r: k for k, r in enumerate(ranks)}
        self.sends: dict[int, PeerMessage] = {}
        self.receives: dict[int, PeerMessage] = {}
        self.copies: list[Copy] = []
        self.scales: list[tuple[int, Place, Scale]] = []
        self.groups: list[tuple[int, _Row, list[_Row], list[tuple[int, int]]]] = []

    def build(self, moves: Sequence[Moves]) -> Round:
        rows: dict[tuple[TransferPlan, int], list[_Row]] = {}
        here = [tensor for tensor, part in enumerate(moves) if len(part)]
        for tensor in sorted(here, key=lambda t: -self.alignment(t)):
            plan, part = self.plans[tensor], moves[tensor]
            known = rows.get((plan, id(part)))
            if known is None:
                known = rows[plan, id(part)] = _rows_of(plan, part, self.rank)
            self._add_tensor(tensor, plan.itemsize, known)
        order = list(self._in_turn())
        number = {peer: k for k, peer in enumerate(p for p in order if p in self.receives)}
        return Round(
            receives=[self.receives[p] for p in order if p in self.receives],
            sends=[self.sends[p] for p in reversed(order) if p in self.sends],
            copies=self.copies,
            reductions=self._reductions(number),
            scales=self.scales,
        )

    def alignment(self, tensor: int) -> int:
        itemsize = self.plans[tensor].itemsize
        return itemsize & -itemsize

    def _in_turn(self) -> list[int]:
        """Peers from the one before this rank downwards: everybody starts with another."""
        if self.rank not in self.slot:
            return []
        me, size = self.slot[self.rank], len(self.slot)
        return sorted({*self.sends, *self.receives}, key=lambda peer: (me - self.slot[peer]) % size)

    def _add_tensor(self, tensor: int, itemsize: int, rows: Sequence[_Row]) -> None:
        at = 0
        while at < len(rows):
            row = rows[at]
            end = at + 1
            if row.group != NO_GROUP:  # [Note: groups] the whole reduction, or this rank's item
                while end < len(rows) and rows[end].group == row.group:
                    end += 1
            self._add_item(tensor, itemsize, rows[at:end])
            at = end

    def _add_item(self, tensor: int, itemsize: int, rows: Sequence[_Row]) -> None:
        row = rows[0]
        if row.dst == self.rank and row.scale is not None:
            assert row.target is not None
            self.scales.append((tensor, row.target, row.scale))
        if row.dst != self.rank:
            places = tuple(r.source for r in rows if r.source is not None)
            self._post(self.sends, row.dst, tensor, itemsize, row, places)
        elif row.group != NO_GROUP:
            heard = []
            for k, r in enumerate(rows):
                if r.src != self.rank and (k == 0 or rows[k - 1].src != r.src):
                    heard.append(self._post(self.receives, r.src, tensor, itemsize, r, ()))
            self.groups.append((tensor, row, list(rows), heard))
        elif row.src != self.rank:
            assert row.target is not None
            self._post(self.receives, row.src, tensor, itemsize, row, (row.target,))
        else:
            assert row.source is not None
            assert row.target is not None
            self.copies.append(Copy(tensor, row.source, row.target))

    def _post(
        self,
        messages: dict[int, PeerMessage],
        peer: int,
        tensor: int,
        itemsize: int,
        row: _Row,
        places: tuple[Place, ...],
    ) -> tuple[int, int]:
        """Adds a part to the message of `peer`; returns (peer, its number there)."""
        message = messages.setdefault(peer, PeerMessage(peer))
        numel = math.prod(row.shape)
        message.parts.append(MessagePart(tensor, row.shape, numel, places))
        message.nbytes += numel * itemsize
        message.has_sums |= len(places) > 1
        is_single = len(message.parts) == len(places) == 1
        message.single = (tensor, places[0]) if is_single else None
        return peer, len(message.parts) - 1

    def _reductions(self, number: dict[int, int]) -> list[Reduction]:
        found = []
        for tensor, row, rows, heard in self.groups:
            addends: list[Addend] = []
            waiting = iter(heard)
            local: list[Place] = []
            for k, r in enumerate(rows):
                if r.src == self.rank:
                    assert r.source is not None
                    local.append(r.source)
                    if k + 1 == len(rows) or rows[k + 1].src != self.rank:
                        addends.append(Addend(tuple(local)))
                        local = []
                elif k == 0 or rows[k - 1].src != r.src:
                    peer, part = next(waiting)
                    addends.append(Addend((), number[peer], part))
            assert row.target is not None
            found.append(Reduction(tensor, row.target, tuple(addends)))
        return found


def _rows_of(plan: TransferPlan, moves: Moves, rank: int) -> list[_Row]:
    """The moves in which `rank` takes part, as Python values."""
    mine = moves.of_rank(rank)
    if not len(mine):
        return []
    is_spread = mine.step == 1
    sources = _places(plan.source, rank, mine.source_row, mine, keep=~is_spread, is_target=False)
    spread: Sequence[Place | None] = [None] * len(mine)
    if is_spread.any():
        spread = _places(plan.target, rank, mine.source_row, mine, keep=is_spread, is_target=True)
    targets = _places(
        plan.target, rank, mine.target_row, mine, keep=mine.dst == rank, is_target=True
    )
    shapes = list(map(tuple, (mine.stops - mine.starts).tolist()))
    return [
        _Row(sources[k] or spread[k], targets[k], shapes[k], *ends, scale)
        for k, (ends, scale) in enumerate(
            zip(
                zip(mine.src.tolist(), mine.dst.tolist(), mine.group.tolist(), strict=True),
                _scales(plan, mine),
                strict=True,
            )
        )
    ]


def _places(
    layout: Layout, rank: int, rows: Ints, moves: Moves, *, keep: np.ndarray, is_target: bool
) -> list[Place | None]:
    """Where each move's region is in the local shards of `rank`; None where it is not."""
    found: list[Place | None] = [None] * len(rows)
    picked = np.flatnonzero(keep)
    picked = picked[layout.owners[rows[picked]] == rank]
    shards = np.searchsorted(layout.rows_of(rank), rows[picked]).tolist()
    origin, full = layout.boxes.starts[rows[picked]], layout.boxes.shapes[rows[picked]]
    low, high = moves.starts[picked] - origin, moves.stops[picked] - origin
    is_whole = (high - low == full).all(axis=1).tolist()
    is_contiguous = contiguous_in(layout, rows[picked], moves[picked]).tolist()
    corners = zip(picked.tolist(), low.tolist(), high.tolist(), strict=True)
    kinds = zip(shards, is_whole, is_contiguous, strict=True)
    for (at, start, stop), (shard, whole, flat) in zip(corners, kinds, strict=True):
        index = None if whole else tuple(map(slice, start, stop))
        found[at] = Place(is_target, shard, index, flat)
    return found


def contiguous_in(layout: Layout, rows: Ints, moves: Moves) -> np.ndarray:
    """Which moves' regions are contiguous in the (row-major) shards of the given rows, (n,)."""
    sizes, full = moves.stops - moves.starts, layout.boxes.shapes[rows]
    found = np.zeros(len(rows), dtype=bool) if layout.ndim else np.ones(len(rows), dtype=bool)
    for dim in range(layout.ndim):
        before = (sizes[:, :dim] == 1).all(axis=1)
        after = (sizes[:, dim + 1 :] == full[:, dim + 1 :]).all(axis=1)
        found |= before & after
    return found


def _scales(plan: TransferPlan, moves: Moves) -> list[Scale | None]:
    """Averages: the mean of `over` source terms, as one of `times` target terms."""
    ones = np.ones(len(moves), np.int64)
    times = over = ones
    if plan.target.pending == "avg":
        times = _terms_at(plan.target, moves.target_row)
    if plan.source.pending == "avg":
        rows = np.where(moves.step == 0, moves.source_row, 0)
        over = np.where(moves.step == 0, _terms_at(plan.source, rows), 1)
    times = np.where(moves.step == 0, times, 1)
    if not ((times != 1) | (over != 1)).any():
        return [None] * len(moves)
    pairs = zip(times.tolist(), over.tolist(), strict=True)
    return [None if t == o else Scale(t, o) for t, o in pairs]


def _terms_at(layout: Layout, rows: Ints) -> Ints:
    """Number of terms of the box of each row, (n,)."""
    return layout.num_terms[np.searchsorted(layout.box_rows, rows, side="right") - 1]
