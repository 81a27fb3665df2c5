"""The arguments of a call by name, as a rule reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.ops.rule import Call

__all__ = ["arguments_of", "dims_of", "listed"]

_ALIASES = {"axis": "dim", "self": "input"}  # names of numpy's and of methods


def arguments_of(call: Call, names: str, *, spreads: bool = False) -> dict[str, Any]:
    """The arguments by name, those that were given; torch has taken the call already.

    `spreads`: the last name stands for all further arguments, as in `x.repeat(2, 3)`.
    """
    order = names.split()
    args = list(call.args)
    if spreads and len(args) >= len(order) and not isinstance(args[len(order) - 1], tuple):
        args[len(order) - 1 :] = [tuple(args[len(order) - 1 :])]
    named = {_ALIASES.get(name, name): value for name, value in call.kwargs.items()}
    free = [name for name in order if name not in named]
    return dict(zip(free, args, strict=False)) | named


def listed(value: Any) -> tuple[int, ...]:
    """One whole number or several, as several."""
    return tuple(map(int, value)) if isinstance(value, tuple | list) else (int(value),)


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """The dims of a tensor of `ndim` dims that are meant, counted from its first."""
    return tuple(dim % ndim for dim in listed(value)) if ndim else ()
