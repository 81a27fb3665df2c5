"""What callers pass: numbers of Python, numpy or torch, lists and paths; the rest is refused."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.words import shortened

__all__ = [
    "cap",
    "is_whole_number",
    "items",
    "path",
    "real_number",
    "whole_number",
    "whole_numbers",
]


def is_whole_number(value: object) -> bool:
    """Whether `value` is an integer of any kind; a bool is none."""
    if isinstance(value, bool) or getattr(value, "ndim", None):  # an array of one number is a list
        return False
    return _index(value) is not None


def whole_number(value: object, what: str, *, least: int | None = 0, fix: str | None = None) -> int:
    """`value` as an int; raises an error about `what` if it is none, or below `least`.

    `fix` is for what is no number at all.
    """
    number = None if isinstance(value, bool) else _index(value)
    if number is None:
        raise ArgumentTypeError(what, expected="a whole number", got=_shown(value), fix=fix)
    if least is not None and number < least:
        raise ArgumentValueError(what, expected=f"a whole number >= {least}", got=number)
    return number


def cap(max_bytes: object, call: str | None = None) -> int | None:
    """`max_bytes`, of a call, as an int, or None; raises if it is neither, or below 1."""
    if max_bytes is None:
        return None
    return whole_number(max_bytes, "max_bytes" if call is None else f"max_bytes of {call}", least=1)


def whole_numbers(values: object, what: str) -> tuple[int, ...]:
    """`values` as a tuple of ints; raises an error about `what` if one is none or below 0."""
    listed = items(values, what, of="whole numbers")
    numbers = listed
    if set(map(type, listed)) - {int}:  # numpy's or torch's, or wrong
        numbers = [_index(value) if is_whole_number(value) else None for value in listed]
    found = tuple(number for number in numbers if number is not None)
    if len(found) != len(numbers):
        raise ArgumentTypeError(what, expected="whole numbers", got=_shown(values))
    if min(found, default=0) < 0:
        raise ArgumentValueError(what, expected="numbers >= 0", got=_shown(found))
    return found


def real_number(value: object, what: str) -> float:
    """`value` as a float; raises an error about `what` if it is no number, or not a number."""
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # the TypeError is the check
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(what, expected="a number", got=_shown(value)) from None
    if math.isnan(number):
        raise ArgumentValueError(what, expected="a number", got=number)
    return number


def path(value: object, what: str) -> Path:
    """`value` as a path; raises an error about `what` if it is no text and no Path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ArgumentTypeError(what, expected="a path: a string or a Path", got=_shown(value))
    return Path(value)


def items(values: object, what: str, *, of: str) -> list[Any]:
    """What `values` holds; raises an error about `what`, a list `of` something, if it is none."""
    unordered = isinstance(values, Set | Mapping)
    if unordered or isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ArgumentTypeError(what, expected=f"a list of {of}", got=_shown(values))
    return list(values)


def _index(value: object) -> int | None:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the TypeError is the check
    except TypeError:
        return None


def _shown(value: object) -> str:
    """Type and value, of which long ones are cut."""
    return f"{type(value).__name__}: {shortened(repr(value))}"
