"""`full_state_dict`: a model's state in one piece, as the plain model has it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import tree_map
from shardwise.comm.agreement import agree
from shardwise.modules.group import check_group, group_of
from shardwise.modules.state_trees import named_tensors
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.reshard_target import ReshardTarget
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.steps import in_steps
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.to_layouts import Move, carry_out
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["full_state_dict"]

_LEAST = 1 << 26  # bytes of a step: small tensors go together
_CPU = torch.device("cpu")


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    rank0_only: bool = True,
    max_bytes: int | None = None,
    *,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The state dict that the plain model would have: full tensors on the CPU.

    All ranks of the model's group call it. The first one gets the dict and the others an empty
    one; with `rank0_only=False` all get it. With an optimizer it is `{"model": ..., "optimizer":
    ...}`, of which the latter is what the same optimizer has on one process, and can load there.
    Tensors are gathered one after the other, small ones together, straight to the CPU; `max_bytes`
    caps the staging, on every rank. Tied weights stay tied. `progress` as in `reshard_all`.

    >>> import shardwise
    >>> def full(rank):
    ...     model = torch.nn.Linear(4, 6)
    ...     rows = shardwise.distribute(model.weight.detach(), shardwise.chunk(0))
    ...     model.weight = torch.nn.Parameter(rows)
    ...     return {name: tuple(t.shape) for name, t in full_state_dict(model).items()}
    >>> shardwise.run_local(lambda rank: full(rank), 2)
    [{'weight': (6, 4), 'bias': (6,)}, {}]
    """
    members = group_of(model, process_group)
    tree = _state_of(model, optimizer)
    receivers = _receivers(members, rank0_only)
    moves = _agreed_moves(tree, receivers, members, max_bytes)
    full: dict[int, torch.Tensor] = {}
    steps = in_steps(moves, least=_LEAST)
    with progress_bar("gathering", sum(m.nbytes for m in moves), members, show=progress) as advance:
        for step in steps:
            for move, state in zip(step, carry_out(step, members, max_bytes), strict=True):
                full.update({id(move.tensor): shard for shard in state.shards})
            advance(sum(move.nbytes for move in step))
    if members.rank not in receivers:
        return {}
    if optimizer is None:
        return _in_one_piece(tree, full)
    return {key: _in_one_piece(part, full) for key, part in tree.items()}


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """With the parameters themselves, by which tied ones are known."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return state if optimizer is None else {"model": state, "optimizer": optimizer.state_dict()}


def _receivers(members: Communicator, rank0_only: bool) -> tuple[int, ...]:
    return (members.ranks.rank_at(0),) if rank0_only else tuple(sorted(members.ranks))


def _agreed_moves(
    tree: object, receivers: tuple[int, ...], members: Communicator, max_bytes: int | None
) -> list[Move]:
    """One of each sharded tensor, to the receivers; the same on all ranks."""
    problem: Exception | None = None
    values: dict[str, object] = {"rank0_only": len(receivers) == 1, "max_bytes": max_bytes}
    moves: dict[int, Move] = {}
    devices = (_CPU,) if members.rank in receivers else ()
    try:
        for name, tensor in named_tensors(tree):
            if not isinstance(tensor, ShardedTensor):
                continue
            state = live_state(tensor).map(torch.detach)
            check_group(name, tensor, members)
            target = ReshardTarget(replicated(state.layout.shape, receivers), None, devices)
            moves.setdefault(id(tensor), Move(name, tensor, state, target))
            values[f"layout of {name!r}"] = state.layout
            values[f"dtype of {name!r}"] = state.dtype
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("full_state_dict", values, group=members, problem=problem)
    return list(moves.values())


def _in_one_piece(state: dict[str, Any], full: dict[int, torch.Tensor]) -> dict[str, Any]:
    """The same, with full tensors in place of sharded ones, and copies of all else."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if id(leaf) not in full:  # a plain one; tied ones share a copy
            full[id(leaf)] = leaf.detach().to(_CPU, copy=True)
        return full[id(leaf)]

    made: Any = tree_map(copied, state)
    versions = getattr(state, "_metadata", None)  # of modules, by which they load older states
    if versions is not None:
        made._metadata = copy.deepcopy(versions)
    found: dict[str, Any] = made
    return found
