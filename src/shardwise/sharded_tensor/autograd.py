"""Gradients of sharded tensors: autograd runs on the local tensors, and this file speaks for them.

The gradient of a tensor has its layout with nothing pending, and every entry holds the whole
gradient of its box ([Note: gradients] in `comm/differentiable.py`).
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import current_backward
from shardwise.comm.differentiable import Exchange, exchange
from shardwise.comm.term_gradients import merge_terms, scale_terms, spread_terms
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Layout
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import cut_state, reshard_state
from shardwise.sharded_tensor.state import Seen, check_requires_grad
from shardwise.sharded_tensor.tensor import ShardedTensor, live_state, show_requires_grad, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.sharded_tensor.state import State

__all__ = ["Hook", "carriers_for", "gradient_state", "set_requires_grad"]

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
    given = [carrier.grad for carrier in carriers]
    num_missing = sum([grad is None for grad in given])
    if num_missing == len(given):
        return None
    if not num_missing and state.layout.pending is None:  # nothing to add, and nothing to merge
        state.shown_grad = shown = wrap(state.with_carriers(given))  # type: ignore[arg-type]
        return shown
    with torch.no_grad():
        held = tuple([_held_grad(carrier) for carrier in carriers])
        found = gradient_state(state, held)
    assert found is not None
    if state.layout.pending is None or not _has_several(state.layout):
        state.shown_grad = wrap(found)
        return state.shown_grad  # type: ignore[no-any-return]
    # One gradient, shown for several addends.
    return wrap(found.map(torch.clone, view_of=(Seen.now(held),)))


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
    grads = carriers_for(state, _checked_grad(state, value))
    for carrier, grad in zip(state.carriers, grads, strict=True):
        carrier.grad = grad
    if type(value) is ShardedTensor and state.layout.pending is None:
        state.shown_grad = value


@handles(_Tensor.grad.__delete__)
def _delete_grad(tensor: ShardedTensor) -> None:
    _set_grad(tensor, None)


# Past `__torch_function__`; see `is_sparse` in `tensor.py`.
setattr(ShardedTensor, "grad", property(_grad, _set_grad, _delete_grad))  # noqa: B010  # mypy


def _checked_grad(state: State, value: object) -> State:
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


# -- running backward ------------------------------------------------------------------------------


@handles(_Tensor.backward)
def _backward(
    tensor: ShardedTensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    carriers = live_state(tensor).carriers
    if gradient is None and inputs is None and _are_ones(tensor._state):
        torch.autograd.backward(carriers, None, retain_graph, create_graph)
    else:
        _backward_of_all(tensor, gradient, retain_graph, create_graph, inputs=inputs)


# As a method, since the way by which torch asks for it takes longer than many a backward.
ShardedTensor.backward = _backward  # type: ignore[assignment]


def _are_ones(state: State) -> bool:
    """Whether the gradients that backward starts with are those that torch would take itself."""
    if state.layout.pending == "avg":
        return False
    return all([carrier.dim() == 0 for carrier in state.carriers])


@handles(torch.autograd.backward)
def _backward_of_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    sources = _listed(tensors)
    given = grad_variables if grad_tensors is None else grad_tensors
    outputs, grads = _flattened(sources, [None] * len(sources) if given is None else _listed(given))
    leaves = None if inputs is None else [c for t in _listed(inputs) for c in _expanded(t)]
    torch.autograd.backward(
        outputs, grads, retain_graph=retain_graph, create_graph=create_graph, inputs=leaves
    )


def _flattened(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Local tensors in place of sharded ones, and the gradients that backward starts with."""
    outputs: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if isinstance(tensor, ShardedTensor):
            outputs += tensor._state.carriers
            grads += _incoming(tensor._state, gradient)
        else:
            outputs.append(tensor)
            grads.append(gradient)
    return outputs, grads


def _expanded(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that autograd knows in place of this one."""
    return tensor._state.carriers if isinstance(tensor, ShardedTensor) else [tensor]


def _incoming(state: State, gradient: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The gradient of each carrier that backward starts with."""
    shape = state.layout.shape
    if gradient is None:
        if torch.Size(shape).numel() != 1:
            raise OpError(
                "grad can be implicitly created only for scalar outputs",
                rank=state.rank,
                got=f"a ShardedTensor of shape {shape}",
                fix="Pass gradient=, or reduce it to one element.",
            )
        given = tuple(torch.ones_like(carrier) for carrier in state.carriers)
    else:
        if tuple(gradient.shape) != shape:
            raise ArgumentValueError(
                "gradient of backward", rank=state.rank, expected=shape, got=tuple(gradient.shape)
            )
        if isinstance(gradient, ShardedTensor):
            found = reshard_state(gradient._state, state.layout.bar, devices=state.devices)
        else:
            found = cut_state(gradient, state, layout=state.layout.bar)
        given = _entering(found, state.layout)
    return scale_terms(given, state.layout, state.rank, up=False)


def _entering(grad: State, layout: Layout) -> tuple[torch.Tensor, ...]:
    """One gradient per entry of `layout`, each term's a work of its own."""
    if layout.pending is None:
        return grad.carriers
    work = Layout(layout.shape, layout.boxes, layout.owners, terms=layout.terms, pending="sum")
    job = Exchange(grad.layout, grad.layout, grad.devices, grad.devices, grad.comm, work=work)
    return exchange(job, grad.carriers)


@handles(torch.autograd.grad)
def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    if is_grads_batched:
        raise OpError("torch.autograd.grad of ShardedTensors with is_grads_batched=True")
    sources, targets = _listed(outputs), _listed(inputs)
    given = _listed(grad_outputs) if grad_outputs is not None else [None] * len(sources)
    flat_outputs, flat_grads = _flattened(sources, given)
    flat = torch.autograd.grad(
        flat_outputs,
        [leaf for target in targets for leaf in _expanded(target)],
        flat_grads,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,  # of several local shards some may be unused; see below
        materialize_grads=materialize_grads,
    )
    left: list[torch.Tensor | None] = list(flat)
    found: list[torch.Tensor | None] = []
    for target in targets:
        count = len(_expanded(target))
        grads, left = left[:count], left[count:]
        if not (allow_unused or materialize_grads) and all(grad is None for grad in grads):
            raise OpError(
                f"The differentiated Tensor at index {len(found)} appears to not have been used "
                "in the graph",
                fix="Set allow_unused=True if this is the desired behavior.",
            )
        if isinstance(target, ShardedTensor):
            state = gradient_state(target._state, grads)
            found.append(None if state is None else wrap(state))
        else:
            found.append(grads[0])
    return tuple(found)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


# -- hooks -----------------------------------------------------------------------------------------


class Hook:
    """A user's function on a gradient, and its hooks on the local tensors; can be removed.

    Kept with the tensor, so that it follows an in-place reshard. The hooks on local tensors, which
    the garbage collector cannot look into, refer to it weakly.
    """

    def __init__(self, fn: Callable[..., Any], owner: ShardedTensor | None) -> None:
        self._fn = fn
        self._owner = owner  # set: called with the tensor, once its gradient is accumulated
        self._handles: list[Any] = []
        self._is_removed = False

    def attach(self, state: State) -> None:
        """Follows the gradients of `state`'s local tensors, and no longer earlier ones."""
        self._detach()
        if self._is_removed:
            return
        state.hooks = (*state.hooks, self)
        me = weakref.ref(self)
        if self._owner is not None:
            self._handles = _after_each(state.carriers, lambda: _call_with_owner(me))
        elif not _has_several(state.layout):
            only = state.carriers[0]
            self._handles = [only.register_hook(lambda grad: _replaced(me, state, grad))]
        else:
            self._handles = [
                torch.autograd.graph.register_multi_grad_hook(
                    state.carriers, lambda grads: _shown(me, state, grads)
                )
            ]

    def remove(self) -> None:
        """Takes the hook away; it is not called again."""
        self._is_removed = True
        self._detach()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _after_each(carriers: Sequence[torch.Tensor], call: Callable[[], None]) -> list[Any]:
    """Hooks that call once a backward has accumulated the gradients of all carriers."""
    reached: set[int] = set()
    backward: list[int] = []  # the one that `reached` is of; another may have ended half-way

    def on(number: int) -> Callable[[torch.Tensor], None]:
        def after(_: torch.Tensor) -> None:
            now = [current_backward()]
            if now != backward:
                backward[:] = now
                reached.clear()
            reached.add(number)
            if len(reached) == len(carriers):
                reached.clear()
                call()

        return after

    return [
        carrier.register_post_accumulate_grad_hook(on(number))
        for number, carrier in enumerate(carriers)
    ]


def _call_with_owner(me: weakref.ref[Hook]) -> None:
    hook = me()
    if hook is not None:
        hook._fn(hook._owner)


def _replaced(me: weakref.ref[Hook], state: State, grad: torch.Tensor) -> torch.Tensor | None:
    hook, found = me(), gradient_state(state, [grad])
    if hook is None or found is None:
        return None
    changed = hook._fn(wrap(found))
    if changed is None:
        return None
    if isinstance(changed, ShardedTensor) and changed.shape == found.layout.shape:
        changed = wrap(reshard_state(changed._state, found.layout, devices=found.devices))
    return carriers_for(state, _checked_grad(state, changed))[0]


def _shown(me: weakref.ref[Hook], state: State, grads: Sequence[torch.Tensor | None]) -> None:
    """Calls the hook once all gradients are known; some are accumulated by then, and stay."""
    hook, found = me(), gradient_state(state, grads)
    if hook is None or found is None:
        return
    seen = Seen.now(found.carriers)
    if hook._fn(wrap(found)) is not None or seen.has_changed:
        raise OpError(
            "a hook of a ShardedTensor with several shards on a rank changed the gradient",
            rank=state.rank,
            got=str(state.layout),
            fix="It may only look. Change st.grad by register_post_accumulate_grad_hook.",
        )


@lru_cache(maxsize=256)
def _has_several(layout: Layout) -> bool:
    """Whether some rank, not only this one, has several local shards."""
    return max(map(len, map(layout.boxes_of, layout.ranks)), default=0) > 1


@handles(_Tensor.register_hook)
def _register_hook(tensor: ShardedTensor, hook: Callable[..., Any]) -> Hook:
    if not tensor._state.requires_grad:
        raise OpError("cannot register a hook on a tensor that doesn't require gradient")
    found = Hook(hook, None)
    found.attach(tensor._state)
    return found


@handles(_Tensor.register_post_accumulate_grad_hook)
def _register_after(tensor: ShardedTensor, hook: Callable[..., Any]) -> Hook:
    if not _is_leaf(tensor) or not tensor._state.requires_grad:
        raise OpError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    found = Hook(hook, tensor)
    found.attach(tensor._state)
    return found


@handles(_Tensor._backward_hooks.__get__, _Tensor._post_accumulate_grad_hooks.__get__)
def _no_hooks(tensor: ShardedTensor) -> None:
    return None
