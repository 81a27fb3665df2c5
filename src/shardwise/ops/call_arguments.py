"""The arguments of a call by name, as a rule reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.ops.rule import Operand

if TYPE_CHECKING:
    from shardwise.ops.rule import Call

__all__ = ["arguments_of", "dims_of", "known_arguments", "listed", "operands_named", "place_of"]

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  # names of numpy's
_FIRST = ("input", "self", "x", "A")  # what the first argument is called


def arguments_of(call: Call, names: str, *, spreads: bool = False) -> dict[str, Any]:
    """The arguments by name, those that were given; torch has taken the call already.

    `spreads`: the last name stands for all further arguments, as in `x.repeat(2, 3)`.
    """
    order = names.split()
    args = list(call.args)
    last = len(order) - 1
    if spreads and len(args) > last and not isinstance(args[last], tuple | list):
        args[last:] = [tuple(args[last:])]
    named = _named(call, order[0])
    free = [name for name in order if name not in named]
    return dict(zip(free, args, strict=False)) | named


def _named(call: Call, first: str) -> dict[str, Any]:
    """The arguments that were given by name, as the rule calls them."""
    named = {_ALIASES.get(name, name): value for name, value in call.kwargs.items()}
    return {first if name in _FIRST else name: value for name, value in named.items()}


def known_arguments(call: Call, names: str) -> dict[str, Any] | None:
    """The arguments by name; None where the rule does not know them, `out` among them.

    The first is a tensor.
    """
    order = names.split()
    named = _named(call, order[0])
    num_given = len(call.args) + sum(name in named for name in order)
    found = arguments_of(call, names)
    if found.pop("out", None) is not None or num_given > len(order) or not set(found) <= set(order):
        return None
    return found if isinstance(found.get(order[0]), Operand) else None


def operands_named(call: Call, names: str, *, least: int | None = None) -> list[Operand] | None:
    """The tensors of these names; None if the call has others, `out` among them, or lacks some.

    `least`: how many there have to be, if the last ones may be left out.
    """
    by_name = arguments_of(call, names)
    found = [by_name.get(name) for name in names.split()]
    while least is not None and len(found) > least and found[-1] is None:
        found.pop()
    tensors = [one for one in found if isinstance(one, Operand)]
    return tensors if len(tensors) == len(found) == len(call.operands) else None


def place_of(call: Call, operand: Operand) -> int:
    """Where an argument stands among the operands of the call."""
    return next(k for k, one in enumerate(call.operands) if one is operand)


def listed(value: Any) -> tuple[int, ...]:
    """One whole number or several, as several."""
    return tuple(map(int, value)) if isinstance(value, tuple | list) else (int(value),)


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """The dims of a tensor of `ndim` dims that are meant, counted from its first."""
    return tuple(dim % ndim for dim in listed(value)) if ndim else ()
