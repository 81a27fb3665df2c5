"""Rows of a table that is cut, fetched by their numbers: owners send what they are asked for.

[Note: fetch and give] in `row_ways.py` says what the two are.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.swapping import swap
from shardwise.comm.tracing import TRACES, current_op, doing

if TYPE_CHECKING:
    from shardwise.comm.asking import Asked
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Carriers
    from shardwise.comm.row_ways import RowMessage

__all__ = ["fetch"]


def fetch(asked: Asked, carriers: Carriers) -> Carriers:
    """The rows of each of this rank's asks, or a tie. Every rank of the group calls it.

    `carriers` are those of the table. Differentiable any number of times, if asked with `adds`.
    """
    if torch.is_grad_enabled() and any(carrier.requires_grad for carrier in carriers):
        found: Carriers = _Fetch.apply(asked, *carriers)  # type: ignore[no-untyped-call]  # torch's
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
            return None, *_Give.apply(ctx.asked, *grads)  # type: ignore[no-untyped-call]  # torch's


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
    swap(
        members,
        [(peer, landing) for peer, _, landing in landings],
        sends,
        op="fetch rows",
        total=lambda: _total(asked, like.element_size(), gives=False),
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
    swap(
        members,
        [(message.peer, landing) for message, landing in landings.items()],
        sends,
        op="give rows",
        total=lambda: _total(asked, like.element_size(), gives=True),
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


def _part(asked: Asked, rows: torch.Tensor, message: RowMessage) -> torch.Tensor:
    """What an ask's rows have of a box: a view."""
    inner = asked.ways.boxes[message.box].slices()[1:]
    return rows[(slice(*asked.span(message.ask, message.box)), *inner)]


def _landing(target: torch.Tensor, members: Communicator) -> torch.Tensor:
    """Where a message is received: in its place, if it can be."""
    if target.is_contiguous() and target.device == members.wire_device:
        return target
    return torch.empty(target.shape, dtype=target.dtype, device=members.wire_device)


def _landing_of(asked: Asked, message: RowMessage, like: torch.Tensor) -> torch.Tensor:
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
