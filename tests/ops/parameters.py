"""Parameters to test optimizers with: of every layout, each beside a full tensor, its oracle."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from shardwise.comm.process_group import communicator
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.testing.op_check import layout_kinds, shards_of_full

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SHAPES", "WORLD_SIZE", "Pair", "check_same", "layouts", "pairs", "sharded"]

SHAPES = ((5, 4), (6,), (2, 3, 2), ())
WORLD_SIZE = 3


@lru_cache
def layouts(shape: tuple[int, ...], world_size: int) -> Sequence[Layout]:
    """Of every kind that parameters may have: nothing is pending."""
    found = [one for one in layout_kinds(shape, world_size=world_size).values() if not one.pending]
    if shape and world_size > 2:  # replica sets that overlap
        middle = shape[0] // 2
        low = Box((0,) * len(shape), (middle, *shape[1:]))
        high = Box((middle, *[0] * (len(shape) - 1)), shape)
        found.append(Layout(shape, [low, low, high, high], [0, 1, 1, 2]))
    return found


def sharded(full: torch.Tensor, layout: Layout, requires_grad: bool = False) -> ShardedTensor:
    """This rank's part of a full tensor."""
    members = communicator()
    shards = shards_of_full(full.detach(), layout).get(members.rank, [])
    for shard in shards:
        shard.requires_grad_(requires_grad)
    return wrap(
        make_state(layout, shards, group=members, dtype=full.dtype, requires_grad=requires_grad)
    )


class Pair:
    """A parameter, plain or sharded, and the full tensor that is its oracle."""

    def __init__(self, number: int, shape: tuple[int, ...], layout: Layout | None) -> None:
        self.generator = torch.Generator().manual_seed(number)
        self.layout = layout
        self.full = self.numbers(shape).requires_grad_()
        self.given = self.like_given(self.full).requires_grad_()

    def numbers(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), dtype=torch.float64, generator=self.generator)

    def like_given(self, full: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return full.detach().clone()
        return sharded(full, self.layout)

    def set_grads(self) -> None:
        self.full.grad = self.numbers(self.full.shape)
        self.given.grad = self.like_given(self.full.grad)

    def check(self, what: str, atol: float | None = None) -> None:
        check_same(self.given, self.full, what, atol)


def check_same(
    given: torch.Tensor, full: torch.Tensor, what: str, atol: float | None = None
) -> None:
    """Every local piece is that of the full tensor."""
    assert given.shape == full.shape, what
    assert given.dtype == full.dtype, what
    if not isinstance(given, ShardedTensor):
        torch.testing.assert_close(
            given.detach(),
            full.detach(),
            msg=lambda m: f"{what}: {m}",
            atol=atol,
            rtol=None if atol is None else 0,
            equal_nan=True,
        )
        return
    state = given._state
    for box, shard in zip(state.boxes, state.shards, strict=True):
        torch.testing.assert_close(
            shard.detach(),
            full.detach()[box.slices()],
            msg=lambda m: f"{what}, {state.layout} on rank {state.rank}: {m}",
            atol=atol,
            rtol=None if atol is None else 0,
            equal_nan=True,
        )


def pairs(world_size: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Pair]:
    """Parameters of every layout, and plain ones among them."""
    found: list[Pair] = []
    for shape in shapes:
        for layout in [None, *layouts(shape, world_size)]:
            found.append(Pair(len(found), shape, layout))
    return found
