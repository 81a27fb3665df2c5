"""Rows of a table that is cut, fetched by their numbers: owners send what they are asked for.

[Note: asks] Which rows a rank wants depends on data that others do not know. So ranks first *ask*:
they exchange how many rows each wants of each strip of the table, and then the numbers of the rows.
An *ask* is a list of distinct row numbers in ascending order, and may be that of several ranks
alike. A *strip* is a range of rows between edges of boxes, so the rows of a box are whole strips,
and those that an ask wants of it stand together.

[Note: fetch and give] To *fetch* is to copy the rows of an ask to its ranks; each box comes from
one rank that holds it, oneself if one does. To *give* is the way of the gradient: the rows of all
asks are added to the boxes they came from, on every rank that holds one, in the order of the asks.
So replicas of the table get the same gradient, bit for bit, and an ask of several ranks counts
once. Each is the derivative of the other.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise.comm.tracing import TRACES, Recording, current_op, doing, is_watched, recorded
from shardwise.errors import OutOfRangeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout
    from shardwise.geometry.box import Ints

__all__ = ["Asked", "Asks", "ask", "fetch", "gather_ragged"]

Asks = tuple[tuple[int, ...], ...]  # the ranks of each ask, ascending
Carriers = tuple[torch.Tensor, ...]


class _Message(NamedTuple):
    """The rows of an ask in a box, to or from a peer; the peer is this rank for what stays."""

    ask: int
    box: int
    peer: int


class _Numbers(NamedTuple):
    """The row numbers of an ask, to or from a rank that holds some of these strips."""

    ask: int
    peer: int
    strips: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Ways:
    """Who sends what to whom, as far as layouts say it, for one rank. [Note: fetch and give]"""

    edges: tuple[int, ...]  # of the strips
    boxes: tuple[Box, ...]  # those of the table that have elements, each once
    spans: tuple[tuple[int, int], ...]  # of each box: its strips
    shards: dict[int, int]  # box -> local shard
    own: tuple[int, ...]  # the asks of this rank
    most: int  # asks of a rank
    told: tuple[_Numbers, ...]  # numbers to be received
    telling: tuple[_Numbers, ...]
    fetched: tuple[_Message, ...]
    serving: tuple[_Message, ...]
    given: tuple[_Message, ...]
    giving: tuple[_Message, ...]


@dataclass(frozen=True, slots=True)
class _Holders:
    """Who holds which box of a table, and who tells whom about which rows of it."""

    boxes: tuple[Box, ...]  # those that have elements, each once
    held_by: tuple[tuple[int, ...], ...]  # of each box
    edges: tuple[int, ...]  # of the strips
    spans: tuple[tuple[int, int], ...]  # of each box: its strips
    asks: Asks
    adds: bool  # gradients will come back, so every holder of a box has to know its rows

    @classmethod
    def of(cls, table: Layout, asks: Asks, *, adds: bool) -> _Holders:
        holders: dict[Box, set[int]] = {}
        for box, owner, _ in table:
            if not box.is_empty:
                holders.setdefault(box, set()).add(owner)
        edges = {0, table.shape[0]} | {e for b in holders for e in (b.start[0], b.stop[0])}
        place = {edge: k for k, edge in enumerate(sorted(edges))}
        return cls(
            tuple(holders),
            tuple(tuple(sorted(ranks)) for ranks in holders.values()),
            tuple(place),
            tuple((place[box.start[0]], place[box.stop[0]]) for box in holders),
            asks,
            adds,
        )

    def server(self, asker: int, box: int) -> int:
        """From whom a rank gets its rows of a box."""
        return _one_of(self.held_by[box], asker)

    def giver(self, ask: int, holder: int) -> int:
        """From whom a holder hears of an ask, and gets the gradient of its rows."""
        return _one_of(self.asks[ask], holder)

    def numbers(self, ask: int, holder: int, peer: int) -> list[_Numbers]:
        """What a holder has to be told of an ask, to or from `peer`; nothing of its own."""
        strips = self._strips(ask, holder) if self.giver(ask, holder) != holder else ()
        return [_Numbers(ask, peer, strips)] if strips else []

    def _strips(self, ask: int, holder: int) -> tuple[int, ...]:
        """Of the boxes of which a holder has to know which rows are asked for."""
        known = [
            range(*span)
            for box, span in enumerate(self.spans)
            if holder in self.held_by[box] and self._knows(ask, holder, box)
        ]
        return tuple(sorted(set(itertools.chain(*known))))

    def _knows(self, ask: int, holder: int, box: int) -> bool:
        return self.adds or any(self.server(asker, box) == holder for asker in self.asks[ask])


@lru_cache(maxsize=256)
def _ways(table: Layout, asks: Asks, rank: int, *, adds: bool) -> _Ways:
    """`adds`: as `_Holders` has it."""
    assert table.pending is None
    who = _Holders.of(table, asks, adds=adds)
    ranks = sorted({rank, *table.ranks, *itertools.chain(*asks)})
    every, every_box = range(len(asks)), range(len(who.boxes))
    own = tuple(k for k in every if rank in asks[k])
    local = {box: k for k, box in enumerate(table.boxes_of(rank)) if not box.is_empty}
    shards = {k: local[box] for k, box in enumerate(who.boxes) if box in local}
    others = [  # with whom this rank deals about its own asks
        (k, holder)
        for k in own
        for holder in ranks
        if holder != rank and who.giver(k, holder) == rank
    ]
    return _Ways(
        edges=who.edges,
        boxes=who.boxes,
        spans=who.spans,
        shards=shards,
        own=own,
        most=max((sum(one in askers for askers in asks) for one in ranks), default=0),
        told=tuple(n for k in every for n in who.numbers(k, rank, who.giver(k, rank))),
        telling=tuple(n for k, holder in others for n in who.numbers(k, holder, holder)),
        fetched=tuple(_Message(k, box, who.server(rank, box)) for k in own for box in every_box),
        serving=tuple(
            _Message(k, box, asker)
            for k in every
            for asker in asks[k]
            for box in shards
            if asker != rank and who.server(asker, box) == rank
        ),
        given=tuple(_Message(k, box, who.giver(k, rank)) for k in every for box in shards),
        giving=tuple(
            _Message(k, box, holder)
            for k, holder in others
            for box in every_box
            if holder in who.held_by[box]
        ),
    )


def _one_of(ranks: tuple[int, ...], rank: int) -> int:
    """The rank itself if it is one of them, else one of them, so that all have their share."""
    return rank if rank in ranks else ranks[rank % len(ranks)]


# -- asking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """What all ranks want of a table, as far as this one has to know it. [Note: asks]"""

    ways: _Ways
    table: Layout
    members: Communicator
    asks: Asks
    adds: bool
    counts: Ints  # (asks, strips)
    rows: dict[int, torch.Tensor]  # of this rank's asks: the numbers of the rows
    told: dict[int, tuple[torch.Tensor, Ints]]  # of others': the numbers, where each strip starts

    def span(self, ask: int, box: int) -> tuple[int, int]:
        """Where the rows of a box stand among those of an ask."""
        low, high = self.ways.spans[box]
        before = self.counts[ask, :low].sum()
        return int(before), int(before + self.counts[ask, low:high].sum())

    def num_rows(self, ask: int, box: int) -> int:
        """How many rows of a box an ask wants."""
        low, high = self.span(ask, box)
        return high - low

    def ways_of(self, rank: int) -> _Ways:
        """What `rank` sends, receives and copies."""
        return _ways(self.table, self.asks, rank, adds=self.adds)

    def local_rows(self, ask: int, box: int) -> torch.Tensor:
        """The rows of an ask in a local box, counted from its first."""
        if ask in self.rows:
            low, high = self.span(ask, box)
            found = self.rows[ask][low:high]
        else:
            numbers, starts = self.told[ask]
            first, last = self.ways.spans[box]
            found = numbers[int(starts[first]) : int(starts[last])]
        return found - self.ways.boxes[box].start[0]


def ask(
    table: Layout,
    asks: Asks,
    rows: Sequence[torch.Tensor],
    members: Communicator,
    *,
    adds: bool,
    what: str,
) -> Asked:
    """Tells holders of the table which rows are wanted. Every rank of the group calls it.

    `rows` are those of this rank's asks: distinct numbers, ascending, int64. If some are out of
    range, every rank raises an error about `what`. `adds` as in `_ways`.
    """
    ways = _ways(table, asks, members.rank, adds=adds)
    own = dict(zip(ways.own, rows, strict=True))
    counts = _exchange_counts(ways, asks, own, members)
    bad = np.flatnonzero(counts[:, -1])
    if len(bad):
        raise OutOfRangeError(
            f"{what}: index out of range in self",
            rank=members.rank,
            expected=f"indices from 0 to {table.shape[0] - 1}",
            got=f"others on ranks {sorted({r for k in bad.tolist() for r in asks[k]})}",
        )
    asked = Asked(ways, table, members, asks, adds, counts[:, :-1], own, {})
    return replace(asked, told=_exchange_numbers(asked))


def _exchange_counts(
    ways: _Ways, asks: Asks, own: dict[int, torch.Tensor], members: Communicator
) -> Ints:
    """How many rows each ask wants of each strip, and in a last column, how many there are not."""
    width = len(ways.edges)
    mine = np.zeros((ways.most, width), np.int64)
    for k, numbers in enumerate(own.values()):
        edges = torch.tensor(ways.edges, device=numbers.device)
        bounds = torch.searchsorted(numbers, edges).cpu().numpy()
        mine[k, :-1] = np.diff(bounds)
        mine[k, -1] = len(numbers) - (bounds[-1] - bounds[0])
    everybody = [mine]
    if len(members.ranks) > 1 and mine.size:
        with recorded("exchange row counts", members, mine.nbytes):
            sent = torch.from_numpy(mine).flatten().to(members.wire_device)
            gathered = sent.new_empty(len(members.ranks) * sent.numel())
            members.all_gather(gathered, sent)
            everybody = list(gathered.cpu().numpy().reshape(-1, *mine.shape))
    found = np.zeros((len(asks), width), np.int64)
    seen: dict[int, int] = dict.fromkeys(members.ranks, 0)
    for k, askers in enumerate(asks):
        for rank in askers:
            found[k] = everybody[members.ranks.group_rank(rank)][seen[rank]]
            seen[rank] += 1
    return found


def _exchange_numbers(asked: Asked) -> dict[int, tuple[torch.Tensor, Ints]]:
    """The row numbers of others' asks, as far as this rank holds the rows."""
    ways, counts, own, members = asked.ways, asked.counts, asked.rows, asked.members

    def size(message: _Numbers) -> int:
        return int(counts[message.ask, list(message.strips)].sum())

    device = next(iter(own.values())).device if own else members.wire_device
    wire = members.wire_device
    received = [torch.empty(size(m), dtype=torch.int64, device=wire) for m in ways.told]
    sent = []
    for message in ways.telling:
        ends = np.concatenate([[0], counts[message.ask].cumsum()])
        numbers = own[message.ask]
        parts = [numbers[ends[k] : ends[k + 1]] for k in message.strips]
        whole = numbers[ends[message.strips[0]] : ends[message.strips[-1] + 1]]
        is_one_run = len(whole) == sum(map(len, parts))
        sent.append((whole if is_one_run else torch.cat(parts)).to(wire))
    _swap(
        members,
        [(m.peer, buffer) for m, buffer in zip(ways.told, received, strict=True)],
        [(m.peer, buffer) for m, buffer in zip(ways.telling, sent, strict=True)],
        lambda: 8 * sum(size(m) for rank in members.ranks for m in asked.ways_of(rank).told),
        "exchange row numbers",
    )
    found = {}
    for message, buffer in zip(ways.told, received, strict=True):
        here, starts = np.zeros_like(counts[0]), np.zeros(len(ways.edges), np.int64)
        here[list(message.strips)] = counts[message.ask, list(message.strips)]
        starts[1:] = here.cumsum()
        found[message.ask] = buffer.to(device), starts
    return found


def _swap(
    members: Communicator,
    receives: Sequence[tuple[int, torch.Tensor]],
    sends: Sequence[tuple[int, torch.Tensor]],
    total: Callable[[], int],
    op: str,
) -> None:
    """Sends and fills contiguous buffers on the wire's device; empty ones are left out."""
    if len(members.ranks) == 1:
        return
    receives = [(peer, buffer) for peer, buffer in receives if buffer.numel()]
    sends = [(peer, buffer) for peer, buffer in sends if buffer.numel()]
    recording = None
    if is_watched():
        sizes = [sum(b.nbytes for _, b in messages) for messages in (sends, receives)]
        recording = Recording(op, members, (sizes[0], sizes[1], total()))
    flight = members.flight()
    for peer, buffer in receives:
        flight.receive(peer, buffer)
    for peer, buffer in sends:
        flight.send(peer, buffer)
    flight.launch()
    flight.finish()
    if recording is not None:
        recording.end()


def gather_ragged(values: torch.Tensor, members: Communicator) -> list[torch.Tensor]:
    """Everybody's tensor of (n, ...) of one dtype, in order of group rank; lengths may differ."""
    if len(members.ranks) == 1:
        return [values]
    wire = members.wire_device
    mine = torch.tensor([len(values)], device=wire)
    lengths = mine.new_empty(len(members.ranks))
    with recorded("exchange row counts", members, 8):
        members.all_gather(lengths, mine)
    inner = values.shape[1:]
    found = [
        torch.empty((length, *inner), dtype=values.dtype, device=wire)
        for length in lengths.tolist()
    ]
    sent = values.to(wire).contiguous()
    found[members.ranks.group_rank(members.rank)] = sent
    peers = [rank for rank in members.ranks if rank != members.rank]
    _swap(
        members,
        [(rank, found[members.ranks.group_rank(rank)]) for rank in peers],
        [(rank, sent) for rank in peers],
        lambda: sum(one.nbytes for one in found) * len(peers),
        "gather rows",
    )
    return [one.to(values.device) for one in found]


# -- fetching and giving ---------------------------------------------------------------------------


def fetch(asked: Asked, carriers: Carriers) -> Carriers:
    """The rows of each of this rank's asks, or a tie. Every rank of the group calls it.

    `carriers` are those of the table. Differentiable any number of times, if asked with `adds`.
    """
    if torch.is_grad_enabled() and any(carrier.requires_grad for carrier in carriers):
        found: Carriers = _Fetch.apply(asked, *carriers)  # type: ignore[no-untyped-call]
        return found
    return _fetched(asked, carriers)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *carriers: torch.Tensor) -> Carriers:
        ctx.asked = asked
        ctx.op = current_op()
        # As `_Exchange` in `differentiable.py` does, for checkpointing.
        ctx.save_for_backward(carriers[0].new_empty(0))
        return _fetched(asked, carriers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert len(ctx.saved_tensors) == 1
        with doing(f"backward of {ctx.op or 'fetch'}") if TRACES else nullcontext():
            if not torch.is_grad_enabled():
                return None, *_given(ctx.asked, grads)
            return None, *_Give.apply(ctx.asked, *grads)  # type: ignore[no-untyped-call]


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *grads: torch.Tensor) -> Carriers:
        ctx.asked = asked
        ctx.save_for_backward(grads[0].new_empty(0))
        return _given(asked, grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert len(ctx.saved_tensors) == 1
        return None, *fetch(ctx.asked, grads)


def _fetched(asked: Asked, carriers: Carriers) -> Carriers:
    """The values of `fetch`."""
    ways, members = asked.ways, asked.members
    inner, like = asked.table.shape[1:], carriers[0].detach()
    found = {k: like.new_empty((len(rows), *inner)) for k, rows in asked.rows.items()}
    landings = []
    for message in ways.fetched:
        if message.peer != members.rank:
            target = _part(asked, found[message.ask], message)
            landings.append((message.peer, target, _landing(target, members)))
    sends = [
        (peer, _rows_of(asked, carriers, k, box).to(members.wire_device))
        for k, box, peer in ways.serving
    ]
    _swap(
        members,
        [(peer, landing) for peer, _, landing in landings],
        sends,
        lambda: _total(asked, like.element_size(), gives=False),
        "fetch rows",
    )
    for message in ways.fetched:
        if message.peer == members.rank:
            rows = _rows_of(asked, carriers, message.ask, message.box)
            _part(asked, found[message.ask], message).copy_(rows)
    for _, target, landing in landings:
        if landing is not target:
            target.copy_(landing)
    return tuple(found.values()) or (like.new_empty(0),)


def _given(asked: Asked, grads: Carriers) -> Carriers:
    """What `fetch`'s carriers have of the gradients of its rows; values only."""
    ways, members = asked.ways, asked.members
    like = grads[0].detach()
    own = dict(zip(ways.own, grads, strict=True)) if ways.own else {}
    landings = {
        message: _landing_of(asked, message, like)
        for message in ways.given
        if message.peer != members.rank
    }
    sends = [
        (message.peer, _part(asked, own[message.ask], message).contiguous().to(members.wire_device))
        for message in ways.giving
    ]
    _swap(
        members,
        [(message.peer, landing) for message, landing in landings.items()],
        sends,
        lambda: _total(asked, like.element_size(), gives=True),
        "give rows",
    )
    boxes = asked.table.boxes_of(members.rank)
    found = [like.new_zeros(box.shape) for box in boxes]
    for message in ways.given:
        if not asked.num_rows(message.ask, message.box):
            continue
        here = message not in landings
        rows = _part(asked, own[message.ask], message) if here else landings[message]
        shard = found[ways.shards[message.box]]
        shard.index_add_(0, asked.local_rows(message.ask, message.box), rows.to(like.device))
    return tuple(found) or (like.new_empty(0),)


def _rows_of(asked: Asked, carriers: Carriers, ask: int, box: int) -> torch.Tensor:
    shard = carriers[asked.ways.shards[box]].detach()
    return shard.index_select(0, asked.local_rows(ask, box))


def _part(asked: Asked, rows: torch.Tensor, message: _Message) -> torch.Tensor:
    """What an ask's rows have of a box: a view."""
    inner = asked.ways.boxes[message.box].slices()[1:]
    return rows[(slice(*asked.span(message.ask, message.box)), *inner)]


def _landing(target: torch.Tensor, members: Communicator) -> torch.Tensor:
    """Where a message is received: in its place, if it can be."""
    if target.is_contiguous() and target.device == members.wire_device:
        return target
    return torch.empty(target.shape, dtype=target.dtype, device=members.wire_device)


def _landing_of(asked: Asked, message: _Message, like: torch.Tensor) -> torch.Tensor:
    inner = asked.ways.boxes[message.box].shape[1:]
    shape = (asked.num_rows(message.ask, message.box), *inner)
    return torch.empty(shape, dtype=like.dtype, device=asked.members.wire_device)


def _total(asked: Asked, itemsize: int, *, gives: bool) -> int:
    """Bytes between all ranks: what each receives."""
    total = 0
    for rank in asked.members.ranks:
        ways = asked.ways_of(rank)
        for ask, box, peer in ways.given if gives else ways.fetched:
            if peer != rank:
                inner = math.prod(ways.boxes[box].shape[1:])
                total += asked.num_rows(ask, box) * inner * itemsize
    return total
