"""Who tells whom about rows of a table that is cut, and who sends them, as layouts alone say it.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwise.geometry import Box, Layout

__all__ = ["Asks", "RowMessage", "RowNumbers", "RowWays", "row_ways"]

Asks = tuple[tuple[int, ...], ...]  # the ranks of each ask, ascending


class RowMessage(NamedTuple):
    """The rows of an ask in a box, to or from a peer; the peer is this rank for what stays."""

    ask: int
    box: int
    peer: int


class RowNumbers(NamedTuple):
    """The row numbers of an ask, to or from a rank that holds some of these strips."""

    ask: int
    peer: int
    strips: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowWays:
    """Who sends what to whom, as far as layouts say it, for one rank. [Note: fetch and give]"""

    edges: tuple[int, ...]  # of the strips
    boxes: tuple[Box, ...]  # those of the table that have elements, each once
    spans: tuple[tuple[int, int], ...]  # of each box: its strips
    shards: dict[int, int]  # box -> local shard
    own: tuple[int, ...]  # the asks of this rank
    most: int  # asks of a rank
    told: tuple[RowNumbers, ...]  # numbers to be received
    telling: tuple[RowNumbers, ...]
    fetched: tuple[RowMessage, ...]
    serving: tuple[RowMessage, ...]
    given: tuple[RowMessage, ...]
    giving: tuple[RowMessage, ...]


@dataclass(frozen=True, slots=True)
class _Holders:
    """Who holds which box of a table, and who tells whom about which rows of it."""

    boxes: tuple[Box, ...]  # those that have elements, each once
    held_by: tuple[tuple[int, ...], ...]  # of each box
    edges: tuple[int, ...]  # of the strips
    spans: tuple[tuple[int, int], ...]  # of each box: its strips
    asks: Asks
    adds: bool  # as in `row_ways`

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

    def numbers(self, ask: int, holder: int, peer: int) -> list[RowNumbers]:
        """What a holder has to be told of an ask, to or from `peer`; nothing of its own."""
        strips = self._strips(ask, holder) if self.giver(ask, holder) != holder else ()
        return [RowNumbers(ask, peer, strips)] if strips else []

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
def row_ways(table: Layout, asks: Asks, rank: int, *, adds: bool) -> RowWays:
    """What `rank` sends, receives and copies.

    `adds`: gradients will come back, so every holder of a box has to know its rows.
    """
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
    return RowWays(
        edges=who.edges,
        boxes=who.boxes,
        spans=who.spans,
        shards=shards,
        own=own,
        most=max((sum(one in askers for askers in asks) for one in ranks), default=0),
        told=tuple(n for k in every for n in who.numbers(k, rank, who.giver(k, rank))),
        telling=tuple(n for k, holder in others for n in who.numbers(k, holder, holder)),
        fetched=tuple(RowMessage(k, box, who.server(rank, box)) for k in own for box in every_box),
        serving=tuple(
            RowMessage(k, box, asker)
            for k in every
            for asker in asks[k]
            for box in shards
            if asker != rank and who.server(asker, box) == rank
        ),
        given=tuple(RowMessage(k, box, who.giver(k, rank)) for k in every for box in shards),
        giving=tuple(
            RowMessage(k, box, holder)
            for k, holder in others
            for box in every_box
            if holder in who.held_by[box]
        ),
    )


def _one_of(ranks: tuple[int, ...], rank: int) -> int:
    """The rank itself if it is one of them, else one of them, so that all have their share."""
    return rank if rank in ranks else ranks[rank % len(ranks)]
