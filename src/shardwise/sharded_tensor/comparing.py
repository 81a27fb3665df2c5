"""Whether tensors are equal, for tensors of any two layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ArgumentValueError
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import (
    cut_state,
    replicated_layout,
    replicated_state,
    reshard_state,
)
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharded_tensor.state import State

__all__ = ["all_ranks"]

_Tensor: Any = torch.Tensor


def all_ranks(here: bool, state: State) -> bool:
    """Whether it holds on every rank of the group; all of them ask."""
    members = state.comm
    if len(members.ranks) == 1:
        return here
    flag = torch.tensor([int(here)], dtype=torch.int32, device=members.wire_device)
    members.all_reduce(flag, "min")
    return bool(flag.item())


def _together(a: torch.Tensor, b: torch.Tensor) -> tuple[State, State]:
    """Both in one layout, of which nothing is pending: that of the one that moves less."""
    first = a if isinstance(a, ShardedTensor) else b
    assert isinstance(first, ShardedTensor)
    state = first._state
    for other in (a, b):
        if isinstance(other, ShardedTensor) and set(other._state.comm.ranks) != set(
            state.comm.ranks
        ):
            raise ArgumentValueError(
                "two ShardedTensors that are compared",
                rank=state.rank,
                expected="one process group",
                got=f"groups of ranks {list(state.comm.ranks)} and {list(other._state.comm.ranks)}",
                fix="Reshard one of them into the other's group first.",
            )
    layouts = [t._state.layout for t in (a, b) if isinstance(t, ShardedTensor)]
    settled = [layout for layout in layouts if layout.pending is None]
    layout = settled[0] if settled else layouts[0].bar
    found = [
        reshard_state(t._state, layout)
        if isinstance(t, ShardedTensor)
        else cut_state(t, state, layout=layout)
        for t in (a, b)
    ]
    return found[0], found[1]


def _compare(
    a: torch.Tensor, b: torch.Tensor, test: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    with torch.no_grad():
        first, second = _together(a, b)
        pairs = zip(first.shards, second.shards, strict=True)
        return all_ranks(all(test(x, y) for x, y in pairs), first)


@handles(torch.equal, _Tensor.equal)
def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    if input.shape != other.shape:
        return False
    return _compare(input, other, torch.equal)


@handles(torch.allclose, _Tensor.allclose)
def _allclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    _check_shapes(input, other)
    return _compare(
        input,
        other,
        lambda x, y: torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan),
    )


@handles(torch.isclose, _Tensor.isclose)
def _isclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> ShardedTensor:
    _check_shapes(input, other)
    with torch.no_grad():
        first, second = _together(input, other)
        close = [
            torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)
            for x, y in zip(first.carriers, second.carriers, strict=True)
        ]
    return wrap(first.with_carriers(close))


@handles(torch.all, _Tensor.all)
def _all(input: ShardedTensor) -> ShardedTensor:
    """Of the whole tensor: a scalar that every rank has."""
    with torch.no_grad():
        state = input._state
        if state.layout.pending is not None:
            state = replicated_state(state)
        is_all = all_ranks(all(bool(shard.all()) for shard in state.shards), state)
    return _everywhere(torch.tensor(is_all, device=state.device), state)


def _everywhere(value: torch.Tensor, like: State) -> ShardedTensor:
    """A value that is the same on all ranks, as a replicated tensor of the group."""
    layout = replicated_layout(tuple(value.shape), like)
    return wrap(like.with_carriers([value], layout=layout, spec=None))


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise ArgumentValueError(
            "two tensors that are compared",
            expected="one shape",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
        )
