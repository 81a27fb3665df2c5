"""Methods and operators of sharded tensors that torch's C code would answer, put on the class here.

Calls that are known go the quick way without asking torch; what torch finds wrong itself, before it
asks us, is told to the ranks that wait. Imported last: functions with handlers have to be there.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import forward_ad, has_functorch, has_modes, is_tracing
from shardwise.sharded_tensor.dispatch import CUSTOM, HANDLERS, RUNNERS, runner_of
from shardwise.sharded_tensor.telling import ALONE, raised_in
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharding_spec.custom_ops import CUSTOM_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__: list[str] = []

_Tensor: Any = torch.Tensor


def _method(name: str, func: Any) -> Callable[..., Any]:
    """A method or operator of which torch makes `func`.

    Calls that are known go their way without asking torch for it, which takes as long as the rest
    of a small sum; all others ask torch, which checks arguments.
    """
    ask_torch = getattr(torch.Tensor, name)

    @wraps(ask_torch)
    def method(*args: Any, **kwargs: Any) -> Any:
        runner = runner_of(func)
        try:
            if (
                (len(args) > 1 and type(args[1]) is _Tensor)  # a plain tensor is never known
                or runner is None
                or has_modes()
                or has_functorch()  # as `active_transform` says, without the call
                or forward_ad._current_level >= 0
                or is_tracing()
                or (CUSTOM and func in CUSTOM)
                or (CUSTOM_FUNCTIONS and func in CUSTOM_FUNCTIONS)
            ):
                return ask_torch(*args, **kwargs)
            quickly = runner.quickly  # a name of its own: Python takes `runner.quickly()` for a
            made = quickly(args, kwargs)  # method
            if type(made) is ShardedTensor:
                return made
            return ask_torch(*args, **kwargs) if made is None else runner.run(args, kwargs, made)
        except Exception as problem:
            raised_in(func, args, kwargs, problem)
            raise

    return method


def _asking(name: str, func: Any) -> Callable[..., Any]:
    """A method that torch answers, of which also what torch finds wrong itself is told."""
    ask_torch = getattr(torch.Tensor, name)

    @wraps(ask_torch)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask_torch(*args, **kwargs)
        except Exception as problem:
            raised_in(func, args, kwargs, problem)
            raise

    return method


_OPERATORS = {
    "__add__": _Tensor.add,
    "__sub__": _Tensor.sub,
    "__mul__": _Tensor.mul,
    "__truediv__": _Tensor.div,
}


def _methods(table: Iterable[Any]) -> dict[str, Any]:
    """Name -> function, of those that are methods of torch's."""
    named = {getattr(func, "__name__", ""): func for func in table}
    return {name: func for name, func in named.items() if getattr(_Tensor, name, None) is func}


for _make, _functions in (
    (_method, _methods(RUNNERS) | _OPERATORS),
    (_asking, {name: func for name, func in _methods(HANDLERS).items() if name not in ALONE}),
):
    for _name, _function in _functions.items():
        if getattr(ShardedTensor, _name) is getattr(_Tensor, _name):  # not one of our own
            setattr(ShardedTensor, _name, _make(_name, _function))
