"""What the tests of loading share: layouts, values, tensors to fill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import RankFailure
from shardwise.geometry import Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["equal", "full", "numbers", "on_one", "rows", "same", "to_fill"]


def to_fill(layout: Layout, dtype: torch.dtype, rank: int) -> ShardedTensor:
    """A sharded tensor of wrong values."""
    shards = [torch.ones(box.shape).to(dtype) for box in layout.boxes_of(rank)]
    return wrap(make_state(layout, shards, group=None, dtype=dtype))


def full(tensor: Any) -> torch.Tensor:
    """The whole of a sharded tensor."""
    found: torch.Tensor = tensor.full_tensor()
    return found


def rows(shape: tuple[int, ...], world_size: int, dim: int = 0) -> Layout:
    """Cut evenly along one dim."""
    return shardwise.chunk(dim, ranks=range(world_size)).layout(shape)


def same(shape: tuple[int, ...], world_size: int) -> Layout:
    """A copy on every rank."""
    return Layout.replicated(shape, range(world_size))


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random ones, the same for the same number of dims."""
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def equal(one: Any, other: torch.Tensor) -> bool:
    """Bit for bit, but for the sign of zero, which a sum of terms may lose."""
    return one.dtype == other.dtype and torch.equal(one.float(), other.float())


def on_one(fn: Callable[[], Any]) -> Any:
    """The result of one rank; what it raises."""
    try:
        return simulate(lambda rank: fn(), 1).results[0]
    except RankFailure as failure:
        raise failure.__cause__ or failure from None
