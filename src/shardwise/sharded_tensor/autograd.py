"""Gradients of sharded tensors: autograd runs on the local ones, for which the attributes speak.

The gradient of a tensor has its layout with nothing pending, and every entry holds the whole
gradient of its box ([Note: gradients] in `comm/differentiable.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.term_gradients import merge_terms, spread_terms
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.state import Seen, check_requires_grad
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    refuse_late_gradients,
    show_requires_grad,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout
    from shardwise.sharded_tensor.state import State

__all__ = [
    "carriers_for",
    "checked_grad",
    "gradient_state",
    "has_several",
    "set_requires_grad",
]

_Tensor: Any = torch.Tensor


@handles(_Tensor.requires_grad.__get__)
def _requires_grad(tensor: ShardedTensor) -> bool:
    return tensor._state.requires_grad


@handles(_Tensor.requires_grad_)
def set_requires_grad(tensor: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    """Sets it on every local tensor, and on the outer one."""
    state = tensor._state
    if requires_grad:
        check_requires_grad(state.layout, state.dtype, state.rank)
    for carrier in state.carriers:
        carrier.requires_grad_(requires_grad)
    show_requires_grad(tensor)
    parameter, state.converted_from = state.converted_from, None
    if parameter is not None and requires_grad:  # [Note: Module.to] in copying.py
        refuse_late_gradients(parameter._state, state)
        for hook in list(parameter._state.hooks):
            hook.attach(state)
    return tensor


@handles(_Tensor.requires_grad.__set__)
def _set_requires_grad(tensor: ShardedTensor, requires_grad: bool) -> None:
    set_requires_grad(tensor, requires_grad)


@handles(_Tensor.is_leaf.__get__)
def _is_leaf(tensor: ShardedTensor) -> bool:
    return all(carrier.is_leaf for carrier in tensor._state.carriers)


@handles(_Tensor.grad_fn.__get__)
def _grad_fn(tensor: ShardedTensor) -> Any:
    return tensor._state.carriers[0].grad_fn


@handles(_Tensor.retain_grad)
def _retain_grad(tensor: ShardedTensor) -> None:
    for carrier in tensor._state.carriers:
        carrier.retain_grad()


@handles(_Tensor.retains_grad.__get__)
def _retains_grad(tensor: ShardedTensor) -> bool:
    return all(carrier.retains_grad for carrier in tensor._state.carriers)


def gradient_state(state: State, grads: Sequence[torch.Tensor | None]) -> State | None:
    """State of the gradient, given that of each carrier; None if no carrier has one."""
    if all([grad is None for grad in grads]):
        return None
    given = [
        torch.zeros_like(carrier) if grad is None else grad
        for carrier, grad in zip(state.carriers, grads, strict=True)
    ]
    merged = merge_terms(tuple(given), state.layout, state.rank)
    spec = state.spec if state.layout.pending is None else None
    return state.with_carriers(merged, layout=state.layout.bar, spec=spec)


@handles(_Tensor.grad.__get__)
def _grad(tensor: ShardedTensor) -> ShardedTensor | None:
    state = tensor._state
    carriers = state.carriers
    shown: ShardedTensor | None = state.shown_grad
    if shown is not None:
        grads = shown._state.carriers
        is_first = carriers[0].grad is grads[0]  # the only one, mostly
        if is_first and (len(grads) == 1 or all(map(_has_grad, carriers[1:], grads[1:]))):
            return shown
        state.shown_grad = None
    given = [grad for carrier in carriers if (grad := carrier.grad) is not None]
    if not given:
        return None
    # Nothing to add, and nothing to merge.
    if len(given) == len(carriers) and state.layout.pending is None:
        state.shown_grad = shown = wrap(state.with_carriers(given))
        return shown
    with torch.no_grad():
        held = tuple([_held_grad(carrier) for carrier in carriers])
        found = gradient_state(state, held)
    assert found is not None
    if state.layout.pending is None or not has_several(state.layout):
        state.shown_grad = shown = wrap(found)
        return shown
    # One gradient, shown for several addends.
    return wrap(found.map(torch.clone, view_of=(Seen.now(held),)))


@lru_cache(maxsize=256)
def has_several(layout: Layout) -> bool:
    """Whether some rank, not only this one, has several local shards."""
    return max(map(len, map(layout.boxes_of, layout.ranks)), default=0) > 1


def _has_grad(carrier: torch.Tensor, grad: torch.Tensor) -> bool:
    return carrier.grad is grad


def _held_grad(carrier: torch.Tensor) -> torch.Tensor:
    """The gradient of a carrier; zeros are kept, so that what is written into them stays."""
    if carrier.grad is None:
        carrier.grad = torch.zeros_like(carrier)
    return carrier.grad


@handles(_Tensor.grad.__set__)
def _set_grad(tensor: ShardedTensor, value: ShardedTensor | None) -> None:
    state = tensor._state
    state.shown_grad = None
    if value is None:
        for carrier in state.carriers:
            carrier.grad = None
        return
    grads = carriers_for(state, checked_grad(state, value))
    for carrier, grad in zip(state.carriers, grads, strict=True):
        carrier.grad = grad
    if type(value) is ShardedTensor and state.layout.pending is None:
        state.shown_grad = value


@handles(_Tensor.grad.__delete__)
def _delete_grad(tensor: ShardedTensor) -> None:
    _set_grad(tensor, None)


# Past `__torch_function__`; see `is_sparse` in `tensor.py`.
setattr(ShardedTensor, "grad", property(_grad, _set_grad, _delete_grad))  # noqa: B010  # mypy refuses `=`


def checked_grad(state: State, value: object) -> State:
    """The state of what is to be the gradient of `state`; raises if it does not lie like it."""
    if not isinstance(value, ShardedTensor):
        raise ArgumentTypeError(
            "grad of a ShardedTensor",
            expected="a ShardedTensor or None",
            got=type(value).__name__,
        )
    if value._state.layout != state.layout.bar:
        raise ArgumentValueError(
            "grad of a ShardedTensor",
            rank=state.rank,
            expected=str(state.layout.bar),
            got=str(value._state.layout),
            fix="Reshard it first: shardwise.reshard(grad, st).",
        )
    return value._state


def carriers_for(state: State, grad: State) -> tuple[torch.Tensor, ...]:
    """One gradient per carrier of `state`."""
    return spread_terms(grad.carriers, state.layout, state.rank)
