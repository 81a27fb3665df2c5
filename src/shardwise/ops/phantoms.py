"""What stands for the results of a rank that has no elements of them.

Tensors without elements, called ties, which follow from the operands as results with elements do on
other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from shardwise.ops.outlines import listed_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.rule import Call

__all__ = ["Phantom", "as_tie", "phantom_of_one", "tie_of", "tie_of_operands", "unit_of"]

# What a rank without elements computes in place of the op.
Phantom: TypeAlias = "Callable[..., list[torch.Tensor]]"


def as_tie(tensor: torch.Tensor) -> torch.Tensor:
    """No elements, following from the tensor."""
    return tensor.reshape(-1)[:0]


def tie_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """No elements of `dtype`, following from the tensors as far as there are gradients."""
    tie = torch.empty(0, dtype=dtype, device=tensors[0].device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return tie
    for tensor in tensors:
        flat = as_tie(tensor)
        if flat.is_complex() and not dtype.is_complex:
            flat = flat.real
        if flat.is_floating_point() or flat.is_complex():
            tie = tie + flat.to(dtype)
    return tie


def tie_of_operands(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """No elements of the first one's dtype, following from all as far as there are gradients."""
    return tie_of((first, *others), first.dtype)


def unit_of(tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Ones of the first tensor's dtype, following from all as far as there are gradients.

    What a rank without pieces computes of it has the graph that pieces have elsewhere, so that
    gradients of gradients meet the same exchanges there.
    """
    first = tensors[0]
    ones = torch.ones(shape, dtype=first.dtype, device=first.device)
    if first.is_floating_point() or first.is_complex():
        ones = ones + tie_of(tensors, first.dtype).sum()
    return ones


def phantom_of_one(call: Call) -> Phantom:
    """What torch's function gives of ones, as ties: of its dtypes at the time, in its graph."""
    # Two along each dim: of one element torch's gradient of `cumprod` does not follow from it.
    shape = (2,) * len(call.operands[0].shape)

    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        return [as_tie(result) for result in listed_results(call.invoke(unit_of([x], shape)))]

    return phantom
