"""New tensors by a spec: `empty`, `zeros`, `ones`, `full`, and what all others are made by.

Every rank of the group calls; by default the ranks compare their arguments first, in one exchange
of 16 bytes. Each rank makes its own boxes and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from shardwise.comm.agreement import agree, heard_by_all
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.sharded_tensor.remote_shards import connect
from shardwise.sharded_tensor.sizes_and_specs import as_one, checked_size, home_device, layout_by
from shardwise.sharded_tensor.state import check_requires_grad, make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.geometry import Box
    from shardwise.metadata import TensorProperties
    from shardwise.sharded_tensor.state import State
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "FactoryOptions",
    "_create_tensor_from_params",
    "empty",
    "empty_state",
    "filled",
    "full",
    "ones",
    "state_of_pieces",
    "zeros",
]


class FactoryOptions(TypedDict, total=False):
    """What all factories take. Only dense, contiguous tensors can be sharded."""

    dtype: torch.dtype | None  # default: torch's default dtype at the call
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: ProcessGroup | None  # default: the default group
    init_rrefs: bool  # remote references to all shards, over torch RPC


def empty(
    sharding_spec: ShardingSpec, *size: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """Sharded tensor of uninitialised data; options as in `FactoryOptions`."""
    return wrap(empty_state(sharding_spec, *size, **options))


def zeros(
    sharding_spec: ShardingSpec, *size: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """Sharded tensor of zeros; options as in `FactoryOptions`."""
    return full(sharding_spec, as_one(size), 0, **options)


def ones(
    sharding_spec: ShardingSpec, *size: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """Sharded tensor of ones; options as in `FactoryOptions`."""
    return full(sharding_spec, as_one(size), 1, **options)


def full(
    sharding_spec: ShardingSpec,
    size: Any,
    fill_value: Any,
    **options: Unpack[FactoryOptions],
) -> ShardedTensor:
    """Sharded tensor of one value; options as in `FactoryOptions`.

    Of a layout with a pending sum, the first addend is that value and the others are 0.
    """
    if options.get("dtype") is None and not isinstance(fill_value, int):
        options["dtype"] = torch.full((), fill_value).dtype
    return filled(
        lambda made: made.fill_(fill_value),
        sharding_spec,
        size,
        compared={"fill_value": fill_value},
        **options,
    )


def filled(
    fill: Callable[[ShardedTensor], object],
    sharding_spec: ShardingSpec,
    *size: Any,
    compared: Mapping[str, object] | None = None,
    **options: Unpack[FactoryOptions],
) -> ShardedTensor:
    """A new tensor that `fill` has filled; other ranks get references to it only after that."""
    init_rrefs = options.pop("init_rrefs", False)
    made = wrap(empty_state(sharding_spec, *size, compared=compared, **options))
    with torch.no_grad():
        fill(made)
    made._state.init_rrefs = init_rrefs
    connect(made._state)
    return made


def empty_state(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> State:
    """State of a new tensor whose local shards are uninitialised."""
    problem = _unknown_option(options)
    dtype = options.pop("dtype", None)
    kind = torch.get_default_dtype() if dtype is None else dtype
    pin_memory = options.pop("pin_memory", False)

    def make(box: Box, device: torch.device) -> torch.Tensor:
        return torch.empty(box.shape, dtype=kind, device=device, pin_memory=pin_memory)

    return state_of_pieces(
        sharding_spec, size, make, dtype=kind, may_fail=pin_memory, problem=problem, **options
    )


def _unknown_option(options: dict[str, Any]) -> Exception | None:
    """What is wrong with options that no factory has, which are taken out."""
    known = {*FactoryOptions.__annotations__, "compared"}
    unknown = [name for name in options if name not in known]
    for name in unknown:
        del options[name]
    if not unknown:
        return None
    return ArgumentTypeError(
        "option of a sharded factory",
        expected=f"one of {', '.join(FactoryOptions.__annotations__)}",
        got=", ".join(unknown),
        fix="The spec says the devices: shardwise.chunk(0, device='cuda')."
        if "device" in unknown
        else None,
    )


def state_of_pieces(
    spec: ShardingSpec,
    size: Sequence[Any],
    make: Callable[[Box, torch.device], torch.Tensor],
    *,
    dtype: torch.dtype,
    call: str = "creating a sharded tensor",
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
    may_fail: bool = False,
    compared: Mapping[str, object] | None = None,
    problem: Exception | None = None,
) -> State:
    """State of a tensor of which each rank makes its own boxes. All ranks call it, and compare.

    Nothing is made before all ranks are known to agree. `may_fail` says that `make` can raise on
    one rank alone; then the ranks agree again when the pieces are made. `compared` is what else
    has to be the same on all, `problem` what this rank has found to be wrong already.
    """
    members = communicator(process_group)
    values: dict[str, object] = {}
    try:
        if problem is not None:
            raise problem
        shape = checked_size(size)
        _check_options(dtype, layout, memory_format)
        placed = layout_by(spec, shape, members)
        devices = spec.local_devices(shape, members.rank)
        if requires_grad:
            check_requires_grad(placed, dtype, members.rank)
        values = {
            **(compared or {}),
            "size": shape,
            "sharding_spec": placed,
            "dtype": dtype,
            "requires_grad": requires_grad,
        }
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree(call, values, group=members, problem=problem)
    boxes = placed.boxes_of(members.rank)
    with heard_by_all(call, members, hot=not may_fail), torch.no_grad():
        shards = [make(box, device) for box, device in zip(boxes, devices, strict=True)]
    if may_fail:
        agree(call, {}, group=members)
    for shard in shards:
        shard.requires_grad_(requires_grad)
    state = make_state(
        placed,
        shards,
        group=members,
        spec=spec,
        dtype=dtype,
        device=home_device(spec, shape) if not shards else None,
        requires_grad=requires_grad,
        init_rrefs=init_rrefs,
    )
    return connect(state)


def _check_options(dtype: object, layout: torch.layout, memory_format: torch.memory_format) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError("dtype", expected="a torch.dtype", got=repr(dtype))
    if layout != torch.strided:
        raise ArgumentValueError("Only torch.strided layout is currently supported", got=layout)
    if memory_format != torch.contiguous_format:
        raise ArgumentValueError(
            "Only torch.contiguous_format memory_format is currently supported", got=memory_format
        )


def _create_tensor_from_params(
    *size: Any, local_device: str | torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    """A plain uninitialised tensor with the given properties; the seed's helper."""
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )
