"""What a checkpoint says of a state, by dotted names: its tensors and its plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.structure import tensor_names, unflatten
from shardwise.modules.state_trees import joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.checkpoint.index import Index

__all__ = ["SavedState"]


class SavedState:
    """The nodes of an index's structure by their names. [Note: structure]"""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._nodes = dict(_named_nodes(index.structure, ""))
        self.values = {  # names of plain values
            name: node for name, node in self._nodes.items() if not _children(node, name)
        }
        for name, node in list(self.values.items()):
            if isinstance(node, list | dict) and (not node or tensor_names(node)):
                del self.values[name]  # a tensor, or an empty container

    def node(self, name: str) -> Any:
        """The structure at a name, or None if there is nothing there.

        Names of tensors that begin so are put together where the structure is a flat one, such as
        that of a Hugging Face folder.
        """
        if name in self._nodes:
            return self._nodes[name]
        start = f"{name}."
        found = {
            key.removeprefix(start): {"$tensor": key}
            for key in self.index.tensors
            if key.startswith(start)
        }
        return found or None

    def __contains__(self, name: str) -> bool:
        return name in self._nodes or self.node(name) is not None

    def values_under(self, name: str) -> list[str]:
        """The names of plain values at a name and below it."""
        start = f"{name}." if name else ""
        return [key for key in self.values if key == name or key.startswith(start)]


def _named_nodes(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, node
    for key, child in _children(node, name):
        yield from _named_nodes(child, key)


def _children(node: Any, name: str) -> list[tuple[str, Any]]:
    """The parts of a container, by name."""
    if isinstance(node, list):
        return [(joined(name, number), child) for number, child in enumerate(node)]
    if not isinstance(node, dict):
        return []
    kind = next(iter(node), "")
    if not kind.startswith("$"):
        return [(joined(name, key), child) for key, child in node.items()]
    if kind == "$tuple":
        return [(joined(name, number), child) for number, child in enumerate(node[kind])]
    if kind == "$dict":
        decoded = [(unflatten(key, str), child) for key, child in node[kind]]
        return [(joined(name, key), child) for key, child in decoded]
    return []
