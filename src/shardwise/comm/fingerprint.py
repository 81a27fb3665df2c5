"""Texts by which processes compare values: equal values, equal texts, in every process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING

import torch

from shardwise.arguments import is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["detailed", "identity", "shown"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def identity(value: object) -> str:
    """The text that stands for `value` when ranks compare.

    Whole numbers and sequences are compared by value, of Python's, numpy's or torch's types
    alike; mappings and sets whatever their order; functions and classes by name; tensors by dtype
    and shape, as their data differ rightly; what has a text attribute `fingerprint`, by it.
    Anything else by its repr without memory addresses, which differ between processes: of objects
    with the default repr, only the types are compared.
    """
    return _text(value, attribute="fingerprint")


def shown(value: object) -> str:
    """The text of `value` in a message."""
    return _text(value, attribute=None)


def detailed(value: object) -> str:
    """A longer text, for values that differ and look alike: with the text attribute `listing`."""
    return _text(value, attribute="listing")


def _text(value: object, *, attribute: str | None) -> str:
    """The text, in which that attribute stands for what has it."""
    if type(value) is int:  # what most are
        return repr(value)

    def texts(values: Iterable[object]) -> list[str]:
        return [_text(each, attribute=attribute) for each in values]

    if value is None or isinstance(value, bool | str | bytes | complex):
        return repr(value)
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's double is one, with a repr of its own
    if isinstance(value, tuple | list):  # torch.Size too
        return f"({', '.join(texts(value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"Tensor({value.dtype}, {tuple(value.shape)})"
    if is_whole_number(value):
        return repr(int(value))  # type: ignore[call-overload]  # as just found
    if isinstance(value, Mapping):
        pairs = zip(texts(value.keys()), texts(value.values()), strict=True)
        return f"{{{', '.join(sorted(f'{key}: {item}' for key, item in pairs))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(texts(value)))}}}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    said = None if attribute is None else getattr(value, attribute, None)
    if isinstance(said, str):
        return f"{type(value).__qualname__}: {said}"
    return _ADDRESS.sub("", repr(value))
