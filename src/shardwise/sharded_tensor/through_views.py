"""What is done to a tensor by way of its views: `x[index] = value`, and shapes changed in place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError
from shardwise.ops.names import functions_named
from shardwise.ops.views import is_basic_index
from shardwise.sharded_tensor.dispatch import function_name, handles
from shardwise.sharded_tensor.indexing import write_by_tensors
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    adopt,
    compute_by_gathering,
    show_requires_grad,
    show_written,
)
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__: list[str] = []

_Tensor: Any = torch.Tensor
_SHAPES_IN_PLACE = "squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_"


@handles(_Tensor.__setitem__)
def _set_item(tensor: Any, index: Any, value: Any) -> None:
    if not isinstance(tensor, ShardedTensor):  # the index is, or the value
        compute_by_gathering(_Tensor.__setitem__, (tensor, index, value), {})
        return
    if not is_basic_index(index):
        if write_by_tensors(tensor, index, value) is NotImplemented:
            compute_by_gathering(_Tensor.__setitem__, (tensor, index, value), {})
        show_written(tensor)
        return
    check_writable(tensor, _Tensor.__setitem__)
    target: Any = tensor[index]
    if isinstance(value, torch.Tensor):
        while value.dim() > target.dim() and value.shape[0] == 1:  # more than `copy_` broadcasts
            value = value[0]
        target.copy_(value)
    else:
        target.fill_(value)
    show_requires_grad(tensor)  # which it may by the value


def _change_shape(
    func: Any,
    view: Callable[..., ShardedTensor],
    tensor: ShardedTensor,
    *args: Any,
    **kwargs: Any,
) -> ShardedTensor:
    """Makes the tensor object stand for a view of itself."""
    state = tensor._state
    is_leaf = state.requires_grad and tensor.is_leaf
    if is_leaf and torch.is_grad_enabled():
        raise OpError(
            f"{function_name(func)}: a leaf Variable that requires grad is being used in an "
            "in-place operation",
            rank=state.rank,
        )
    with torch.set_grad_enabled(not is_leaf):  # also under no_grad it stays what it was
        made = view(tensor, *args, **kwargs)._state
    adopt(tensor, made.map(torch.Tensor.requires_grad_, view_of=made.view_of) if is_leaf else made)
    return tensor


for _name in _SHAPES_IN_PLACE.split():
    for _function in functions_named([_name]):
        handles(_function)(partial(_change_shape, _function, getattr(_Tensor, _name[:-1])))
