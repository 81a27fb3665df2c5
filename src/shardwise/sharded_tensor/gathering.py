"""The whole tensor in one place: on every rank, or on one."""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch

from shardwise.arguments import cap, whole_number
from shardwise.comm.agreement import heard_by_all, tell_all, to_agree_on
from shardwise.comm.differentiable import own_parts
from shardwise.comm.load_check import check_out, span
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.sharded_tensor.progress import logged_phase
from shardwise.sharded_tensor.resharding import replicated, replicated_state, reshard_state
from shardwise.sharded_tensor.telling import tell_others
from shardwise.sharded_tensor.usable import live_state, state_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.comm.agreement import Agreement
    from shardwise.sharded_tensor.state import State

__all__ = ["GradOfPlain", "full_tensor", "gathered", "refuse_options", "takes_index", "with_grad"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

GradOfPlain = Literal["same", "sum"]  # whether ranks have one gradient or each its part


def full_tensor(
    state: State, *, grad: GradOfPlain = "same", max_bytes: int | None = None
) -> torch.Tensor:
    """The whole tensor, plain, on every rank of the group; see `ShardedTensor.full_tensor`."""
    _check_grad("full_tensor", grad, state)
    if max_bytes is not None:
        with heard_by_all("full_tensor", state.comm):
            max_bytes = cap(max_bytes, "full_tensor")
    (full,) = replicated_state(state, max_bytes=max_bytes, has_own_parts=grad == "sum").shards
    return full.view_as(full) if full is state.carriers[0] else full


def with_grad(state: State, grad: GradOfPlain) -> State:
    """The same state, of which the gradients of replicas are the "same", or are to be summed."""
    _check_grad("local_shards", grad, state)
    if grad == "same" or state.layout.pending is not None:
        return state
    return reshard_state(state, state.layout, devices=state.devices, work=own_parts(state.layout))


def _check_grad(what: str, grad: object, state: State) -> None:
    if grad not in ("same", "sum"):
        problem = ArgumentValueError(
            "grad of a plain tensor",
            rank=state.rank,
            expected="'same' or 'sum'",
            got=repr(grad),
        )
        tell_all(what, problem, state.comm)  # perhaps the others move data
        raise problem


def gathered(
    state: State,
    dst: int,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> torch.Tensor | None:
    """The whole tensor, detached, on the rank at position `dst` of the group; None elsewhere."""
    members = state.comm
    problem: Exception | None = None
    try:
        max_bytes = cap(max_bytes, "gather")
        position = whole_number(dst, "dst of gather")
        receiver = members.ranks.rank_at(position)
        _check_out(state, out, is_receiver=receiver == members.rank, dst=position)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError("dtype of gather", expected="a torch.dtype", got=repr(dtype))
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    values: dict[str, object] = {
        "dst": dst,
        "dtype": dtype,
        "max_bytes": max_bytes,
        "layout": state.layout,
        "dtype of the tensor": state.dtype,
    }
    # The data fly beside what is compared. [Note: early messages] in `comm/agreement.py`
    agreement = to_agree_on("gather", values, group=members, problem=problem)
    wanted = state.dtype if dtype is None else dtype
    nbytes = math.prod(state.layout.shape) * state.dtype.itemsize
    with torch.no_grad(), logged_phase("gathering", nbytes, members):
        return _to_rank(state, receiver, out, wanted, max_bytes, agreement)


def takes_index(gather: Callable[_P, _T]) -> Callable[_P, _T]:
    """The method `gather`, which gets as `index` what torch's `gather` takes by position.

    It stands where the seed's has `out`; given as `out=` it is that.
    """
    method: Any = gather

    @wraps(gather)
    def by_position(*args: _P.args, **options: _P.kwargs) -> _T:
        given: Any = args
        is_plain_call = len(given) == 3 and options.keys() <= {"sparse_grad"}
        if is_plain_call and _is_index(live_state(given[0]), given[2]):
            return method(*given[:2], index=given[2], **options)  # type: ignore[no-any-return]  # as the method's
        return gather(*args, **options)

    return by_position


def refuse_options(state: State, *options: object) -> None:
    """Those of the seed's `gather`, given to torch's."""
    if any(option is not None for option in options):
        problem = OpError(
            "gather(dim, index), which is torch's, takes no out, dtype or max_bytes",
            fix="Write torch.gather(st, dim, index, out=out); convert its result.",
        )
        tell_others(state, problem, "gather")
        raise problem


def _is_index(state: State, out: object) -> bool:
    """Whether what stands where the seed's `gather` has `out` is the index of torch's `gather`.

    Ranks other than `dst` give no `out`, so it may not be taken for an index there: whole numbers
    that can be an `out` of this tensor are one.
    """
    if not isinstance(out, torch.Tensor) or not _is_whole(out.dtype):
        return False
    is_alike = _is_whole(state.dtype) and tuple(out.shape) == state.layout.shape
    return state_or_none(out) is not None or not is_alike


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _to_rank(
    state: State,
    rank: int,
    out: torch.Tensor | None,
    dtype: torch.dtype,
    max_bytes: int | None,
    agreement: Agreement | None,
) -> torch.Tensor | None:
    """Casts where that sends fewer bytes; straight into `out` if it has the dtype that travels."""
    # Addends are summed as they are: the sum of what they are cast to is another number.
    is_cast_first = dtype.itemsize < state.dtype.itemsize and state.layout.pending is None
    wire = dtype if is_cast_first else state.dtype
    sent = state.map(lambda local: local.detach().to(wire))
    target = replicated(state.layout.shape, (rank,))
    mine = state.rank == rank
    # Where nothing moves there is no exchange, in which this rank would be alone.
    into: list[torch.Tensor] | None = None
    if out is not None and out.dtype == wire and state.layout != target:
        into = [out]
    device = state.device if out is None else out.device
    moved = reshard_state(
        sent,
        target,
        devices=(device,) if mine else (),
        max_bytes=max_bytes,
        out=into,
        agreement=agreement,
    )
    if not mine:
        return None
    (full,) = moved.shards
    if out is None:
        full = full.to(dtype)
        # What was here already is the tensor's own memory.
        is_own = any(full.data_ptr() == shard.data_ptr() for shard in state.shards)
        return full.clone() if is_own else full
    if into is None:
        out.copy_(full.to(dtype))
    return out


def _check_out(state: State, out: object, *, is_receiver: bool, dst: int) -> None:
    if out is None:
        return
    if not is_receiver:
        raise ArgumentValueError(
            "out of gather: Argument ``dst_tensor`` must NOT be specified on non-destination ranks",
            rank=state.rank,
            expected=f"None on all ranks but the one at position {dst} of the group",
            got=f"a {type(out).__name__}",
            fix="If it is the index of torch's gather, write torch.gather(st, dim, index).",
        )
    if not isinstance(out, torch.Tensor) or state_or_none(out) is not None:
        raise ArgumentTypeError(
            "out of gather", rank=state.rank, expected="a plain tensor", got=type(out).__name__
        )
    if tuple(out.shape) != state.layout.shape:
        raise ArgumentValueError(
            f"Argument ``dst_tensor`` have size {tuple(out.shape)}, but should be "
            f"{state.layout.shape} (out of gather)",
            rank=state.rank,
        )
    check_out([out], state.comm, "out of gather")
    start, stop = span(out)
    for shard in state.shards if out.numel() and not out.is_meta else ():
        first, last = span(shard)
        if shard.numel() and first < stop and start < last:
            raise ArgumentValueError(
                "out of gather",
                rank=state.rank,
                expected="memory that nothing else in the exchange uses",
                got="a tensor that shares memory with a local shard",
                fix="Pass a new tensor, or leave out= away.",
            )
