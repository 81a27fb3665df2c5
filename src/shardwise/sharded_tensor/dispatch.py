"""The tables from torch functions to what they do on sharded tensors.

The order is: a user's `custom_sharded_op_impl`, the spec's `custom_sharding_spec_op`, the rules of
`shardwise.ops`, handlers, which take what the torch function takes, and for all else the fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwise._torch_compat import torch_name, tree_leaves
from shardwise.errors import ArgumentTypeError
from shardwise.sharding_spec.custom_ops import check_custom_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CUSTOM",
    "HANDLERS",
    "OUTER",
    "RUNNERS",
    "Runner",
    "_sharded_op_impl",
    "call_plain",
    "custom_sharded_op_impl",
    "function_name",
    "handles",
    "runner_of",
    "sharded_arguments",
]

Handler = TypeVar("Handler", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class Runner:
    """What a torch function with a rule does on its arguments, in two steps.

    `quickly(args, kwargs)` gives the result, a ShardedTensor, or else what is known of the call, or
    None; `run(args, kwargs, known)` does the rest.
    """

    quickly: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    run: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


# Module state, filled when this package is imported and by users' decorators.
HANDLERS: dict[Any, Callable[..., Any]] = {}
RUNNERS: dict[Any, Runner] = {}  # of rules
runner_of = RUNNERS.get  # quicker than through the name of another module's dict
OUTER: set[Any] = set()  # functions that the outer tensor answers itself: size, dtype, device
CUSTOM: dict[Any, Callable[..., Any]] = {}  # (types, args, kwargs, process_group) -> result
# Classes in C -> where people find what is in them.
_OWNERS = {"_VariableFunctionsClass": "torch", "TensorBase": "torch.Tensor"}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Decorator: what these torch functions do when an argument is sharded."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            if function in HANDLERS:
                raise ArgumentTypeError(f"{function_name(function)} has a handler already")
            HANDLERS[function] = handler
        return handler

    return register


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Decorator: the user's own implementation of a torch function for sharded tensors.

    It gets `(types, args, kwargs, process_group)`, and wins over everything built in.

    >>> @custom_sharded_op_impl(torch.nn.functional.hardswish)
    ... def hardswish(types, args, kwargs, process_group):
    ...     return args[0]
    >>> del CUSTOM[torch.nn.functional.hardswish]  # here, where it is but an example
    """

    def register(implementation: Handler) -> Handler:
        check_custom_op(implementation)
        CUSTOM[func] = implementation
        return implementation

    return register


def _sharded_op_impl(func: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Decorator: as `custom_sharded_op_impl`, but a spec's own op goes before it.

    It takes the place of the built-in implementation, if there is one.
    """

    def register(implementation: Handler) -> Handler:
        check_custom_op(implementation)

        def handler(*args: Any, **kwargs: Any) -> Any:
            tensors = sharded_arguments(args, kwargs, torch.Tensor)
            types = tuple(dict.fromkeys(type(t) for t in tensors if type(t) is not torch.Tensor))
            group = next(t._state.process_group for t in tensors if hasattr(t, "_state"))
            return implementation(types, args, kwargs, group)

        HANDLERS[func] = handler
        RUNNERS.pop(func, None)
        return implementation

    return register


def call_plain(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The torch function on the outer tensors: what it says of size, dtype and device."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def function_name(function: Any) -> str:
    """How people write the function: `torch.Tensor.numpy`, `torch.add`."""
    owner = getattr(function, "__self__", None)  # of a property's getter: the property
    if getattr(function, "__name__", "") in ("__get__", "__set__") and owner is not None:
        verb = "" if function.__name__ == "__get__" else " = ..."
        named = getattr(owner, "fget", owner)  # of a property in Python, its function
        return f"torch.Tensor.{getattr(named, '__name__', '?')}{verb}"
    found = torch_name(function) or str(getattr(function, "__qualname__", repr(function)))
    owner, _, own = found.rpartition(".")
    return f"{_OWNERS[owner]}.{own}" if owner in _OWNERS else found


def sharded_arguments(args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """All arguments of `kind`, in nested lists and dicts too."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, kind)]
