"""The table and the indices of an embedding: whose they are, and the rows that they name.

[Note: whose ids] Plain indices are this rank's own, or the same on all ranks (`plain_inputs`);
sharded ones are what their layout says. Where every rank that has indices has, too, what it takes
of the table to do its part, a rule does it and nothing moves: the indices are on all ranks, or
the table is. Else the ranks with indices fetch the rows, each that they need once, and work on
those: a full gather of the table, or a sum of masked rows, would be far more.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise.comm.asking import ask
from shardwise.comm.fetching import fetch
from shardwise.errors import ArgumentTypeError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.implicit import settle
from shardwise.sharded_tensor.plain_inputs import are_rows, check_plain
from shardwise.sharded_tensor.resharding import check_one_group, is_everywhere, replicated_layout
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.row_ways import Asks
    from shardwise.sharded_tensor.state import State

__all__ = [
    "Distinct",
    "Ids",
    "as_state",
    "fetched_rows",
    "is_plain",
    "meet",
    "operands_of",
    "shared_ids",
    "with_columns",
    "wrapped",
]


class Distinct(NamedTuple):
    """The different rows that a piece of indices names."""

    rows: torch.Tensor  # ascending
    places: torch.Tensor  # of the shape of the indices: where each stands among `rows`
    counts: torch.Tensor  # how often


class Ids(NamedTuple):
    """Indices on this rank. [Note: whose ids]"""

    pieces: tuple[torch.Tensor, ...]  # int64
    asks: Asks
    own: tuple[int, ...]  # the ask of each piece
    members: Communicator
    state: State | None  # None: plain, this rank's own

    @property
    def are_everywhere(self) -> bool:
        """Whether every rank has them all."""
        if self.state is None:
            return len(self.members.ranks) == 1
        return is_everywhere(self.state)

    def distinct(self) -> list[Distinct]:
        """Of each piece."""
        return [_distinct(piece) for piece in self.pieces]


def _distinct(ids: torch.Tensor) -> Distinct:
    if ids.device.type == "cpu":  # numpy sorts integers in less than half the time
        found = np.unique(ids.numpy(), return_inverse=True, return_counts=True)
        rows, places, counts = map(torch.from_numpy, found)
    else:
        rows, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return Distinct(rows, places.view(ids.shape), counts)


def operands_of(func: Any, input: Any, weight: Any, with_ids: Sequence[Any]) -> tuple[State, Ids]:
    """The table, and the indices; `with_ids` are the tensors that belong to them."""
    what = func.__name__
    sharded = [one for one in (*with_ids, weight) if isinstance(one, ShardedTensor)]
    states = [live_state(one) for one in sharded]
    check_one_group(what, states)
    if not isinstance(input, torch.Tensor) or not isinstance(weight, torch.Tensor):
        raise ArgumentTypeError(
            what, expected="tensors", got=f"{type(input).__name__} and {type(weight).__name__}"
        )
    table = as_state(weight, states[0])
    if all(map(is_plain, with_ids)) and are_rows():
        return table, _own_ids(input, table.comm)
    plain = [one for one in with_ids if one is not None and is_plain(one)]
    if plain:
        check_plain(func, [states[0], *plain])
    return table, shared_ids(settle(func, as_state(input, states[0])))


def _own_ids(ids: torch.Tensor, members: Communicator) -> Ids:
    ranks = sorted(members.ranks)
    asks = tuple((rank,) for rank in ranks)
    return Ids((_whole_numbers(ids),), asks, (ranks.index(members.rank),), members, None)


def shared_ids(state: State) -> Ids:
    """Indices that are cut: each box of them is one ask."""
    layout = state.layout
    numbers, asks = _asks_of(layout)
    own = tuple(numbers[box] for box in layout.boxes_of(state.rank))
    pieces = tuple(map(_whole_numbers, state.shards))
    return Ids(pieces, asks, own, state.comm, state)


def _whole_numbers(ids: torch.Tensor) -> torch.Tensor:
    return ids.detach().long()


@lru_cache(maxsize=256)
def _asks_of(layout: Layout) -> tuple[dict[Box, int], Asks]:
    """The number of each box, and the ranks that have it: an ask each."""
    ranks: dict[Box, set[int]] = {}
    for box, rank, _ in layout:
        ranks.setdefault(box, set()).add(rank)
    return {box: k for k, box in enumerate(ranks)}, tuple(tuple(sorted(r)) for r in ranks.values())


@lru_cache(maxsize=256)
def meet(ids: Layout, weight: Layout) -> bool:
    """Whether for every two boxes some rank has both."""
    sets = [[set(ranks) for ranks in _asks_of(layout.bar)[1]] for layout in (ids, weight)]
    return all(a & b for a, b in product(*sets))


def as_state(tensor: torch.Tensor, like: State) -> State:
    """A tensor that is sharded, or plain and the same on all ranks."""
    if isinstance(tensor, ShardedTensor):
        return live_state(tensor)
    return like.with_carriers(
        [tensor], layout=replicated_layout(tuple(tensor.shape), like), spec=None
    )


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Whether it is no sharded tensor; so is an absent one."""
    return tensor is None or not isinstance(tensor, ShardedTensor)


def fetched_rows(
    ids: Ids, table: State, found: Sequence[Distinct], func: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of each piece of indices; and for a rank without any, a tie."""
    adds = table.requires_grad and torch.is_grad_enabled()
    by_ask = dict(zip(ids.own, [one.rows for one in found], strict=True))
    rows = list(by_ask.values())
    asked = ask(
        table.layout,
        ids.asks,
        rows,
        table.comm,
        device=table.device,
        adds=adds,
        what=func.__name__,
    )
    fetched = fetch(asked, table.carriers)
    by_number = dict(zip(by_ask, fetched, strict=True)) if by_ask else {}
    return [by_number[number] for number in ids.own], fetched[0]


@lru_cache(maxsize=256)
def with_columns(layout: Layout, width: int) -> Layout:
    """The layout of what is found for indices of `layout`: rows of `width` columns each."""
    boxes = [Box((*box.start, 0), (*box.stop, width)) for box in layout.boxes]
    return Layout((*layout.shape, width), boxes, layout.owners)


def wrapped(like: State, pieces: Sequence[torch.Tensor], layout: Layout) -> ShardedTensor:
    """The pieces as a sharded tensor of the layout."""
    made = like.with_carriers(pieces, layout=layout, spec=None)
    made.is_from_rows = made.is_special = like.is_from_rows
    return wrap(made)
