"""A list that cannot change: compares, sorts into copies and pickles as lists do."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from shardwise.errors import ArgumentTypeError

__all__ = ["FrozenList"]

T = TypeVar("T")


class FrozenList(list[T]):
    """Read-only list, hashable by value.

    Callers of the seed system compare offsets, sizes and placements with lists, so tuples will
    not do; and a spec or a shard's box that changes under its owner is one of the seed's defects.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # list says None: lists can change
        return hash(tuple(self))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            "this list belongs to a spec or a shard's metadata and cannot change",
            fix="Change a copy, list(...), and make a new object from it.",
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)
