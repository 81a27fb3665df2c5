"""Norms of tensors in pieces: from numbers of the pieces to those of the tensors.

[Note: one exchange] Each rank has a number per piece. What ranks exchange is one vector, with an
entry per tensor, that is added up or of which the largest are taken; `Reduction` says how numbers
of pieces get into it and what comes out of it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Layout, ReduceOp

__all__ = ["MAXIMUM", "Reduction", "counted_pieces", "norm_reduction", "power_sum_reduction"]


class Reduction(NamedTuple):
    """How numbers of pieces become that of the tensor. [Note: one exchange]"""

    op: ReduceOp  # "sum" or "max"
    enter: Callable[[torch.Tensor], torch.Tensor]
    leave: Callable[[torch.Tensor], torch.Tensor]
    needs_elements: bool = False  # whether it has no meaning for tensors without elements

    def vector(
        self, values: torch.Tensor, index: Sequence[int], size: int, device: torch.device
    ) -> torch.Tensor:
        """What this rank puts into the exchange: its `values` are of pieces of tensors `index`."""
        place = torch.tensor(index, dtype=torch.int64, device=values.device)
        entered = self.enter(values.double())
        if self.op == "sum":
            found = entered.new_zeros(size).index_add_(0, place, entered)
            return found.to(device)
        # What is not a number has to come through a maximum that not every backend lets it pass.
        rows = torch.stack([entered.nan_to_num(math.inf, math.inf, -math.inf), entered.isnan()])
        found = entered.new_full((2, size), -math.inf)
        found.scatter_reduce_(1, place.expand(2, -1), rows, "amax")
        return found.to(device)

    def result(self, vector: torch.Tensor) -> torch.Tensor:
        """The numbers of the tensors, of what was exchanged."""
        if self.op == "sum":
            return self.leave(vector)
        return self.leave(vector[0].masked_fill(vector[1] > 0, math.nan))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


# Of magnitudes: the norm of order infinity.
MAXIMUM = Reduction("max", _same, _same, needs_elements=True)


@lru_cache(maxsize=64)
def norm_reduction(order: float) -> Reduction:
    """Of the norm of a tensor, from those of its pieces."""
    if order == math.inf:
        return MAXIMUM
    if order == -math.inf:
        return Reduction("max", torch.neg, torch.neg, needs_elements=True)
    if order in (0, 1):
        return Reduction("sum", _same, _same)
    return Reduction("sum", lambda norms: norms**order, lambda sums: sums ** (1 / order))


def power_sum_reduction(order: float) -> Reduction:
    """Of the sum of the powers of a tensor's absolute values, from those of its pieces."""
    if math.isinf(order):  # which torch takes for the norm
        return norm_reduction(order)
    return Reduction("sum", _same, _same)


@lru_cache(maxsize=4096)
def counted_pieces(layout: Layout, rank: int) -> tuple[int, ...]:
    """Which local pieces the rank speaks for: of replicas the first one does."""
    assert layout.pending is None
    first = {box: layout.replicas_of(box)[0] for box in layout.boxes_of(rank)}
    return tuple(
        k for k, box in enumerate(layout.boxes_of(rank)) if box.volume and first[box] == rank
    )
