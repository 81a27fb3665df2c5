"""Multi-head attention, and with it torch's transformer modules, in functions that have rules.

Heads stay a dim of their own all the way: a cut of the projections between heads stays where it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import OpError
from shardwise.ops.names import functions_named
from shardwise.ops.rule import composite

__all__: list[str] = []


@composite("multi_head_attention_forward", functions_named(["multi_head_attention_forward"]))
def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    _check(query, key, value, embed_dim_to_check, num_heads)
    if is_causal and attn_mask is None:
        raise _refused("is_causal without attn_mask", "Pass the mask that it is a hint of.")
    if (bias_k is None) != (bias_v is None):
        raise _refused("bias_k without bias_v", "Pass both or none.")
    if bias_k is not None and (static_k is not None or static_v is not None):
        raise _refused("bias_k with static_k or static_v", "Pass one of them.")
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = (one.unsqueeze(1) for one in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else in_proj_weight.chunk(3)
    )
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = map(_projected, (query, key, value), weights, biases)
    num_added = 0
    if bias_k is not None:
        num_added += 1
        k = torch.cat([k, bias_k.expand(1, *k.shape[1:])])
        v = torch.cat([v, bias_v.expand(1, *v.shape[1:])])
    q = _by_head(q, num_heads)
    k, v = (
        _by_head(one, num_heads) if static is None else static.unflatten(0, (-1, num_heads))
        for one, static in ((k, static_k), (v, static_v))
    )
    if add_zero_attn:
        num_added += 1
        k, v = (F.pad(one, (0, 0, 0, 1)) for one in (k, v))
    is_only_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None
    if not is_only_causal:
        mask = _mask(attn_mask, key_padding_mask, num_heads, num_added, query.dtype)
    rate = dropout_p if training else 0.0
    if need_weights:
        attention = _weights(q, k, mask, rate)
        found = torch.matmul(attention, v)
    else:
        found = F.scaled_dot_product_attention(q, k, v, mask, rate, is_only_causal)
    found = F.linear(found.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    found = found if is_batched else found.squeeze(1)
    if not need_weights:
        return found, None
    shown = attention.mean(dim=1) if average_attn_weights else attention
    return found, shown if is_batched else shown.squeeze(0)


def _projected(x: Any, weight: Any, bias: Any) -> Any:
    """(positions, batch, features): plain ones are the same on all ranks, and not a rank's rows."""
    if type(x) is not torch.Tensor or type(weight) is torch.Tensor:
        return F.linear(x, weight, bias)
    made = torch.einsum("lne,fe->lnf", x, weight)
    return made if bias is None else made + bias


def _by_head(x: Any, num_heads: int) -> Any:
    """(positions, batch, features) -> (batch, heads, positions, features of a head)."""
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def _weights(query: Any, key: Any, mask: Any, rate: float) -> Any:
    scores = torch.matmul(query * math.sqrt(1.0 / query.shape[-1]), key.transpose(-2, -1))
    found = torch.softmax(scores if mask is None else scores + mask, -1)
    return F.dropout(found, rate) if rate > 0 else found


def _mask(attn_mask: Any, padding: Any, num_heads: int, num_added: int, dtype: torch.dtype) -> Any:
    """What is added to the scores: minus infinity where a query may not look."""
    masks = []
    if attn_mask is not None:
        mask = F.pad(_additive("attn_mask", attn_mask, dtype), (0, num_added))
        masks.append(mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask)
    if padding is not None:
        mask = F.pad(_additive("key_padding_mask", padding, dtype), (0, num_added))
        masks.append(mask.unsqueeze(1).unsqueeze(2))
    return sum(masks[1:], start=masks[0]) if masks else None


def _additive(name: str, mask: Any, dtype: torch.dtype) -> Any:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise _refused(f"{name} of {mask.dtype}", "Masks are of booleans or floats.")
    return mask


def _check(query: Any, key: Any, value: Any, embed_dim: int, num_heads: int) -> None:
    if query.dim() not in (2, 3) or query.dim() != key.dim() or query.dim() != value.dim():
        got = ", ".join(f"{one.dim()}-d" for one in (query, key, value))
        raise _refused(f"query, key and value of {got}", "Pass 2-d ones, or 3-d ones with a batch.")
    if query.shape[-1] != embed_dim:
        raise _refused(f"query of {query.shape[-1]} features", f"Pass one of {embed_dim}.")
    if embed_dim % num_heads:
        raise _refused(f"{num_heads} heads of {embed_dim} features", "Each has the same number.")
    if key.shape[:-1] != value.shape[:-1]:
        got = f"key of {tuple(key.shape)} and value of {tuple(value.shape)}"
        raise _refused(got, "They have the same positions and batch.")


def _refused(got: str, fix: str) -> OpError:
    return OpError("multi_head_attention_forward", got=got, fix=fix)


@composite("_nested_tensor_from_mask_left_aligned", [torch._nested_tensor_from_mask_left_aligned])
def _is_left_aligned(tensor: Any, mask: Any) -> bool:
    """`nn.TransformerEncoder` asks this before it makes a nested tensor, which cannot be cut."""
    return False
