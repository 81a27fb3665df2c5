"""Functions of our own that are asked for as torch's are: with a rule, for sharded tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["own_function"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def own_function(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: sharded tensors among the arguments, in lists too, send a call to its rule.

    What stands below it is what the function does on plain tensors.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, torch.Tensor):
                tensors.append(arg)
            elif isinstance(arg, list | tuple):
                tensors += [one for one in arg if isinstance(one, torch.Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(run, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return cast("Callable[_P, _R]", run)
