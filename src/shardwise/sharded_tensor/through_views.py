"""What is done to a tensor by way of its views: `x[index] = value`, `view_as`, shapes in place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import replayed_views
from shardwise.errors import OpError
from shardwise.ops.names import functions_named
from shardwise.ops.views import is_basic_index
from shardwise.sharded_tensor.dispatch import function_name, handles
from shardwise.sharded_tensor.implicit import announce_move
from shardwise.sharded_tensor.indexing import write_by_tensors
from shardwise.sharded_tensor.resharding import cut_state, is_everywhere, reshard_state
from shardwise.sharded_tensor.state import Seen
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    adopt,
    compute_by_gathering,
    show_requires_grad,
    show_written,
    wrap,
)
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharded_tensor.state import State

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


@handles(_Tensor.view_as)
def _view_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """In the layout of `other`, too; plain if that is plain and all ranks have the tensor.

    `torch.nn.utils.vector_to_parameters` makes it the data of `other`.
    """
    if isinstance(tensor, ShardedTensor) and tensor.shape == other.shape:
        with replayed_views(True):  # [Note: views of nothing] in `carrying_out.py`
            made: torch.Tensor = wrap(tensor._state.alias(lambda local: local.view_as(local)))
    else:
        made = tensor.view(other.shape)
    if isinstance(other, ShardedTensor):
        return _laid_out_as(made, other._state, view_of=tensor)
    assert isinstance(made, ShardedTensor)
    return made.full_tensor() if is_everywhere(made._state) else made


def _laid_out_as(made: torch.Tensor, like: State, *, view_of: torch.Tensor) -> ShardedTensor:
    """A view of a tensor in the layout of `like`; what is copied into it goes to the tensor."""
    layout = like.layout.bar
    if not isinstance(made, ShardedTensor):
        return wrap(cut_state(made, like, layout=layout).map(torch.Tensor.contiguous))
    state = made._state
    is_lost = bool(state.view_of) and made.shape != view_of.shape
    if state.layout != layout:
        announce_move(_Tensor.view_as, state, layout)
        is_lost, seen = True, state.view_of or (Seen.now(state.carriers),)
        moved = reshard_state(state, layout)
        made = wrap(moved.with_carriers(moved.carriers, view_of=seen))
    if is_lost:
        made._state.reshaped_from = view_of  # `torch.nn.init.orthogonal_` writes by it
    return made


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
