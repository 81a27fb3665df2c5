"""A live model gets another plan: its tensors move, in place of the same objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._torch_compat import can_swap
from shardwise.arguments import whole_number
from shardwise.comm.agreement import agree
from shardwise.comm.checks import should_check
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.modules.group import group_of
from shardwise.modules.plan_hooks import add_plan_hooks, remove_plan_hooks
from shardwise.modules.replacing import owners_of, put_in_place
from shardwise.modules.sharding import check_plan
from shardwise.sharded_optim.state_tensors import promote, state_moves
from shardwise.sharded_tensor.distributing import digest
from shardwise.sharded_tensor.reshard_target import target_of
from shardwise.sharded_tensor.state import check_requires_grad
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.to_layouts import reshard_all_in_place
from shardwise.sharding_plan.matching import match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.modules.replacing import Owner
    from shardwise.sharded_tensor.reshard_target import ReshardTarget
    from shardwise.sharding_plan.api import ShardingPlan
    from shardwise.sharding_plan.matching import Matched
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["reshard_module"]

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer] | None


def reshard_module(
    model: nn.Module,
    plan: ShardingPlan,
    optimizer: Optimizers = None,
    max_bytes: int | None = None,
    *,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> None:
    """Brings a live model to another plan, its gradients and the optimizer's state with it.

    All ranks of the model's group call it. Parameters stay the same objects, so optimizers, hooks
    and tied weights go on as they were, and training continues with the same numbers. What the
    plan does not name stays where it is. A plain tensor that it names, which every rank has whole,
    becomes sharded. What the old plan did to outputs and inputs ends, and the new plan's begins.
    Sharders that are made of specs, as the built-in ones, may be in it.

    State that has its parameter's shape follows it; state that a parameter of the model has in
    another layout, or plain, is brought to the parameter's layout, also if that does not change.
    `optimizer` may be a list. `max_bytes` caps the staging; the tensors go in steps, each of which
    gives up what has moved. `progress` as in `reshard_all`.

    >>> import shardwise
    >>> from shardwise.sharding_plan import ShardingPlan
    >>> def moved(rank):
    ...     model = torch.nn.Linear(4, 6)
    ...     weight = model.weight
    ...     reshard_module(model, ShardingPlan({"weight": "chunk(0)"}))
    ...     reshard_module(model, ShardingPlan({"weight": "chunk(1, sizes=[1, 3])"}))
    ...     return model.weight is weight, tuple(weight.local_tensor().shape)
    >>> shardwise.run_local(lambda rank: moved(rank), 2)
    [(True, (6, 1)), (True, (6, 3))]
    """
    members = group_of(model, process_group)
    named = _named_tensors(model)
    matched, targets = _agreed(
        model, plan, named, members, optimizer=optimizer, max_bytes=max_bytes
    )
    for one in matched.tensors:
        if not isinstance(one.tensor, ShardedTensor):
            _promote_in_place(one.tensor, owners_of(model, one.names), members)
    named = _named_tensors(model)
    tensors: dict[str, Any] = {name: named[name] for name in targets}
    for each in _listed(optimizer):
        state, where = state_moves(each, named, targets)
        tensors |= state
        targets |= where
    reshard_all_in_place(tensors, targets, max_bytes=max_bytes, progress=progress)
    remove_plan_hooks(model)
    add_plan_hooks(model, matched, members)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each by one name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _listed(optimizer: object) -> list[torch.optim.Optimizer]:
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = [one for one in given if isinstance(one, torch.optim.Optimizer)]
    if optimizer is not None and len(found) != len(given):
        raise ArgumentTypeError(
            "optimizer of reshard_module",
            expected="a torch.optim.Optimizer, or a list of them",
            got=type(optimizer).__name__,
        )
    return found


def _agreed(
    model: nn.Module,
    plan: ShardingPlan,
    named: Mapping[str, torch.Tensor],
    members: Communicator,
    *,
    optimizer: Optimizers,
    max_bytes: int | None,
) -> tuple[Matched, dict[str, ReshardTarget]]:
    """What the plan means, and where each tensor goes; alike on all ranks."""
    problem: Exception | None = None
    values: dict[str, object] = {"max_bytes": max_bytes}
    targets: dict[str, ReshardTarget] = {}
    try:
        check_plan(plan, "reshard_module")
        values["optimizers"] = [type(one) for one in _listed(optimizer)]
        device = next((tensor.device.type for tensor in named.values()), "cpu")
        matched = match(plan, model, list(members.ranks), device)
        _check_no_sharders(matched, members.rank)
        values["output_plan"] = matched.outputs
        values["return_local_tensor"] = matched.locals
        values["input_plan"] = matched.inputs
        name_of = {id(tensor): name for name, tensor in named.items()}
        for one in matched.tensors:
            name = name_of[id(one.tensor)]
            targets[name] = _target(name, one.tensor, one.spec, members)
            values[f"target layout of {name!r}"] = targets[name].layout
            if not isinstance(one.tensor, ShardedTensor) and should_check(hot=True):
                values[f"data of {name!r}"] = digest(one.tensor)
        if max_bytes is not None:
            largest = max((named[name].dtype.itemsize for name in targets), default=1)
            whole_number(max_bytes, "max_bytes", least=largest)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("reshard_module", values, group=members, problem=problem)
    return matched, targets


def _target(
    name: str, tensor: torch.Tensor, spec: ShardingSpec, members: Communicator
) -> ReshardTarget:
    """Where the tensor goes; raises if it cannot."""
    try:
        found = target_of(spec, tuple(tensor.shape), members.rank)
        members.ranks.check_members(found.layout.ranks, what=f"the plan's spec of {name!r}")
        if tensor.requires_grad:
            check_requires_grad(found.layout, tensor.dtype, members.rank)
    except Exception as error:
        error.add_note(f"while resharding {name!r}")
        raise
    is_plain = isinstance(tensor, nn.Parameter) and not isinstance(tensor, ShardedTensor)
    if not tensor.is_leaf or (is_plain and not can_swap(tensor)):
        raise OpError(
            f"reshard_module of {name!r}",
            rank=members.rank,
            expected="a tensor that nothing but modules and optimizers refer to",
            got="one that autograd still uses, or that is weakly referenced",
            fix="Call it between steps, and let go of the last loss, `del loss`: its graph holds "
            f'plain parameters. Or have {name!r} sharded from the start, by "replicate()".',
        )
    return found


def _check_no_sharders(matched: Matched, rank: int) -> None:
    """A sharder makes another module; what refers to the old one's parameters would be lost."""
    if matched.sharders:
        path, sharder = matched.sharders[0]
        raise ArgumentValueError(
            f"plan of reshard_module at {path!r}",
            rank=rank,
            expected="specs, since the parameters of a live model stay the same objects",
            got=type(sharder).__name__,
            fix=f'Say where its parameters go: {{"{path}.weight": "chunk(0)", ...}}.',
        )


def _promote_in_place(tensor: torch.Tensor, owners: Sequence[Owner], members: Communicator) -> None:
    """Makes a plain tensor a replicated sharded one, on the same memory, gradient included."""
    grad = tensor.grad
    put_in_place(tensor, promote(tensor, members), owners)
    if grad is not None:
        tensor.grad = promote(grad, members)
