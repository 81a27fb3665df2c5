"""`reshard`: a tensor in another layout, alone or many in one exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from shardwise.arguments import cap
from shardwise.comm.agreement import agree, heard_by_all
from shardwise.comm.checks import is_debugging
from shardwise.comm.differentiable import make_tie, transfer_of
from shardwise.comm.executor import agree_on_moves
from shardwise.comm.process_group import communicator
from shardwise.comm.term_gradients import scale_terms
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError, ShardwiseError
from shardwise.geometry import Layout, check_layout
from shardwise.sharded_tensor.autograd import carriers_for, gradient_state
from shardwise.sharded_tensor.comparing import all_ranks
from shardwise.sharded_tensor.remote_shards import connect
from shardwise.sharded_tensor.reshard_target import (
    IN_ANOTHER_GROUP,
    reshard_to,
    target_in_group,
    target_of,
)
from shardwise.sharded_tensor.resharding import job_for, reshard_state, start_reshard
from shardwise.sharded_tensor.sizes_and_specs import home_device
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.telling import tell_of_arguments
from shardwise.sharded_tensor.tensor import ShardedTensor, adopt, refuse_late_gradients, wrap
from shardwise.sharded_tensor.usable import check_writable, live_state
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.sharded_tensor.reshard_target import ReshardTarget

__all__ = [
    "Absent",
    "AsyncReshard",
    "absent",
    "gradient_to_move",
    "land",
    "land_gradient",
    "reshard",
    "reshard_in_place",
]


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


class AsyncReshard:
    """A reshard under way; `wait()` gives the tensor. Ranks start and await in the same order."""

    def __init__(self, finish: Callable[[], ShardedTensor]) -> None:
        self._finish: Callable[[], ShardedTensor] | None = finish
        self._result: ShardedTensor | None = None

    def wait(self) -> ShardedTensor:
        """The tensor, once all of this rank's pieces are there; the same at every call."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None
        return self._result


@overload
def reshard(
    x: torch.Tensor | Absent,
    to: ShardingSpec | Layout | torch.Tensor,
    *,
    max_bytes: int | None = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[False] = ...,
    process_group: ProcessGroup | Communicator | None = ...,
) -> ShardedTensor: ...
@overload
def reshard(
    x: torch.Tensor | Absent,
    to: ShardingSpec | Layout | torch.Tensor,
    *,
    max_bytes: int | None = ...,
    out: torch.Tensor | None = ...,
    async_op: Literal[True],
    process_group: ProcessGroup | Communicator | None = ...,
) -> AsyncReshard: ...
def reshard(
    x: torch.Tensor | Absent,
    to: ShardingSpec | Layout | torch.Tensor,
    *,
    max_bytes: int | None = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    process_group: ProcessGroup | Communicator | None = None,
) -> ShardedTensor | AsyncReshard:
    """The same tensor in another layout: a spec's, a given one, or another tensor's.

    All ranks of the group call it. Pure and differentiable; where nothing changes, `x` itself is
    returned. What a rank has already is copied, what it lacks is received once. `max_bytes` caps
    the staging memory. `out` is a tensor of the target layout to fill. `async_op` returns at once
    an `AsyncReshard`, whose `wait()` gives the tensor; until then neither `x` nor `out` may change.
    Both are for values only, not for tensors that need gradients.

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
    has_options = max_bytes is not None or out is not None or async_op or process_group is not None
    try:
        state = _source(x, process_group)
    except Exception as problem:
        tell_of_arguments(
            "reshard", problem, (x,), process_group=process_group, hot=process_group is None
        )
        raise
    is_quick = not has_options and not is_debugging()
    if is_quick and isinstance(x, ShardedTensor) and _is_there(state, to):
        return x  # nothing to do, and no time to lose over it
    with heard_by_all("reshard", state.comm, hot=process_group is None):
        max_bytes = cap(max_bytes, "reshard")
        if process_group is None:
            target = target_in_group(to, state)
        else:  # of which `_check_group` tells the ranks
            target = target_of(to, state.layout.shape, state.rank)
        given = None if out is None else _out(out, state, target)
        if async_op:
            _check_no_grad("async_op", state)
    if process_group is not None:
        _check_group(state, target, max_bytes, is_absent=isinstance(x, Absent))
    elif given is None:
        _agree_on_no_move(state, target, max_bytes)

    def result(moved: State) -> ShardedTensor:
        if isinstance(out, ShardedTensor):
            return out
        return x if isinstance(x, ShardedTensor) and moved is x._state else wrap(moved)

    if async_op:
        wait = start_reshard(
            state,
            target.layout,
            spec=target.spec,
            devices=target.devices,
            home=target.home,
            max_bytes=max_bytes,
            out=given,
        )
        return AsyncReshard(lambda: result(wait()))
    return result(reshard_to(state, target, max_bytes=max_bytes, out=given))


def _agree_on_no_move(state: State, target: ReshardTarget, max_bytes: int | None = None) -> None:
    """In debug mode, ranks compare also that nothing is to be moved, which takes no exchange."""
    if is_debugging() and target.layout == state.layout:
        transfer = transfer_of(job_for(state, target.layout, None, max_bytes), state.carriers)
        agree_on_moves([transfer], max_bytes, state.comm)


def _is_there(state: State, to: object) -> bool:
    """Whether the tensor is where it is to go. What is wrong with `to` is found later."""
    if isinstance(to, ShardedTensor):
        other = to._state
        if other.layout != state.layout or other.devices != state.devices:
            return False
        return other.device == state.device  # of a rank without shards, too
    if isinstance(to, Layout):
        return to == state.layout
    if not isinstance(to, ShardingSpec):
        return False
    if to is state.spec and not isinstance(to, EnumerableShardingSpec):
        return True  # of which no placement can have been assigned
    shape = state.layout.shape
    try:
        devices = to.local_devices(shape, state.rank)
        if to.layout(shape) != state.layout or devices != state.devices:
            return False
        return bool(devices) or home_device(to, shape) == state.device
    except ShardwiseError:
        return False


def _source(x: object, process_group: ProcessGroup | Communicator | None) -> State:
    """The state of `x` in the group in which it is to move."""
    if isinstance(x, ShardedTensor):
        state = live_state(x)
        if process_group is None:
            return state
        members = communicator(process_group)
        return state.with_carriers(
            state.carriers,
            members=members,
            process_group=getattr(members, "process_group", None),
            view_of=state.view_of,
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


def _check_group(
    state: State, target: ReshardTarget, max_bytes: int | None, *, is_absent: bool
) -> None:
    """All ranks of a larger group speak of the same tensor; raises on all if not."""
    members, problem = state.comm, None
    try:
        for layout, what in ((state.layout, "the tensor's layout"), (target.layout, "to")):
            members.ranks.check_members(
                layout.ranks,
                what=f"{what} of reshard",
                rank=state.rank,
                fix=IN_ANOTHER_GROUP,
            )
        if is_absent and state.rank in state.layout.ranks:
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
        "max_bytes": max_bytes,
        "requires_grad": state.requires_grad and torch.is_grad_enabled(),
    }
    phrases = {"requires_grad": "say it by shardwise.absent(layout, dtype, requires_grad=True)"}
    agree("reshard", values, group=members, problem=problem, phrases=phrases)


def _out(out: object, state: State, target: ReshardTarget) -> Sequence[torch.Tensor]:
    """The tensors to fill."""
    if not isinstance(out, ShardedTensor):
        raise ArgumentTypeError(
            "out of reshard",
            rank=state.rank,
            expected="a ShardedTensor",
            got=type(out).__name__,
            fix="E.g. shardwise.sharded_tensor.empty(spec, *x.shape, dtype=x.dtype).",
        )
    found = live_state(out)
    check_writable(out, reshard)
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


def reshard_in_place(tensor: ShardedTensor, to: object, *, is_by_all: bool = True) -> ShardedTensor:
    """Changes the layout of the tensor itself, and that of its gradient; hooks stay.

    All ranks call it, or, where it does no more than to change devices, some.
    """
    state = live_state(tensor)
    with heard_by_all("reshard", state.comm):
        target = target_in_group(to, state)
        if state.requires_grad and not tensor.is_leaf:
            raise OpError(
                "reshard in place of a ShardedTensor that autograd computed",
                rank=state.rank,
                fix="Use new = shardwise.reshard(st, spec), which is differentiable.",
            )
    if is_by_all:
        _agree_on_no_move(state, target)
    with torch.no_grad():
        moved = reshard_to(state.map(torch.detach), target)
        is_same = moved.layout == state.layout  # of which every rank keeps its own gradients
        grad = None if is_same else _moved_gradient(state, moved)
    if is_same and [c.device for c in moved.carriers] == [c.device for c in state.carriers]:
        moved = state  # the very tensors, to which a graph that has begun leads
    land(tensor, moved.with_carriers(moved.carriers, spec=target.spec, view_of=state.view_of))
    if grad is not None:
        land_gradient(tensor, grad)
    elif is_same and moved is not state:
        for carrier, before in zip(moved.carriers, state.carriers, strict=True):
            carrier.grad = None if before.grad is None else before.grad.to(carrier.device)
    return tensor


def land(tensor: ShardedTensor, moved: State) -> None:
    """Makes the tensor object stand for what has moved; a leaf as it was, with the same hooks."""
    before = tensor._state
    for carrier in moved.carriers:
        carrier.requires_grad_(before.requires_grad)
    refuse_late_gradients(before, moved)
    adopt(tensor, connect(moved.with_carriers(moved.carriers, init_rrefs=before.init_rrefs)))
    for hook in before.hooks:
        hook.attach(tensor._state)


def gradient_to_move(state: State) -> State:
    """The gradient of a leaf as a tensor of its own, zeros where backward has not come."""
    with torch.no_grad():
        grads = tuple(
            torch.zeros_like(carrier) if carrier.grad is None else carrier.grad.detach()
            for carrier in state.carriers
        )
        found = gradient_state(state, scale_terms(grads, state.layout, state.rank, up=True))
    assert found is not None
    return found


def land_gradient(tensor: ShardedTensor, moved: State) -> None:
    """Makes what has moved, in the tensor's layout with nothing pending, its gradient."""
    state = tensor._state
    grads = scale_terms(carriers_for(state, moved), state.layout, state.rank, up=False)
    for carrier, grad in zip(state.carriers, grads, strict=True):
        carrier.grad = grad


def _moved_gradient(state: State, moved: State) -> State | None:
    """The gradient of a tensor where `moved` is, from that of its `state`; or None.

    All ranks ask, since backward may have reached the shards of some of them only.
    """
    has_none = all(carrier.grad is None for carrier in state.carriers)
    if not state.requires_grad or all_ranks(has_none, state):
        return None
    devices = (moved.device,) * len(moved.layout.bar.boxes_of(moved.rank))
    return reshard_state(gradient_to_move(state), moved.layout.bar, devices=devices)
