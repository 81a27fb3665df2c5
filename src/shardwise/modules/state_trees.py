"""State dicts as trees: tensors in dicts and lists, by dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["joined", "named_tensors"]


def named_tensors(tree: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dicts and lists, by dotted names."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, joined(prefix, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from named_tensors(value, joined(prefix, number))


def joined(prefix: str, key: object) -> str:
    """A dotted name."""
    return f"{prefix}.{key}" if prefix else str(key)
