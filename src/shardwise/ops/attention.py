"""Attention: batch, heads and queries are taken one by one, keys all together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from shardwise.errors import OpError
from shardwise.ops.call_arguments import arguments_of, operands_named, place_of
from shardwise.ops.contraction import decide_product
from shardwise.ops.forms import Scale
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pattern import Pattern
from shardwise.ops.rule import Call, Rule, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.ops.forms import Form
    from shardwise.ops.rule import Decision, Invoke, Operand

__all__: list[str] = []

_ARGUMENTS = "query key value attn_mask dropout_p is_causal"


def _decide(call: Call) -> Decision | None:
    tensors = operands_named(call, "query key value attn_mask", least=3)
    if tensors is None:
        return None  # which torch refuses
    outlines(call)  # raises what torch raises
    if len(tensors) > 3:
        _check_mask(call, tensors[0], tensors[1], tensors[3])
    if arguments_of(call, _ARGUMENTS).get("dropout_p") or not tensors[0].shape[-1]:
        return None  # `_in_steps`; without features, all keys weigh the same
    is_grouped = call.kwargs.get("enable_gqa", False)
    head = "h" if is_grouped else ""
    terms = [f"...{head}lE", f"...{head}SE", f"...{head}Sv", "...lS"]
    if is_grouped and len(tensors[-1].shape) > 2:
        terms[3] = "...hlS"
    shares = [_share(tensors[0], one) if is_grouped else 1 for one in tensors[:3]]
    pattern = Pattern(
        f"{','.join(terms[: len(tensors)])}->...{head}lv",
        tuple(tensors),
        scales=tuple(map(_scales, tensors, [*shares, 1])),
    )
    form = pattern.form(call)
    if form is None:
        return None
    blocks = _Blocks(call, form, tuple(place_of(call, one) for one in tensors), tuple(shares))
    return decide_product(call, replace(form, run=blocks.run, is_own=blocks.is_own))


def _check_mask(call: Call, query: Operand, key: Operand, mask: Operand) -> None:
    """Refuses what torch refuses, too, but not of outlines: a mask of more than the scores."""
    heads = -3 if call.kwargs.get("enable_gqa", False) else -2
    batch = torch.broadcast_shapes(query.shape[:heads], key.shape[:heads])
    scores = (*batch, *query.shape[heads:-1], key.shape[-2])
    ndim = len(mask.shape)
    is_fit = 2 <= ndim <= len(scores) and all(
        size in (1, of_scores) for size, of_scores in zip(mask.shape, scores[-ndim:], strict=True)
    )
    if not is_fit:
        raise OpError(
            "scaled_dot_product_attention",
            expected=f"attn_mask that can be expanded to {scores}",
            got=tuple(mask.shape),
            fix="Its last two dims are queries and keys.",
        )


def _share(query: Operand, other: Operand) -> int:
    """How many heads of queries a head of keys or values serves."""
    return max(query.shape[-3] // max(other.shape[-3], 1), 1)


def _scales(operand: Operand, share: int) -> tuple[Scale, ...]:
    ndim = len(operand.shape)
    return tuple(Scale(1, share if dim == ndim - 3 else 1) for dim in range(ndim))


class _Blocks(NamedTuple):
    """What attention gives of a range of heads and of queries."""

    call: Call
    form: Form
    places: tuple[int, ...]  # of queries, keys, values and the mask among the operands
    shares: tuple[int, ...]  # how many heads of queries one of each serves

    @property
    def _is_causal(self) -> bool:
        return bool(arguments_of(self.call, _ARGUMENTS).get("is_causal"))

    def is_own(self, space: Box) -> bool:
        """Whether torch's function takes the tensors of a block for what they are."""
        return self._is_first(space) and all(self._is_even(space, share) for share in self.shares)

    def run(self, invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> torch.Tensor:
        query, *others = (tensors[place] for place in self.places[:3])
        pairs = zip(others, self.shares[1:], strict=True)
        key, value = (self._stretched(one, share, space) for one, share in pairs)
        mask = tensors[self.places[3]] if len(self.places) > 3 else None
        is_first = self._is_first(space)
        if not is_first:
            first, last = self._range(space, -2)
            rows = torch.arange(first, last, device=query.device)
            mask = torch.arange(key.shape[-2], device=query.device) <= rows.unsqueeze(1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=self._is_causal and is_first,
            scale=self.call.kwargs.get("scale"),
            enable_gqa=self.call.kwargs.get("enable_gqa", False),
        )

    def _range(self, space: Box, dim: int) -> tuple[int, int]:
        label = self.form.output[dim]
        return space.start[label], space.stop[label]

    def _is_first(self, space: Box) -> bool:
        """Whether torch's causal mask, which counts from 0, is that of these queries."""
        return not self._is_causal or self._range(space, -2)[0] == 0

    def _is_even(self, space: Box, share: int) -> bool:
        """Whether every head that serves these heads of queries serves as many of them."""
        if share == 1:
            return True
        first, last = self._range(space, -3)
        return not (first % share or last % share) or first // share == (last - 1) // share

    def _stretched(self, tensor: torch.Tensor, share: int, space: Box) -> torch.Tensor:
        if self._is_even(space, share):
            return tensor
        first, last = self._range(space, -3)
        heads = torch.arange(first, last, device=tensor.device) // share - first // share
        return tensor.index_select(-3, heads)


def _in_steps(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention in steps, so that what is dropped depends on the place in the whole tensor."""
    if enable_gqa:
        key, value = (
            one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value)
        )
    factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -math.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    # Queries that may see no key get zeros, and no gradient.
    is_blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_blind, 0), -1).masked_fill(is_blind, 0)
    return torch.matmul(F.dropout(weights, dropout_p) if dropout_p else weights, value)


register(
    Rule("scaled_dot_product_attention", _decide, otherwise=_in_steps),
    functions_named(["scaled_dot_product_attention"]),
)
