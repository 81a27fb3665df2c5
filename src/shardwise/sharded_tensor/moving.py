"""Sharded tensors on other devices, in other dtypes, in pinned memory.

Nothing leaves its rank, but for a pending sum that becomes one of integers or was one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import parse_to
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, OpError
from shardwise.sharded_tensor.comparing import all_ranks
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.implicit import settle
from shardwise.sharded_tensor.remote_shards import connect
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec.on_device import on_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwise.sharded_tensor.state import State

__all__: list[str] = []

_Tensor: Any = torch.Tensor
_FORMATS = (torch.preserve_format, torch.contiguous_format)


def _moved(
    tensor: ShardedTensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """The tensor itself where nothing changes, as torch has it."""
    state = tensor._state
    if memory_format not in (None, *_FORMATS):
        raise OpError(
            "Only `torch.contiguous_format` or `torch.preserve_format` is supported!",
            rank=state.rank,
            got=memory_format,
        )
    device = _own(device)
    if dtype is not None and dtype != state.dtype and not _keeps_terms(state, dtype):
        state = settle(_Tensor.to, state)
    carriers = [
        local.to(
            device=device,
            dtype=dtype,
            non_blocking=non_blocking,
            copy=copy,
            memory_format=torch.preserve_format if memory_format is None else memory_format,
        )
        for local in state.carriers
    ]
    is_same = all(a is b for a, b in zip(carriers, state.carriers, strict=True))
    if state.init_rrefs:  # new references are made by all ranks or by none
        is_same = all_ranks(is_same, state)
    if is_same and (process_group is None or process_group is state.process_group):
        return tensor
    changes: dict[str, Any] = {"init_rrefs": state.init_rrefs}
    if is_same:
        changes["view_of"] = state.view_of
    if device is not None and state.spec is not None and set(state.devices) != {device}:
        changes["spec"] = on_device(state.spec, state.layout.shape, device.type)
    if process_group is not None:
        changes |= _in_group(state, process_group)
    return wrap(connect(state.with_carriers(carriers, **changes)), type(tensor))


def _keeps_terms(state: State, dtype: torch.dtype) -> bool:
    """Whether what is pending can be converted term by term; 0.5 + 0.5 cannot, to integers."""
    pending = state.layout.pending
    if pending == "product" and state.dtype.is_complex:
        return dtype.is_complex  # the real part of a product is not that of real parts
    has_fractions = all(kind.is_floating_point or kind.is_complex for kind in (state.dtype, dtype))
    return pending is None or has_fractions


def _own(device: torch.device | None) -> torch.device | None:
    """`cuda` without a number is this process's own GPU."""
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _in_group(state: State, process_group: ProcessGroup) -> dict[str, Any]:
    members = communicator(process_group)
    members.ranks.check_members(state.layout.ranks, what="the tensor's layout")
    return {"members": members, "process_group": process_group}


@handles(_Tensor.to)
def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(tensor, ShardedTensor):  # plain.to(sharded)
        other = args[0] if args else kwargs.pop("other")
        return tensor.to(other.device, other.dtype, *args[1:], **kwargs)
    copy = kwargs.pop("copy", False)
    process_group = kwargs.pop("process_group", None)
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], torch.Tensor):
        other = args[0]
        args = (other.device, other.dtype, *args[1:])
    if [type(arg) for arg in args[-2:]] == [bool, bool]:  # non_blocking and copy, by position
        args, copy = args[:-1], args[-1]
    if not args and not kwargs:
        return _moved(tensor, copy=copy, process_group=process_group)
    try:
        device, dtype, non_blocking, memory_format = parse_to(args, kwargs)
    except (TypeError, RuntimeError) as error:
        raise ArgumentTypeError(
            "ShardedTensor.to() have wrong arguments",
            expected="a device, a dtype or a tensor, as for torch.Tensor.to",
            got=f"{args} {kwargs}: {error}",
        ) from None
    return _moved(
        tensor,
        device=device,
        dtype=dtype,
        non_blocking=non_blocking,
        copy=copy,
        memory_format=memory_format,
        process_group=process_group,
    )


@handles(_Tensor.cpu)
def _cpu(
    tensor: ShardedTensor,
    memory_format: torch.memory_format = torch.preserve_format,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    return _moved(
        tensor,
        device=torch.device("cpu"),
        memory_format=memory_format,
        process_group=process_group,
    )


@handles(_Tensor.cuda)
def _cuda(
    tensor: ShardedTensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    return _moved(
        tensor,
        device=torch.device("cuda" if device is None else device),
        non_blocking=non_blocking,
        memory_format=memory_format,
        process_group=process_group,
    )


@handles(_Tensor.type_as)
def _type_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.to(other.device, other.dtype)


@handles(_Tensor.type)
def _type(tensor: ShardedTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return tensor._state.carriers[0].type()
    if isinstance(dtype, torch.dtype):
        return _moved(tensor, dtype=dtype, non_blocking=non_blocking)
    like = torch.empty(0).type(dtype)  # "torch.cuda.FloatTensor" names a kind of device, too
    device = None if like.device.type == tensor.device.type else like.device
    return _moved(tensor, device=device, dtype=like.dtype, non_blocking=non_blocking)


@handles(_Tensor.pin_memory)
def _pin_memory(tensor: ShardedTensor, *device: Any) -> ShardedTensor:
    state = tensor._state
    pinned = [shard.pin_memory(*device) for shard in state.shards] or state.carriers
    if all(a is b for a, b in zip(pinned, state.carriers, strict=True)):
        return tensor
    return wrap(state.with_carriers(pinned))


_DTYPES = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
    "chalf": torch.complex32,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}


def _converted(
    dtype: torch.dtype,
    tensor: ShardedTensor,
    memory_format: torch.memory_format = torch.preserve_format,
) -> ShardedTensor:
    return _moved(tensor, dtype=dtype, memory_format=memory_format)


for _name, _dtype in _DTYPES.items():
    handles(getattr(_Tensor, _name))(partial(_converted, _dtype))
