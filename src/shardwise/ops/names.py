"""Torch functions by their names: one op has a function, a method, an operator, doors to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["functions_named"]

_CLASSES: tuple[Any, ...] = (torch.Tensor, torch._C.TensorBase)
_HOMES: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.special,
    torch.linalg,
    torch._C._nn,
    torch._C._VariableFunctions,
    torch._C.TensorBase,
)


def functions_named(names: Iterable[str]) -> list[Any]:
    """All torch functions and methods of these names, each once."""
    found = (
        getattr(home, name, None)
        for name in names
        for home in (_CLASSES if name.startswith("__") else _HOMES)  # modules have an __eq__ too
    )
    return list(dict.fromkeys(function for function in found if callable(function)))
