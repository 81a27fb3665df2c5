"""What a tensor says of itself: size, dtype, device; and what only a tensor in one piece can say.

Nothing here communicates, so that `if rank == 0: print(loss.item())` waits for nobody: it prints
what this rank has, or raises.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import is_staged_by_dcp
from shardwise.errors import ArgumentTypeError, OpError
from shardwise.sharded_tensor.dispatch import OUTER, function_name, handles
from shardwise.sharded_tensor.resharding import is_everywhere
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import state_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharded_tensor.state import State

__all__: list[str] = []

_Tensor: Any = torch.Tensor

# The outer tensor knows these: it has the global size, and the dtype and device of the local ones.
_OUTER_ATTRIBUTES = (
    "shape dtype layout device ndim itemsize nbytes _base name names output_nr volatile "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized "
    "is_sparse is_sparse_csr is_vulkan is_xla is_xpu _cdata"
)
_OUTER_METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_signed "
    "stride dim_order get_device has_names is_conj is_neg is_distributed _is_view "
    "_use_count _is_zerotensor __len__ __dir__ _clear_non_serializable_cached_data"
)
_OUTER_FUNCTIONS = (
    "numel is_floating_point is_complex is_signed is_conj is_neg is_distributed get_device "
    "result_type _debug_has_internal_overlap"
)
# What torch says of any dense tensor of this shape and dtype: mostly that it is not sparse, nor
# quantized or nested.
_OUTLINE_METHODS = (
    "dense_dim sparse_dim is_coalesced coalesce indices values _indices _values _nnz _dimI _dimV "
    "ccol_indices crow_indices row_indices col_indices int_repr qscheme q_scale q_zero_point "
    "q_per_channel_axis q_per_channel_scales q_per_channel_zero_points "
    "_nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides"
)
_OUTLINE_FUNCTIONS = (
    "int_repr q_scale q_zero_point q_per_channel_axis q_per_channel_scales "
    "q_per_channel_zero_points"
)
# Only a tensor in one piece has these.
_WHOLE = (
    "numpy tolist storage untyped_storage _typed_storage storage_offset storage_type "
    "__array__ __dlpack__ __dlpack_device__ const_data_ptr"
)


def _named(owner: Any, names: str) -> list[Any]:
    """Those of `names` that this version of torch has; of an attribute, what reads it."""
    found = [getattr(owner, name) for name in names.split() if hasattr(owner, name)]
    return [thing if callable(thing) else thing.__get__ for thing in found]


def _register() -> None:
    OUTER.update(_named(_Tensor, _OUTER_ATTRIBUTES))
    OUTER.update(_named(_Tensor, _OUTER_METHODS))
    OUTER.update(_named(torch, _OUTER_FUNCTIONS))
    outline = {*_named(_Tensor, _OUTLINE_METHODS), *_named(torch, _OUTLINE_FUNCTIONS)}
    for function in outline:
        handles(function)(partial(_of_outline, function))
    for function in _named(_Tensor, _WHOLE):
        handles(function)(partial(_of_whole, function))
    handles(_Tensor.data_ptr)(_data_ptr)
    if hasattr(_Tensor, "grad_dtype"):
        handles(_Tensor.grad_dtype.__get__)(_grad_dtype)
        handles(_Tensor.grad_dtype.__set__)(_set_grad_dtype)
    handles(_Tensor.__repr__)(ShardedTensor.__repr__)
    for function in _named(_Tensor, "item __float__ __int__ __index__ __complex__"):
        handles(function)(partial(_of_element, function))


def _of_outline(function: Callable[..., Any], tensor: ShardedTensor) -> Any:
    one = tensor._state.carriers[0].detach().new_empty(())
    return function(one.expand(tensor._state.layout.shape))  # without memory


def _grad_dtype(tensor: ShardedTensor) -> torch.dtype | None:
    found: torch.dtype | None = getattr(tensor._state.carriers[0], "grad_dtype")  # noqa: B009  # not in stubs of all versions
    return found


def _set_grad_dtype(tensor: ShardedTensor, dtype: torch.dtype | None) -> None:
    for carrier in tensor._state.carriers:
        setattr(carrier, "grad_dtype", dtype)  # noqa: B010  # as above


@handles(_Tensor.is_same_size, torch.is_same_size)
def _is_same_size(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape


@handles(_Tensor.is_set_to)
def _is_set_to(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    ours, theirs = state_or_none(tensor), state_or_none(other)
    if ours is None or theirs is None or ours.layout != theirs.layout:
        return False  # a plain tensor has other memory, or shows it in another way
    return all(map(_Tensor.is_set_to, ours.carriers, theirs.carriers))


def _of_whole(
    function: Callable[..., Any], tensor: ShardedTensor, *args: Any, **kwargs: Any
) -> Any:
    state = tensor._state
    shape = state.layout.shape
    whole = [shard for shard in state.shards if tuple(shard.shape) == shape]
    if not whole or state.layout.pending is not None:
        why = f"rank {state.rank} has {len(state.boxes)} of its boxes, not the whole tensor"
        if state.layout.pending is not None:
            why = f"a {state.layout.pending} is pending"
        raise OpError(
            f"{function_name(function)} of a ShardedTensor: {why}",
            rank=state.rank,
            fix="Take st.full_tensor(), which all ranks call, or st.local_shards().",
        )
    return function(whole[0], *args, **kwargs)


def _data_ptr(tensor: ShardedTensor) -> int:
    """As of a tensor in one piece; none, as of other tensors made of others, for DCP's copies."""
    if is_staged_by_dcp():
        return 0
    address: int = _of_whole(_Tensor.data_ptr, tensor)
    return address


@handles(_Tensor.__cuda_array_interface__.__get__)
def _cuda_array_interface(tensor: ShardedTensor) -> Any:
    if not tensor.is_cuda:  # so that `hasattr` says no, as of any tensor that is not on a GPU
        raise AttributeError("__cuda_array_interface__ of a ShardedTensor that is not on a GPU")
    return _of_whole(_Tensor.__cuda_array_interface__.__get__, tensor)


def _of_element(function: Callable[..., Any], tensor: ShardedTensor) -> Any:
    return function(_own_element(tensor._state, function_name(function)))


def _own_element(state: State, what: str) -> torch.Tensor:
    """The only element, as a plain tensor, of which `what` asks; raises if ranks had to send it."""
    _check_one_element(state)
    if not is_everywhere(state):
        raise OpError(
            f"{what} of a ShardedTensor that is not on every rank",
            rank=state.rank,
            got=str(state.layout),
            fix="Ask for it by st.full_tensor().item(), which all ranks call.",
        )
    return state.shards[0].detach()


def _check_one_element(state: State) -> None:
    count = torch.Size(state.layout.shape).numel()
    if count != 1:
        raise OpError(
            f"a Tensor with {count} elements cannot be converted to Scalar",
            rank=state.rank,
            got=str(state.layout),
        )


@handles(_Tensor.__bool__, torch.is_nonzero, _Tensor.is_nonzero)
def _bool(tensor: ShardedTensor) -> bool:
    state = tensor._state
    count = torch.Size(state.layout.shape).numel()
    if count != 1:
        values = "more than one value" if count else "no values"
        raise OpError(
            f"Boolean value of Tensor with {values} is ambiguous",
            rank=state.rank,
            got=str(state.layout),
        )
    return bool(_own_element(state, "the truth value"))


@handles(_Tensor.is_contiguous)
def _is_contiguous(
    tensor: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    return all(c.is_contiguous(memory_format=memory_format) for c in tensor._state.carriers)


@handles(_Tensor.is_pinned)
def _is_pinned(tensor: ShardedTensor, *args: Any) -> bool:
    shards = tensor._state.shards
    return bool(shards) and all(shard.is_pinned() for shard in shards)


@handles(_Tensor.is_shared)
def _is_shared(tensor: ShardedTensor) -> bool:
    return all(carrier.is_shared() for carrier in tensor._state.carriers)


@handles(_Tensor.share_memory_)
def _share_memory(tensor: ShardedTensor) -> ShardedTensor:
    for carrier in tensor._state.carriers:
        carrier.share_memory_()
    return tensor


@handles(_Tensor.is_inference, torch.is_inference)
def _is_inference(tensor: ShardedTensor) -> bool:
    return tensor._state.carriers[0].is_inference()


@handles(_Tensor._version.__get__)
def _version(tensor: ShardedTensor) -> int:
    # A write counts once for each local shard that it reaches. The largest count would rise by one
    # for the whole tensor, but miss a write that reaches another shard, as by a view.
    return sum(carrier._version for carrier in tensor._state.carriers)


@handles(_Tensor.__format__)
def _format(tensor: ShardedTensor, spec: str) -> str:
    if tensor.dim() == 0 and spec:
        return format(_own_element(tensor._state, f"the number, as {spec!r},").item(), spec)
    if spec:
        raise ArgumentTypeError(
            f"format {spec!r} of a ShardedTensor with {tensor.dim()} dims",
            rank=tensor._state.rank,
            expected="a tensor of one number, or no format",
            fix="Format its numbers, st.full_tensor().tolist(), which all ranks ask for.",
        )
    return object.__format__(tensor, spec)


_register()
