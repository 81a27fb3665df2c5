"""Whether a sharded tensor may be used or written: its data are there, and autograd follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError
from shardwise.sharded_tensor.dispatch import call_plain, function_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharded_tensor.state import State
    from shardwise.sharded_tensor.tensor import ShardedTensorBase

__all__ = ["check_usable", "check_writable", "live_state", "state_or_none", "states_of_all"]

_NoDispatch: Any = torch._C.DisableTorchFunctionSubclass
_Tensor: Any = torch.Tensor
_GRAD_FN = _Tensor.grad_fn.__get__


def state_or_none(value: object) -> State | None:
    """The state of a sharded tensor; None of anything else. For files that the class imports."""
    state: State | None = getattr(value, "_state", None) if isinstance(value, _Tensor) else None
    return state


def live_state(tensor: ShardedTensorBase) -> State:
    """The tensor's state; raises as `check_usable` does."""
    state = tensor._state
    with _NoDispatch():
        is_past = tensor.grad_fn is not None
    if is_past or state.is_special:
        check_usable(tensor)
    return state


def states_of_all(tensors: Sequence[ShardedTensorBase], *, are_values: bool = False) -> list[State]:
    """`live_state` of each; of mere values, autograd is not asked."""
    is_past = False
    if not are_values:
        with _NoDispatch():
            is_past = any([tensor.grad_fn is not None for tensor in tensors])
    states = [tensor._state for tensor in tensors]
    if is_past or any([state.is_special for state in states]):
        for tensor in tensors:
            check_usable(tensor)
    return states


def check_usable(tensor: ShardedTensorBase) -> None:
    """Raises if the data is gone, a view has grown old, or autograd has gone past the tensor.

    [Note: outer and inner] in `tensor.py`, [Note: lost views] in `state.py`
    """
    state = tensor._state
    if state.is_freed:
        raise OpError(
            "a ShardedTensor whose data was given up",
            rank=state.rank,
            fix="Use the result of reshard_all, or pass free_source=False.",
        )
    if any([seen.has_changed for seen in state.view_of]):
        raise OpError(
            "a view of a ShardedTensor that was written since",
            rank=state.rank,
            got="a view that was gathered: it does not show the change",
            fix="Take the view anew, or st.clone() of it before.",
        )
    with _NoDispatch():
        is_past = _GRAD_FN(tensor) is not None
    if is_past:
        raise OpError(
            "a ShardedTensor went through code that its gradients cannot follow",
            rank=state.rank,
            got=f"an outer grad_fn {call_plain(_GRAD_FN, (tensor,), {})}",
            fix="A user's autograd.Function, a full backward hook or reentrant checkpointing "
            "works on local tensors only: call it on st.local_tensor(), or use "
            "torch.utils.checkpoint with use_reentrant=False.",
        )


def check_writable(tensor: torch.Tensor, func: Any) -> None:
    """Raises if what an in-place function writes into the tensor would be lost.

    [Note: lost views] in `state.py`
    """
    state: State | None = getattr(tensor, "_state", None)  # as `state_or_none`
    if state is not None and state.view_of:
        raise OpError(
            f"{function_name(func)} into a view of a ShardedTensor",
            rank=state.rank,
            got="a view that was gathered: the tensor itself would not change",
            fix="Change the tensor itself, or st.local_shards().",
        )
