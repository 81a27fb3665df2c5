"""Tensors that get values from elsewhere: which can, their memory, and new ones for state."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import LoadError
from shardwise.sharded_optim.api import ShardedOptimizer
from shardwise.sharded_optim.state_tensors import is_like_parameter, promote
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout

__all__ = ["check_can_fill", "parameters_by_key", "places_of", "room_for"]


def check_can_fill(name: str, tensor: torch.Tensor, rank: int) -> None:
    """Raises unless the tensor of this name has memory, and its data was not given up."""
    if isinstance(tensor, ShardedTensor):
        live_state(tensor)
    if tensor.is_meta:
        raise LoadError(
            f"{name!r} of the model",
            rank=rank,
            expected="memory to load into",
            got="a tensor on the meta device",
            fix='Give the model memory first: model.to_empty(device="cpu").',
        )


def room_for(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    key: str,
    parameter: torch.Tensor | None,
    members: Communicator,
) -> torch.Tensor:
    """A new tensor for state: cut as its parameter is, if it has an element for each of its."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    if parameter is not None and is_like_parameter(key, whole, parameter):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, ShardedTensor) and shape:  # sums over a dim, say: on every rank
        return promote(torch.empty_like(whole, device=parameter.device), members)
    # A count is nobody's: torch puts it where it wants it.
    device = "cpu" if parameter is None or key == "step" else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)


def parameters_by_key(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> dict[Any, torch.Tensor]:
    """The optimizer's parameters by their saved keys; raises unless there are as many."""
    keys = [list(group["params"]) for group in groups]
    own = [group["params"] for group in optimizer.param_groups]
    if isinstance(optimizer, ShardedOptimizer) and set(chain(*keys)) == set(optimizer.named_params):
        return dict(optimizer.named_params)
    if list(map(len, keys)) != list(map(len, own)):
        raise LoadError(
            "param_groups of the optimizer's state dict",
            expected=f"groups of {list(map(len, own))} parameters",
            got=list(map(len, keys)),
            fix="Nothing was loaded. Make the optimizer as the one that was saved.",
        )
    return dict(zip(chain(*keys), chain(*own), strict=True))


def places_of(into: torch.Tensor, members: Communicator) -> tuple[Layout, Sequence[torch.Tensor]]:
    """The layout of a tensor and this rank's part of it; a plain one is everywhere."""
    if isinstance(into, ShardedTensor):
        return into._state.layout, into._state.shards
    return replicated(tuple(into.shape), tuple(sorted(members.ranks))), [into.detach()]
