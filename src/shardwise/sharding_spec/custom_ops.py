"""Ops that a user writes for one class of spec; dispatch asks here before its own rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import ArgumentTypeError, OpError

if TYPE_CHECKING:
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "CUSTOM_FUNCTIONS",
    "CustomOp",
    "_dispatch_custom_op",
    "_has_custom_op",
    "check_custom_op",
    "custom_sharding_spec_op",
]

# A user's op: types, args, kwargs, process group.
CustomOp = Callable[[Sequence[type], Sequence[Any], Mapping[str, Any] | None, Any], Any]

_TABLE = "_custom_ops"  # kept on the spec's class: two classes of one name cannot collide
CUSTOM_FUNCTIONS: set[Any] = set()  # all that any class has, so that most calls ask once


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Callable[..., Any]
) -> Callable[[CustomOp], CustomOp]:
    """Decorator that makes `(types, args, kwargs, process_group)` the op `func` of a spec class.

    Subclasses of the spec class inherit it. Decorating again replaces the function.
    """

    def register(implementation: CustomOp) -> CustomOp:
        check_custom_op(implementation)
        CUSTOM_FUNCTIONS.add(func)
        if _TABLE not in vars(sharding_spec_class):
            setattr(sharding_spec_class, _TABLE, {})
        vars(sharding_spec_class)[_TABLE][func] = implementation
        return implementation

    return register


def check_custom_op(implementation: Callable[..., Any]) -> None:
    """Raises unless it takes `(types, args, kwargs, process_group)`."""
    parameters = inspect.signature(implementation).parameters
    if len(parameters) != 4:
        raise ArgumentTypeError(
            "Custom sharded op function expects signature: (types, args, kwargs, process_group)",
            got=f"({', '.join(parameters)})",
        )


def _find(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> CustomOp | None:
    for cls in type(sharding_spec).__mro__:
        if found := vars(cls).get(_TABLE, {}).get(op):
            implementation: CustomOp = found
            return implementation
    return None


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    """Whether `op` was registered for the spec's class or a base of it."""
    return _find(sharding_spec, op) is not None


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    process_group: Any,
) -> Any:
    """Result of the op registered for the spec's class; raises if there is none."""
    implementation = _find(sharding_spec, op)
    if implementation is None:
        name = getattr(op, "__name__", str(op))
        raise OpError(
            f"Custom op: {name} not registered for {type(sharding_spec).__qualname__}",
            fix=f"Decorate one with custom_sharding_spec_op({type(sharding_spec).__qualname__}, "
            f"torch.{name}).",
        )
    return implementation(types, args, kwargs, process_group)
