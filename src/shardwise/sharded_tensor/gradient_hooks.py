"""Hooks on the gradients of sharded tensors, which see whole gradients and follow the tensor."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import current_backward
from shardwise.errors import OpError
from shardwise.sharded_tensor.autograd import (
    carriers_for,
    checked_grad,
    gradient_state,
    has_several,
)
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.state import Seen
from shardwise.sharded_tensor.telling import tell_others
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.sharded_tensor.state import State

__all__ = ["Hook"]

_Tensor: Any = torch.Tensor


class Hook:
    """A user's function on a gradient, and its hooks on the local tensors; can be removed.

    Kept with the tensor, so that it follows an in-place reshard. The hooks on local tensors, which
    the garbage collector cannot look into, refer to it weakly.
    """

    def __init__(self, fn: Callable[..., Any], owner: ShardedTensor | None) -> None:
        self._fn = fn
        self._owner = owner  # set: called with the tensor, once its gradient is accumulated
        self._handles: list[Any] = []
        self.is_removed = False

    def attach(self, state: State) -> None:
        """Follows the gradients of `state`'s local tensors, and no longer earlier ones."""
        self._detach()
        if self.is_removed:
            return
        state.hooks = (*[hook for hook in state.hooks if not hook.is_removed], self)
        me = weakref.ref(self)
        if self._owner is not None:
            self._handles = _after_each(state.carriers, lambda: _call_with_owner(me))
        elif not has_several(state.layout):
            only = state.carriers[0]
            self._handles = [only.register_hook(lambda grad: _replaced(me, state, grad))]
        else:
            self._handles = [
                torch.autograd.graph.register_multi_grad_hook(
                    state.carriers, lambda grads: _shown(me, state, grads)
                )
            ]

    def call(self, tensor: ShardedTensor, state: State) -> Any:
        """What the user's function gives; the others hear of what it raises, perhaps here only.

        Backward may have begun at a plain tensor, so that nothing of ours is around it.
        """
        try:
            return self._fn(tensor)
        except Exception as problem:
            tell_others(state, problem, "a gradient hook")
            raise

    def remove(self) -> None:
        """Takes the hook away; it is not called again."""
        self.is_removed = True
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
    if hook is not None and hook._owner is not None:
        hook.call(hook._owner, hook._owner._state)


def _replaced(me: weakref.ref[Hook], state: State, grad: torch.Tensor) -> torch.Tensor | None:
    hook, found = me(), gradient_state(state, [grad])
    if hook is None or found is None:
        return None
    changed = hook.call(wrap(found), state)
    if changed is None:
        return None
    if isinstance(changed, ShardedTensor) and changed.shape == found.layout.shape:
        changed = wrap(reshard_state(changed._state, found.layout, devices=found.devices))
    return carriers_for(state, checked_grad(state, changed))[0]


def _shown(me: weakref.ref[Hook], state: State, grads: Sequence[torch.Tensor | None]) -> None:
    """Calls the hook once all gradients are known; some are accumulated by then, and stay."""
    hook, found = me(), gradient_state(state, grads)
    if hook is None or found is None:
        return
    seen = Seen.now(found.carriers)
    if hook.call(wrap(found), state) is not None or seen.has_changed:
        raise OpError(
            "a hook of a ShardedTensor with several shards on a rank changed the gradient",
            rank=state.rank,
            got=str(state.layout),
            fix="It may only look. Change st.grad by register_post_accumulate_grad_hook.",
        )


@handles(_Tensor.register_hook)
def _register_hook(tensor: ShardedTensor, hook: Callable[..., Any]) -> Hook:
    if not tensor._state.requires_grad:
        raise OpError("cannot register a hook on a tensor that doesn't require gradient")
    found = Hook(hook, None)
    found.attach(tensor._state)
    return found


@handles(_Tensor.register_post_accumulate_grad_hook)
def _register_after(tensor: ShardedTensor, hook: Callable[..., Any]) -> Hook:
    if not tensor.is_leaf or not tensor._state.requires_grad:
        raise OpError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    found = Hook(hook, tensor)
    found.attach(tensor._state)
    return found


@handles(_Tensor._backward_hooks.__get__, _Tensor._post_accumulate_grad_hooks.__get__)
def _no_hooks(tensor: ShardedTensor) -> None:
    return None
