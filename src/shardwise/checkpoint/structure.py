"""The state that is saved as JSON: nested dicts and lists, plain values, names of tensors.

[Note: structure] Numbers, strings, bools, None, lists and dicts by strings stand as they are. What
JSON has no form for is a dict of one key that begins with "$":

    {"$tensor": name}            a tensor, of which the data is in the files
    {"$dict": [[key, value]]}    a dict by other keys than strings, or by strings that begin with $
    {"$tuple": [...]}            {"$bytes": base64}    {"$complex": [real, imag]}
    {"$float": "inf"}            {"$dtype": "bfloat16"}    {"$size": [...]}    {"$device": "cpu"}

Nothing else is read, so no file can make a process run code.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import CheckpointError, DamagedError
from shardwise.modules.state_trees import joined
from shardwise.words import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

__all__ = [
    "MOST_DEPTH",
    "Flat",
    "check_depth",
    "flatten",
    "tensor_names",
    "unflatten",
    "with_tensors",
    "without_tensors",
]

_NO_NAME = "__metadata__"  # the key of a safetensors header that is no tensor
_MOST_BITS = 4096  # of an integer: Python refuses to read numbers of thousands of digits
MOST_DEPTH = 200  # of nested containers: more than any state has, less than Python's stack


@dataclass(frozen=True, slots=True)
class Flat:
    """A state as JSON, and its tensors by the names that it has for them."""

    structure: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def flatten(state: object) -> Flat:
    """The state as JSON and its tensors by dotted names.

    An object with a `state_dict` method, such as a module or an optimizer, stands for what that
    returns. Raises about what is neither a tensor nor of a kind that JSON can say.
    """
    found = _Found()
    return Flat(_encoded(state, "", found, 0), found.tensors)


@dataclass(frozen=True, slots=True)
class _Found:
    """What of a state was seen so far."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=lambda: {""})  # of containers and values, too

    def name(self, prefix: str, key: object) -> str:
        """The name of a part, which no other one has: by names a state is loaded."""
        name = joined(prefix, key)
        if name in self.names:
            raise CheckpointError(
                f"two parts of the state have the name {name!r}",
                fix="Rename one of the keys: a dict in a dict and a key with a dot give the same "
                "name, and so do 1 and '1'.",
            )
        self.names.add(name)
        return name


def check_depth(depth: int, name: str) -> None:
    """Raises about a part of a state that so many containers are around, if they are too many."""
    if depth > MOST_DEPTH:
        raise CheckpointError(
            f"state at {name[:80]!r}...",
            expected=f"at most {MOST_DEPTH} containers in each other",
            fix="Does it contain itself?",
        )


def _encoded(value: Any, name: str, found: _Found, depth: int) -> Any:
    check_depth(depth, name)
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, name, found)
    if isinstance(value, Mapping):
        return _encoded_dict(value, name, found, depth)
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if type(value) in (list, tuple):
        listed = [
            _encoded(item, found.name(name, number), found, depth + 1)
            for number, item in enumerate(value)
        ]
        return listed if type(value) is list else {"$tuple": listed}
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return _encoded(value.state_dict(), name, found, depth + 1)
    return _encoded_value(value, name)


def _encoded_tensor(value: torch.Tensor, name: str, found: _Found) -> Any:
    if name == _NO_NAME:
        raise CheckpointError(
            f"tensor {name!r} of the state",
            expected="another name",
            fix="Rename it: safetensors files keep this name for themselves.",
        )
    found.tensors[name] = value
    return {"$tensor": name}


def _encoded_dict(value: Mapping[Any, Any], name: str, found: _Found, depth: int) -> Any:
    items = [
        (key, _encoded(item, found.name(name, key), found, depth + 1))
        for key, item in value.items()
    ]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {"$dict": [[_encoded_value(key, f"a key of {name!r}"), item] for key, item in items]}


def _encoded_value(value: Any, name: str) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and value.bit_length() <= _MOST_BITS:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {"$complex": [_encoded_value(part, name) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", (1,)):
        return _encoded_value(value.item(), name)  # a number of numpy
    raise CheckpointError(
        f"{name!r} of the state",
        expected="a tensor, number, string, None, bytes, a list, tuple or dict of them, or an "
        "object with state_dict()",
        got=f"int of {value.bit_length()} bits" if type(value) is int else type(value).__name__,
        fix="Nothing is pickled here; leave it out, or turn it into one of these.",
    )


def unflatten(structure: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """The state that a structure stands for, with `tensor(name)` in place of each tensor.

    Raises a `DamagedError` about what `flatten` does not write.
    """
    if depth > MOST_DEPTH:
        raise DamagedError("the state", expected=f"at most {MOST_DEPTH} containers in each other")
    if isinstance(structure, list):
        return [unflatten(item, tensor, depth + 1) for item in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), "")
    if not kind.startswith("$"):
        return {key: unflatten(item, tensor, depth + 1) for key, item in structure.items()}
    try:
        return _decoded(kind, structure[kind], tensor, depth + 1)
    except (TypeError, ValueError, RuntimeError, binascii.Error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError(f"{kind} in the state", got=repr(structure[kind])[:80]) from error


def _decoded(kind: str, value: Any, tensor: Callable[[str], Any], depth: int) -> Any:
    match kind:
        case "$tensor":
            return tensor(value)
        case "$dict":
            return {
                unflatten(key, tensor, depth): unflatten(item, tensor, depth) for key, item in value
            }
        case "$tuple":
            return tuple(unflatten(item, tensor, depth) for item in value)
        case "$bytes":
            return base64.b64decode(value, validate=True)
        case "$complex":
            real, imag = (unflatten(part, tensor, depth) for part in value)
            return complex(real, imag)
        case "$float":
            return float(value)
        case "$size":
            return torch.Size(value)
        case "$device":
            return torch.device(value)
        case "$dtype" if isinstance(found := getattr(torch, value, None), torch.dtype):
            return found
    raise DamagedError(f"{kind} in the state", got=repr(value)[:80])


def tensor_names(structure: Any) -> list[str]:
    """The names of the tensors of a structure, in its order."""
    names: list[str] = []
    unflatten(structure, names.append)
    return names


def with_tensors(structure: Any, names: Sequence[str]) -> Any:
    """The structure with these tensors and no others.

    Those that it has stay where they are, a list has None for those that go, and the others come
    to the top by their dotted names.
    """
    wanted, there = set(names), set(tensor_names(structure))
    kept = _kept_tensors(structure, wanted)
    added = {name: {"$tensor": name} for name in names if name not in there}
    if not added:
        return kept
    if not isinstance(kept, dict) or next(iter(kept), "") in ("$tensor", "$tuple"):
        raise CheckpointError(
            "state of the checkpoint", expected="a dict, to put tensors into", got=str(kept)[:80]
        )
    if "$dict" in kept:
        return {"$dict": [*kept["$dict"], *([name, one] for name, one in added.items())]}
    if any(name.startswith("$") for name in added):
        return {"$dict": [[name, one] for name, one in (kept | added).items()]}
    return kept | added


_GONE: Any = object()


def _kept_tensors(structure: Any, names: Set[str]) -> Any:
    """The structure with tensors of these names; `_GONE` if it is another one."""
    match structure:
        case {"$tensor": str(name)}:
            return structure if name in names else _GONE
        case {"$dict": [*pairs]}:
            kept = ((key, _kept_tensors(item, names)) for key, item in pairs)
            return {"$dict": [[key, item] for key, item in kept if item is not _GONE]}
        case {"$tuple": [*listed]}:
            return {"$tuple": _kept_tensors(listed, names)}
        case [*listed]:
            found = (_kept_tensors(item, names) for item in listed)
            return [None if item is _GONE else item for item in found]
        case {**items} if not str(next(iter(items), "")).startswith("$"):
            kept = ((key, _kept_tensors(item, names)) for key, item in items.items())
            return {key: item for key, item in kept if item is not _GONE}
        case _:
            return structure


def without_tensors(structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of a structure by dotted names, in the form that JSON has for them.

    Keys are text, and there is nothing of an empty dict: so DCP has it. An empty list is a value.
    """
    match structure:
        case {"$tensor": _}:
            pass
        case {"$dict": [*pairs]}:
            for key, item in pairs:
                yield from without_tensors(item, joined(name, key))
        case {"$tuple": [*listed]} | [*listed] if listed:
            for number, item in enumerate(listed):
                yield from without_tensors(item, joined(name, number))
        case {**items} if not str(next(iter(items), "")).startswith("$"):
            for key, item in items.items():
                yield from without_tensors(item, joined(name, key))
        case _:
            yield name, structure
