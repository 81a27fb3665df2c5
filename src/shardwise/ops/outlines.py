"""What torch gives of a call, without data: shapes, dtypes and strides, or what it raises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shardwise.ops.rule import Operand

if TYPE_CHECKING:
    from shardwise.ops.rule import Call

__all__ = ["listed_results", "outline", "outline_of", "outlines"]


def outline(tensor: Operand | torch.Tensor, device: str = "meta") -> torch.Tensor:
    """A contiguous tensor of this shape and dtype, without data."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def outline_of(call: Call) -> Any:
    """What the call returns, without data. So torch itself reads the arguments."""
    # On the CPU there are the errors that people know.
    has_elements = any(math.prod(operand.shape) for operand in call.operands)
    device = "meta" if has_elements else "cpu"

    def put(value: Any) -> Any:
        if isinstance(value, Operand):
            return outline(value, device)
        if isinstance(value, tuple | list):
            found = [*map(put, value)]
            return found if isinstance(value, list) else tuple(found)  # x[[0, 1]], x[0, 1]
        return value

    kwargs = {name: put(value) for name, value in call.kwargs.items()}
    return call.function(*map(put, call.args), **kwargs)


def outlines(call: Call) -> list[torch.Tensor]:
    """The tensors that the call returns, without data."""
    return listed_results(outline_of(call))


def listed_results(results: Any) -> list[torch.Tensor]:
    """What a torch function returns, one tensor or several, as several."""
    return list(results) if isinstance(results, tuple | list) else [results]
