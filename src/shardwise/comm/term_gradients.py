"""Gradients of addends: what the terms of a pending tensor have of the gradient of its boxes.

The gradient of a tensor has one entry for all terms of a box on a rank, those of `layout.bar`.
[Note: gradients] and [Note: gradients of gradients] in `differentiable.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from shardwise.comm.differentiable import Carriers
    from shardwise.geometry import Layout

__all__ = ["first_terms", "merge_terms", "scale_terms", "spread_terms", "term_groups"]

T = TypeVar("T")


def scale_terms(grads: Carriers, layout: Layout, rank: int, *, up: bool) -> Carriers:
    """Gradients of terms from those of the mean that is pending, or (`up`) the other way."""
    if layout.pending != "avg":
        return grads
    counts = _term_counts(layout, rank)
    if not counts:
        return grads
    return tuple(
        grad * count if up else grad / count for grad, count in zip(grads, counts, strict=True)
    )


def merge_terms(grads: Carriers, layout: Layout, rank: int) -> Carriers:
    """One gradient for the addends of a box that this rank holds, which are all the same."""
    if layout.pending is None or not torch.is_grad_enabled():
        return first_terms(grads, layout, rank)
    found: Carriers = _Merge.apply(layout, rank, *grads)  # type: ignore[no-untyped-call]  # torch's
    return found


def spread_terms(grads: Carriers, layout: Layout, rank: int) -> Carriers:
    """The other way round: each addend gets its box's gradient; values only."""
    groups = term_groups(layout, rank)
    return grads if groups is None else tuple([grads[k].clone() for k in groups])


def first_terms(values: tuple[T, ...], layout: Layout, rank: int) -> tuple[T, ...]:
    """Of what there is for each local entry, that of the first term of each box."""
    groups = term_groups(layout, rank)
    if groups is None:
        return values
    return tuple([values[groups.index(k)] for k in range(groups[-1] + 1)])


class _Merge(torch.autograd.Function):
    """Of equal gradients of addends, one. [Note: gradients of gradients]"""

    @staticmethod
    def forward(ctx: Any, layout: Layout, rank: int, *grads: torch.Tensor) -> Carriers:
        ctx.layout, ctx.rank = layout, rank
        return tuple([grad.detach() for grad in first_terms(grads, layout, rank)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_ToLowest.apply(ctx.layout, ctx.rank, *grads)  # type: ignore[no-untyped-call]  # torch's


class _ToLowest(torch.autograd.Function):
    """A tensor as a pending sum: all of it in the lowest term of each box."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, rank: int, *values: torch.Tensor) -> Carriers:
        ctx.layout, ctx.rank = layout, rank
        spread = spread_terms(values, layout, rank)
        is_lowest = _are_lowest(layout, rank) or (True,)  # a tie
        return tuple(
            [
                value.clone() if is_kept else torch.zeros_like(value)
                for value, is_kept in zip(spread, is_lowest, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *merge_terms(grads, ctx.layout, ctx.rank)


@lru_cache(maxsize=1024)
def term_groups(layout: Layout, rank: int) -> tuple[int, ...] | None:
    """For each local entry its position in `layout.bar`; None if they are the same."""
    boxes = layout.boxes_of(rank)
    if layout.pending is None or len(layout.bar.boxes_of(rank)) == len(boxes):
        return None
    found = [0]
    for k in range(1, len(boxes)):  # entries of one box and rank are neighbours
        found.append(found[-1] + (boxes[k] != boxes[k - 1]))
    return tuple(found)


@lru_cache(maxsize=1024)
def _term_counts(layout: Layout, rank: int) -> tuple[int, ...]:
    """How many terms the box of each local entry has."""
    box = layout.box_rows.searchsorted(layout.rows_of(rank), side="right") - 1
    return tuple(layout.num_terms[box].tolist())


@lru_cache(maxsize=1024)
def _are_lowest(layout: Layout, rank: int) -> tuple[bool, ...]:
    """Whether each local entry is of the lowest term of its box."""
    assert layout.terms is not None
    lowest = np.minimum.reduceat(layout.terms, layout.box_rows[:-1])
    rows = layout.rows_of(rank)
    box = layout.box_rows.searchsorted(rows, side="right") - 1
    return tuple((layout.terms[rows] == lowest[box]).tolist())
