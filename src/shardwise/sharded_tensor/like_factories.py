"""New tensors like others: `torch.zeros_like` and its family, `new_zeros` and its."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch

from shardwise.sharded_tensor.autograd import set_requires_grad
from shardwise.sharded_tensor.copying import fill
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import replicated_layout
from shardwise.sharded_tensor.sizes_and_specs import as_one, checked_size
from shardwise.sharded_tensor.tensor import ShardedTensor, compute_by_gathering, wrap
from shardwise.sharding_spec.on_device import on_device

__all__ = ["LikeOptions", "empty_like"]

_Tensor: Any = torch.Tensor


class LikeOptions(TypedDict, total=False):
    """What `torch.zeros_like` and its family take."""

    dtype: torch.dtype | None
    layout: torch.layout | None
    device: torch.device | str | None
    requires_grad: bool
    memory_format: torch.memory_format
    pin_memory: bool


@handles(torch.empty_like)
def empty_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    """Uninitialised, in the same layout and group; no rank is asked."""
    state, device = tensor._state, options.get("device")
    requires_grad = options.pop("requires_grad", False)
    changes: dict[str, Any] = {"init_rrefs": state.init_rrefs}
    if device is not None and state.spec is not None:
        changes["spec"] = on_device(state.spec, state.layout.shape, torch.device(device).type)
    with torch.no_grad():
        made = wrap(state.map(lambda local: torch.empty_like(local, **options), **changes))
    return set_requires_grad(made, requires_grad)


@handles(torch.full_like)
def _full_like(
    tensor: ShardedTensor, fill_value: Any, **options: Unpack[LikeOptions]
) -> ShardedTensor:
    made = empty_like(tensor, **options)
    with torch.no_grad():
        fill(made, fill_value)
    return made


@handles(torch.zeros_like)
def _zeros_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    return _full_like(tensor, 0, **options)


@handles(torch.ones_like)
def _ones_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    return _full_like(tensor, 1, **options)


@handles(_Tensor.new_empty)
def _new_empty(tensor: ShardedTensor, *size: Any, **options: Any) -> ShardedTensor:
    """In the tensor's own layout if it is of that size, else whole on every rank."""
    shape = checked_size([options.pop("size")] if "size" in options else size)
    state = tensor._state
    if shape == state.layout.shape:
        return empty_like(tensor, **options)
    made = state.carriers[0].detach().new_empty(shape, **options)
    return wrap(state.with_carriers([made], layout=replicated_layout(shape, state), spec=None))


@handles(_Tensor.new_full)
def _new_full(tensor: ShardedTensor, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    requires_grad = options.pop("requires_grad", False)
    made = _new_empty(tensor, size, **options)
    fill(made, fill_value)
    return set_requires_grad(made, requires_grad)


@handles(_Tensor.new_zeros)
def _new_zeros(tensor: ShardedTensor, *size: Any, **options: Any) -> ShardedTensor:
    return _new_full(tensor, options.pop("size", as_one(size)), 0, **options)


@handles(_Tensor.new_ones)
def _new_ones(tensor: ShardedTensor, *size: Any, **options: Any) -> ShardedTensor:
    return _new_full(tensor, options.pop("size", as_one(size)), 1, **options)


@handles(_Tensor.new_tensor)
def _new_tensor(tensor: torch.Tensor, data: Any, **options: Any) -> ShardedTensor:
    """Of numbers that every rank has; of a sharded tensor, a copy on every rank."""
    if not isinstance(tensor, ShardedTensor) or isinstance(data, ShardedTensor):
        return compute_by_gathering(_Tensor.new_tensor, (tensor, data), options)  # type: ignore[no-any-return]  # a tensor of a tensor
    state = tensor._state
    made = state.carriers[0].detach().new_tensor(data, **options)
    layout = replicated_layout(tuple(made.shape), state)
    return wrap(state.with_carriers([made], layout=layout, spec=None))
