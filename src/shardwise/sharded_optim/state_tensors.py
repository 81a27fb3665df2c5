"""The tensors that an optimizer keeps for a parameter, and which of them are laid out like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.sharded_tensor.reshard_target import ReshardTarget
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.to_layouts import reshard_all_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.comm.communicator import Communicator

__all__ = ["follow_parameters", "is_like_parameter", "promote", "state_moves"]


def is_like_parameter(key: object, value: object, parameter: torch.Tensor) -> bool:
    """Whether a state tensor has an element for each one of the parameter's.

    A step count has none, also where the parameter has one element only.
    """
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"


def promote(tensor: torch.Tensor, members: Communicator) -> ShardedTensor:
    """A plain tensor that every rank has, as a replicated one on the same memory; a leaf."""
    layout = replicated(tuple(tensor.shape), tuple(sorted(members.ranks)))
    return wrap(make_state(layout, [tensor.detach()], group=members))


def state_moves(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, torch.Tensor],
    targets: Mapping[str, ReshardTarget],
) -> tuple[dict[str, ShardedTensor], dict[str, ReshardTarget]]:
    """The state of parameters that goes where they go, by name, and where that is.

    `targets` are those of parameters that are to move; the state of others goes where they are.
    What is kept on another device than its parameter stays on it. Plain state of a sharded
    parameter, which every rank has whole, becomes sharded.
    """
    tensors: dict[str, ShardedTensor] = {}
    found: dict[str, ReshardTarget] = {}
    for name, parameter in named.items():
        kept: Any = optimizer.state.get(parameter)
        if not isinstance(parameter, ShardedTensor) or not kept:
            continue
        state = parameter._state
        here = ReshardTarget(state.layout, state.spec, state.devices, state.device)
        to = targets.get(name, here)
        for key, value in kept.items():
            if not is_like_parameter(key, value, parameter):
                continue
            if not isinstance(value, ShardedTensor):
                value = kept[key] = promote(value, state.comm)
            what = f"optimizer state {key} of {name}"
            tensors[what] = value
            is_beside = value.device == parameter.device
            found[what] = to if is_beside else ReshardTarget(to.layout)
    return tensors, found


def follow_parameters(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    """Brings the state of sharded parameters to their layouts, in one exchange; all ranks call."""
    tensors, targets = state_moves(optimizer, named, {})
    reshard_all_in_place(tensors, targets)
