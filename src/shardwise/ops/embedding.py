"""Embeddings of indices that every rank with a part of the table knows: rules without exchange.

These are functions of our own, in terms of which `embedding.py` and `embedding_bag.py` in
`sharded_tensor/` say what torch's mean; the options of those are settled there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwise.ops.call_arguments import place_of
from shardwise.ops.contraction import decide_product
from shardwise.ops.forms import Factor, Form
from shardwise.ops.looking_up import has_all, with_zeros_outside, within
from shardwise.ops.own_functions import own_function
from shardwise.ops.phantoms import tie_of_operands
from shardwise.ops.pointwise import pointwise
from shardwise.ops.rule import Operand, Rule, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.ops.rule import Call, Decision, Invoke

__all__ = ["look_up", "pool", "rows_at", "scale_gradient"]


@own_function
def look_up(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` that `ids` say, all in range. [Note: look-ups] in `looking_up.py`"""
    return rows_at(ids, weight)


def rows_at(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of local tensors that `ids` say, differentiable any number of times."""
    if ids.numel():
        return F.embedding(ids, table)
    # Of no ids torch's embedding has no second derivative.
    return table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1])


@own_function
def pool(
    ids: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    include_last_offset: bool,
    padding_idx: int | None,
) -> torch.Tensor:
    """`F.embedding_bag` without what it does to gradients and to the table."""
    return F.embedding_bag(
        ids,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


@own_function
def scale_gradient(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`x`, whose gradient is multiplied by `factor`; where that is 0, whatever it is."""
    scaled: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]  # torch's
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return (grad * factor).masked_fill(factor == 0, 0), None


def _decide_look_up(call: Call) -> Decision:
    ids, weight = call.operands
    size, width = weight.shape
    lead = len(ids.shape)
    row, column = lead, lead + 1

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> Any:
        asked, table = tensors
        low, high = space.start[row], space.stop[row]
        if high - low == size:
            return invoke(asked, table)
        places, is_inside = within(asked, low, high)
        return with_zeros_outside(invoke(places, table), is_inside.unsqueeze(-1))

    labels = tuple(range(lead))
    form = Form(
        (*ids.shape, size, width),
        (Factor(0, labels), Factor(1, (row, column))),
        (*labels, column),
        run=None if has_all(weight.layout, 0) else run,
    )
    return replace(decide_product(call, form), phantom=_phantom)


def _phantom(ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return tie_of_operands(*others)


def _decide_pool(call: Call) -> Decision:
    """Columns of the table may be cut, and bags that are rows of `ids`."""
    ids, weight, offsets, weights, _, include_last_offset, _ = call.args
    if isinstance(offsets, Operand):
        num_bags = offsets.shape[0] - bool(include_last_offset)
        sizes = (num_bags, ids.shape[0], *weight.shape, offsets.shape[0])
        listed = [(ids, (1,)), (weight, (2, 3)), (offsets, (4,)), (weights, (1,))]
        whole = frozenset({0, 1, 2, 4})
    else:
        sizes = (*ids.shape, *weight.shape)
        listed = [(ids, (0, 1)), (weight, (2, 3)), (weights, (0, 1))]
        whole = frozenset({1, 2})
    factors = tuple(Factor(place_of(call, one), on) for one, on in listed if one is not None)
    form = Form(sizes, factors, (0, 3), whole=whole)
    return replace(decide_product(call, form), phantom=_phantom)


register(Rule("embedding", _decide_look_up, reads_numbers=False), [look_up])
register(Rule("embedding_bag", _decide_pool), [pool])
register(pointwise("scale_gradient", "first"), [scale_gradient])
