"""Specs in tuples, lists and dicts, and the values that stand where they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.errors import ArgumentValueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Specs", "is_one", "leaves", "listed_like", "matched", "rebuilt"]

# A spec, a Layout, a ShardedTensor whose layout is meant, None, or a tuple, list or dict of them.
Specs = Any


def is_one(specs: Specs) -> bool:
    """Whether it is a spec, or None, and not several."""
    return not isinstance(specs, tuple | list | Mapping)


def leaves(specs: Specs) -> Iterator[Any]:
    """The specs, None included, one after the other."""
    if is_one(specs):
        yield specs
        return
    for spec in specs.values() if isinstance(specs, Mapping) else specs:
        yield from leaves(spec)


def matched(specs: Specs, values: Any, what: str) -> Iterator[tuple[Any, Any]]:
    """Each spec, None too, and the value that stands where it does."""
    if isinstance(specs, Mapping):
        if not isinstance(values, Mapping) or values.keys() != specs.keys():
            names = list(values) if isinstance(values, Mapping) else type(values).__name__
            raise ArgumentValueError(what, expected=f"a dict of {list(specs)}", got=names)
        for name, spec in specs.items():
            yield from matched(spec, values[name], what)
    elif isinstance(specs, tuple | list):
        if not isinstance(values, tuple | list) or len(values) != len(specs):
            got = len(values) if isinstance(values, tuple | list) else type(values).__name__
            raise ArgumentValueError(what, expected=f"{len(specs)} of them", got=got)
        for spec, value in zip(specs, values, strict=True):
            yield from matched(spec, value, what)
    else:
        yield specs, values


def rebuilt(specs: Specs, values: Iterator[Any]) -> Any:
    """The values, one per spec, in the tuples, lists and dicts of the specs."""
    if isinstance(specs, Mapping):
        return {name: rebuilt(spec, values) for name, spec in specs.items()}
    if isinstance(specs, tuple | list):
        return listed_like(specs, [rebuilt(spec, values) for spec in specs])
    return next(values)


def listed_like(example: Any, values: Iterable[Any]) -> Any:
    """The values in a list, tuple or namedtuple as the example is one."""
    make = getattr(type(example), "_make", None)  # a namedtuple's own class takes them one by one
    return type(example)(values) if make is None else make(values)
