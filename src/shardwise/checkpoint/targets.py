"""The state that a checkpoint is loaded into: its tensors by name, and how its values are set.

[Note: targets] Nothing changes while a state is looked at; `Targets.set_values` changes what is no
tensor, once the tensors are filled. A part of a state without tensors is replaced as a whole. A
module's tensors are its own; an optimizer gets new tensors for state that it has not made
yet, in the layouts of its parameters; any other object gets its state dict back, filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.checkpoint.reading import check_file
from shardwise.checkpoint.structure import MOST_DEPTH, check_depth, tensor_names, unflatten
from shardwise.errors import CheckpointError, LoadError
from shardwise.modules.filling import parameters_by_key, room_for
from shardwise.modules.state_trees import joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.checkpoint.saved_state import SavedState
    from shardwise.comm.communicator import Communicator

__all__ = ["Targets", "find_targets"]

_EXTRA = "_extra_state"


@dataclass(slots=True)
class Targets:
    """What of a state is to be filled from a checkpoint."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # plain values
    taken: set[str] = field(default_factory=set)  # names of saved plain values
    root: _Node | None = None

    def set_values(self) -> None:
        """Replaces plain values, and hands objects their state."""
        assert self.root is not None
        self.root.settle()


def find_targets(state: object, saved: SavedState, members: Communicator) -> Targets:
    """The tensors and values of a state; raises about what can never be filled."""
    if not _is_container(state) and not hasattr(state, "state_dict"):
        raise CheckpointError(
            "state of load",
            expected="a dict or list of tensors and values, or an object with load_state_dict()",
            got=type(state).__name__,
        )
    found = Targets()
    found.root = _Walk(saved, members, found).visit(state, "", 0)
    return found


class _Node(ABC):
    """A part of a state."""

    __slots__ = ()

    @abstractmethod
    def settle(self) -> Any:
        """Sets what is no tensor; what is now to stand in its place."""


@dataclass(slots=True)
class _Kept(_Node):
    """A tensor, which is filled by others, or what stays as it is."""

    value: Any

    def settle(self) -> Any:
        return self.value


@dataclass(slots=True)
class _Value(_Node):
    """A part without tensors, to be replaced."""

    own: Any
    new: Any

    @property
    def is_in_place(self) -> bool:
        """Whether those who hold it see the new value."""
        is_dict = isinstance(self.own, MutableMapping) and isinstance(self.new, dict)
        return is_dict or (isinstance(self.own, list) and isinstance(self.new, list))

    def settle(self) -> Any:
        if not self.is_in_place:
            return self.new
        if isinstance(self.own, list):
            self.own[:] = self.new
        else:
            self.own.clear()
            self.own.update(self.new)
        return self.own


@dataclass(slots=True)
class _Container(_Node):
    """A dict, list or tuple in which there are tensors."""

    own: Any
    parts: dict[Any, _Node]

    def settle(self) -> Any:
        settled = {key: part.settle() for key, part in self.parts.items()}
        if isinstance(self.own, tuple):
            return tuple(settled.values())
        for key, value in settled.items():
            if self.own[key] is not value:
                self.own[key] = value
        return self.own


@dataclass(slots=True)
class _Object(_Node):
    """What takes its state by a function."""

    own: Any
    state: _Node
    take: Callable[[Any], Any]

    def settle(self) -> Any:
        self.take(self.state.settle())
        return self.own


@dataclass(slots=True)
class _Walk:
    saved: SavedState
    members: Communicator
    found: Targets

    def visit(self, value: Any, name: str, depth: int) -> _Node:
        check_depth(depth, name)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, torch.nn.Module):
            return self._module(value, name)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, name)
        if hasattr(value, "state_dict") and not isinstance(value, type):
            return self._object(value, name, depth)
        if not _is_container(value) or not value or self._is_plain(value, name):
            return self._value(value, name)
        keys = value.keys() if isinstance(value, Mapping) else range(len(value))
        return _Container(
            value, {key: self.visit(value[key], joined(name, key), depth + 1) for key in keys}
        )

    def _tensor(self, value: torch.Tensor, name: str) -> _Node:
        if name in self.found.tensors:
            raise CheckpointError(
                f"two tensors of the state have the name {name!r}",
                fix="Rename one of the keys: a dict in a dict and a key with a dot give the same.",
            )
        self.found.tensors[name] = value
        return _Kept(value)

    def _is_plain(self, value: Any, name: str) -> bool:
        """Whether there are no tensors in a container, neither here nor in the checkpoint."""
        return _is_plain(value, 0) and not tensor_names(self.saved.node(name))

    def _value(self, value: Any, name: str) -> _Node:
        node = self.saved.node(name)
        is_empty = _is_container(value) and not value
        if name not in self.saved:
            if not is_empty:
                self.found.missing.append(name)
            return _Kept(value)
        if tensor_names(node):
            if is_empty or value is None:
                return _Kept(value)
            raise CheckpointError(
                f"{name!r}",
                expected=f"{type(value).__name__}, as in the state",
                got="tensors in the checkpoint",
                fix="Nothing was loaded. Pass tensors to load into.",
            )
        self.found.taken.update(self.saved.values_under(name))
        return _Value(value, unflatten(node, str))

    def _module(self, module: torch.nn.Module, name: str) -> _Node:
        parts: dict[str, _Node] = {}
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and key.rpartition(".")[2] != _EXTRA:
                self._tensor(value, joined(name, key))
            elif joined(name, key) not in self.saved:
                self.found.missing.append(joined(name, key))
            else:
                parts[key] = self._rebuilt(joined(name, key), None, {})

        def take(values: dict[str, Any]) -> None:
            others = {}
            for key, value in values.items():
                path, _, last = key.rpartition(".")
                if last == _EXTRA:
                    module.get_submodule(path).set_extra_state(value)
                else:
                    others[key] = value
            if others:  # which hooks of the module add to its state
                module.load_state_dict(others, strict=False)

        return _Object(module, _Container(dict.fromkeys(parts), parts), take)

    def _object(self, value: Any, name: str, depth: int) -> _Node:
        if not hasattr(value, "load_state_dict"):
            raise CheckpointError(
                f"{name!r} of the state",
                expected="load_state_dict() beside its state_dict()",
                got=type(value).__name__,
            )
        state = self.visit(value.state_dict(), name, depth + 1)
        if isinstance(state, _Kept):  # nothing was saved of it
            return _Kept(value)
        return _Object(value, state, value.load_state_dict)

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> _Node:
        groups_name = joined(name, "param_groups")
        own: Any = optimizer.state_dict()
        groups: _Node = _Kept(own["param_groups"])
        if groups_name in self.saved:
            groups = self._rebuilt(groups_name, None, {})
        elif joined(name, "state") not in self.saved:
            self.found.missing.append(groups_name)
            return _Kept(optimizer)
        entries: dict[Any, _Node] = {}
        for key, parameter in _parameters(optimizer, groups.settle(), groups_name).items():
            kept = dict(optimizer.state.get(parameter) or {})
            entry = self._state_entry(joined(name, f"state.{key}"), parameter, kept)
            if entry is not None:
                entries[key] = entry
        state = _Container(dict.fromkeys(entries), entries)
        whole = {"state": state, "param_groups": groups}
        return _Object(
            optimizer, _Container(dict.fromkeys(whole), dict(whole)), optimizer.load_state_dict
        )

    def _state_entry(
        self, name: str, parameter: torch.Tensor, kept: dict[str, Any]
    ) -> _Node | None:
        """What an optimizer is to keep for a parameter; None: nothing."""
        node = self.saved.node(name)
        saved_keys = set(unflatten(node, str)) if isinstance(node, dict) else set()
        absent = {key: value for key, value in kept.items() if key not in saved_keys}
        self.found.missing += [
            joined(name, key) for key, value in absent.items() if value is not None
        ]
        if node is None:
            return _Kept(kept) if kept else None
        entry = self._rebuilt(name, parameter, kept)
        parts = entry.parts if isinstance(entry, _Container) else {}
        parts = {**parts, **{key: _Kept(value) for key, value in absent.items()}}
        return _Container(dict.fromkeys(parts), parts)

    def _rebuilt(self, name: str, parameter: torch.Tensor | None, kept: Mapping[str, Any]) -> _Node:
        """What was saved at a name, with tensors to be filled: those kept, or new ones."""
        self.found.taken.update(self.saved.values_under(name))

        def room(saved_name: str) -> torch.Tensor:
            tensor = self.saved.index.tensors[saved_name]
            for file in np.unique(tensor.files).tolist():
                check_file(self.saved.index, file)  # before anything is as large as it says
            key = saved_name.rpartition(".")[2]
            known = kept.get(key)
            if not isinstance(known, torch.Tensor) or known.shape != tensor.shape:
                known = room_for(tensor.shape, tensor.dtype, key, parameter, self.members)
            self._tensor(known, saved_name)
            return known

        built = unflatten(self.saved.node(name), room)
        if isinstance(built, dict):
            return _Container(dict.fromkeys(built), {k: _Kept(v) for k, v in built.items()})
        return _Kept(built)


def _parameters(
    optimizer: torch.optim.Optimizer, groups: Any, name: str
) -> dict[Any, torch.Tensor]:
    """The optimizer's parameters by their saved keys."""
    try:
        return parameters_by_key(optimizer, groups)
    except (TypeError, KeyError, LoadError) as error:
        raise CheckpointError(
            f"{name!r} of the checkpoint does not fit the optimizer",
            got=f"{type(error).__name__}: {error}",
        ) from error


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping) or type(value) in (list, tuple)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether there is no tensor and no object with state in it."""
    if _is_container(value) and depth <= MOST_DEPTH:
        items = value.values() if isinstance(value, Mapping) else value
        return all(_is_plain(item, depth + 1) for item in items)
    return not isinstance(value, torch.Tensor) and not hasattr(value, "state_dict")
