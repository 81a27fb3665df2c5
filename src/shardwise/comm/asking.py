"""What ranks want of a table, told to those who hold it. [Note: asks] in `row_ways.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.comm.row_ways import row_ways
from shardwise.comm.swapping import swap
from shardwise.comm.tracing import recorded
from shardwise.errors import OutOfRangeError
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.row_ways import Asks, RowNumbers, RowWays
    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints

__all__ = ["Asked", "ask"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What all ranks want of a table, as far as this one has to know it. [Note: asks]"""

    ways: RowWays
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

    def ways_of(self, rank: int) -> RowWays:
        """What `rank` sends, receives and copies."""
        return row_ways(self.table, self.asks, rank, adds=self.adds)

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
    device: torch.device,
    adds: bool,
    what: str,
) -> Asked:
    """Tells holders of the table which rows are wanted. Every rank of the group calls it.

    `rows` are those of this rank's asks: distinct numbers, ascending, int64. If some are out of
    range, every rank raises an error about `what`. `device` is the table's on this rank; `adds` as
    in `row_ways`.
    """
    ways = row_ways(table, asks, members.rank, adds=adds)
    own = dict(zip(ways.own, rows, strict=True))
    counts = _exchange_counts(ways, asks, own, members)
    bad = np.flatnonzero(counts[:, -1])
    if len(bad):
        raise OutOfRangeError(
            f"{what}: index out of range in self",
            rank=members.rank,
            expected=f"indices from 0 to {table.shape[0] - 1}",
            got=f"others on {ranks_text(sorted({r for k in bad.tolist() for r in asks[k]}))}",
        )
    asked = Asked(ways, table, members, asks, adds, counts[:, :-1], own, {})
    return replace(asked, told=_exchange_numbers(asked, device))


def _exchange_counts(
    ways: RowWays, asks: Asks, own: dict[int, torch.Tensor], members: Communicator
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


def _exchange_numbers(asked: Asked, device: torch.device) -> dict[int, tuple[torch.Tensor, Ints]]:
    """The row numbers of others' asks, as far as this rank holds the rows, on `device`."""
    ways, counts, own, members = asked.ways, asked.counts, asked.rows, asked.members

    def size(message: RowNumbers) -> int:
        return int(counts[message.ask, list(message.strips)].sum())

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
    swap(
        members,
        [(m.peer, buffer) for m, buffer in zip(ways.told, received, strict=True)],
        [(m.peer, buffer) for m, buffer in zip(ways.telling, sent, strict=True)],
        op="exchange row numbers",
        total=lambda: 8 * sum(size(m) for rank in members.ranks for m in asked.ways_of(rank).told),
    )
    found = {}
    for message, buffer in zip(ways.told, received, strict=True):
        here, starts = np.zeros_like(counts[0]), np.zeros(len(ways.edges), np.int64)
        here[list(message.strips)] = counts[message.ask, list(message.strips)]
        starts[1:] = here.cumsum()
        found[message.ask] = buffer.to(device), starts
    return found
