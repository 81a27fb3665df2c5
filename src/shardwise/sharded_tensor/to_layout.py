"""`reshard`: a tensor in another layout, alone or many in one exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.agreement import agree
from shardwise.comm.differentiable import make_tie
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Layout, check_layout
from shardwise.sharded_tensor.remote_shards import connect
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.sharded_tensor.autograd import Hook

__all__ = ["Absent", "Target", "absent", "reshard", "reshard_in_place", "target_of"]

To = "ShardingSpec | Layout | ShardedTensor"


@dataclass(frozen=True, slots=True)
class Absent:
    """A tensor of ranks that this one is not among; see `absent`."""

    layout: Layout
    dtype: torch.dtype
    requires_grad: bool = False


def absent(layout: Layout, dtype: torch.dtype, *, requires_grad: bool = False) -> Absent:
    """What a rank passes to `reshard` for a tensor of a group that it is not in."""
    check_layout(layout, "layout of absent")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError("dtype of absent", expected="a torch.dtype", got=repr(dtype))
    return Absent(layout, dtype, requires_grad)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor is to go: its layout, a spec for it, and this rank's devices."""

    layout: Layout
    spec: ShardingSpec | None
    devices: tuple[torch.device, ...] | None  # None: where the tensor is


def target_of(to: object, shape: tuple[int, ...], rank: int) -> Target:
    """What `to` (a spec, a Layout or a ShardedTensor) means for a tensor of `shape`."""
    if isinstance(to, ShardingSpec):
        return Target(to.layout(shape), to, to.local_devices(shape, rank))
    if isinstance(to, ShardedTensor):
        state = to._state
        found = Target(state.layout, state.spec, state.devices)
    elif isinstance(to, Layout):
        found = Target(to, None, None)
    else:
        raise ArgumentTypeError(
            "to of reshard",
            rank=rank,
            expected="a spec, a Layout or a ShardedTensor",
            got=type(to).__name__,
            fix="E.g. shardwise.reshard(st, shardwise.chunk(1)).",
        )
    if found.layout.shape != shape:
        raise ArgumentValueError(
            "to of reshard",
            rank=rank,
            expected=f"a layout of the tensor's shape {shape}",
            got=f"one of shape {found.layout.shape}",
        )
    return found


def reshard(
    x: ShardedTensor | Absent,
    to: ShardingSpec | Layout | ShardedTensor,
    *,
    max_bytes: int | None = None,
    out: ShardedTensor | None = None,
    process_group: ProcessGroup | Communicator | None = None,
) -> ShardedTensor:
    """The same tensor in another layout: a spec's, a given one, or another tensor's.

    All ranks of the group call it. Pure and differentiable; where nothing changes, `x` itself is
    returned. What a rank has already is copied, what it lacks is received once. `max_bytes` caps
    the staging memory. `out` is a tensor of the target layout to fill (values only).

    If `to` names ranks outside of the tensor's group, pass a `process_group` that has them all;
    every rank of it calls, ranks without the tensor with `shardwise.absent(layout, dtype)`, and the
    result belongs to that group.

    >>> import shardwise
    >>> def columns(rank):
    ...     rows = shardwise.sharded_tensor.ones(shardwise.chunk(0), 4, 6)
    ...     return shardwise.reshard(rows, shardwise.chunk(1)).local_tensor().shape
    >>> shardwise.run_local(lambda rank: columns(rank), 2)
    [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    if isinstance(x, ShardedTensor) and out is process_group is None and _is_own_spec(x, to):
        return x  # nothing to do, and no time to lose over it
    state = _source(x, process_group)
    target = target_of(to, state.layout.shape, state.rank)
    if process_group is not None:
        _check_group(state, target)
    moved = reshard_state(
        state,
        target.layout,
        spec=target.spec,
        devices=target.devices,
        max_bytes=max_bytes,
        out=None if out is None else _out(out, state, target),
    )
    if out is not None:
        return out
    return x if isinstance(x, ShardedTensor) and moved is x._state else wrap(moved)


def _is_own_spec(x: ShardedTensor, to: object) -> bool:
    """Whether `to` is the very spec of the tensor, of which no placement can have been assigned."""
    is_own = to is x._state.spec and to is not None
    return is_own and not isinstance(to, EnumerableShardingSpec)


def _source(x: object, process_group: ProcessGroup | Communicator | None) -> State:
    """The state of `x` in the group in which it is to move."""
    if isinstance(x, ShardedTensor):
        state = x._state
        if process_group is None:
            return state
        members = communicator(process_group)
        return state.with_carriers(
            state.carriers,
            members=members,
            process_group=getattr(members, "process_group", None),
        )
    if not isinstance(x, Absent):
        raise ArgumentTypeError(
            "x of reshard",
            expected="a ShardedTensor",
            got=type(x).__name__,
            fix="A plain tensor is sharded by shardwise.distribute(x, spec).",
        )
    if process_group is None:
        raise ArgumentValueError(
            "reshard of shardwise.absent(...)",
            expected="process_group=, a group of all ranks that have or get the tensor",
            got="None",
        )
    members = communicator(process_group)
    tie = make_tie(x.dtype, members.wire_device).requires_grad_(x.requires_grad)
    return State(
        x.layout,
        (tie,),
        members.rank,
        members,
        process_group=getattr(members, "process_group", None),
    )


def _check_group(state: State, target: Target) -> None:
    """All ranks of a larger group speak of the same tensor; raises on all if not."""
    members, problem = state.comm, None
    try:
        for layout, what in ((state.layout, "the tensor's layout"), (target.layout, "to")):
            members.ranks.check_members(layout.ranks, what=f"{what} of reshard")
        if len(state.carriers) > 1 or state.shards:
            pass
        elif state.layout.boxes_of(state.rank):
            raise ArgumentValueError(
                "shardwise.absent(...)",
                rank=state.rank,
                expected="a layout without this rank",
                got=str(state.layout),
                fix="Pass the tensor itself.",
            )
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    values: dict[str, Any] = {
        "source layout": state.layout,
        "target layout": target.layout,
        "dtype": state.dtype,
        "requires_grad": state.requires_grad and torch.is_grad_enabled(),
    }
    phrases = {"requires_grad": "say it by shardwise.absent(layout, dtype, requires_grad=True)"}
    agree("reshard", values, group=members, problem=problem, phrases=phrases)


def _out(out: object, state: State, target: Target) -> Sequence[torch.Tensor]:
    """The tensors to fill."""
    if not isinstance(out, ShardedTensor):
        raise ArgumentTypeError(
            "out of reshard", expected="a ShardedTensor", got=type(out).__name__
        )
    found = out._state
    if (found.layout, found.dtype) != (target.layout, state.dtype):
        raise ArgumentValueError(
            "out of reshard",
            rank=state.rank,
            expected=f"{target.layout}, {state.dtype}",
            got=f"{found.layout}, {found.dtype}",
        )
    _check_no_grad("out", state, found)
    return found.shards


def _check_no_grad(what: str, *states: State) -> None:
    if torch.is_grad_enabled() and any(state.requires_grad for state in states):
        raise OpError(
            f"reshard with {what}= of a tensor that requires grad",
            rank=states[0].rank,
            fix=f"{what}= is for values only: detach the tensor, or use torch.no_grad().",
        )


def reshard_in_place(tensor: ShardedTensor, spec: ShardingSpec) -> ShardedTensor:
    """Changes the layout of the tensor itself, and that of its gradient; hooks stay."""
    state = tensor._state
    target = target_of(spec, state.layout.shape, state.rank)
    if state.requires_grad and not tensor.is_leaf:
        raise OpError(
            "reshard in place of a ShardedTensor that autograd computed",
            rank=state.rank,
            fix="Use new = shardwise.reshard(st, spec), which is differentiable.",
        )
    with torch.no_grad():
        moved = reshard_state(
            state.map(torch.detach), target.layout, spec=target.spec, devices=target.devices
        )
        grad = None
        if isinstance(tensor.grad, ShardedTensor):
            held = tensor.grad._state
            grad = wrap(reshard_state(held, target.layout.bar, devices=moved.devices))
    for carrier in moved.carriers:
        carrier.requires_grad_(state.requires_grad)
    hooks: list[Hook] = state.hooks
    tensor._state = connect(
        moved.with_carriers(moved.carriers, spec=spec, init_rrefs=state.init_rrefs)
    )
    if grad is not None:
        tensor.grad = grad
    for hook in hooks:
        hook.attach(tensor._state)
    return tensor
