"""What modules take and return: tensors, and tuples, lists, dicts and dataclasses of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in one order on all ranks."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor in it changed; where nothing is, the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):  # first: some are dicts as well
        return _changed_fields(change, value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(change, one) for key, one in value.items()}
        is_same = all(changed[key] is one for key, one in value.items())
        return value if is_same else _like_mapping(value, changed)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        listed = [map_tensors(change, one) for one in value]
        if all(a is b for a, b in zip(listed, value, strict=True)):
            return value
        is_named = hasattr(value, "_fields")  # a named tuple takes its items one by one
        return type(value)(*listed) if is_named else type(value)(listed)
    return value


def _changed_fields(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A copy with other fields: its `__init__` need not be able to make one."""
    made = value
    for field in fields(value):
        old = getattr(value, field.name, None)
        new = map_tensors(change, old)
        if new is old:
            continue
        if made is value:
            made = copy.copy(value)
        if type(value).__dataclass_params__.frozen:
            object.__setattr__(made, field.name, new)
        else:
            setattr(made, field.name, new)
    return made


def _like_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the same kind: a defaultdict keeps its default."""
    if type(value) is dict:
        return changed
    if not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return kind(changed)
    made = copy.copy(value)
    made.update(changed)
    return made
