"""Samples of attention: keys have to be whole, all else may be cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.testing import Sample

BATCH, HEADS, QUERIES, ALL = "chunk(0)", "chunk(1)", "chunk(2)", "replicate()"


def _attention(**options: Any) -> Any:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def _causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, True)


SIZES = ((2, 4, 5, 6), (2, 4, 3, 6), (2, 4, 3, 8))
SAME = ((2, 4, 5, 4),) * 3
GROUPED = ((2, 8, 5, 4), (2, 4, 5, 4), (2, 4, 5, 3))
UNEVEN = "chunk(1, sizes=[3, 1, 2, 2])"


def _multi_head(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, w_out: torch.Tensor, **options: Any
) -> Any:
    """Of 2 heads; every option but those that are given as an encoder has it."""
    options = {"need_weights": False, "training": False} | options
    k, v = (options.pop(name, None) for name in ("bias_k", "bias_v"))
    zero = options.pop("add_zero_attn", False)
    return F.multi_head_attention_forward(
        x, x, x, x.shape[-1], 2, w, b, k, v, zero, 0.0, w_out, None, **options
    )


def _crossed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_out: torch.Tensor,
) -> Any:
    return F.multi_head_attention_forward(
        *(q, k, v, 4, 2, None, None, None, None, False, 0.0, w_out, None),
        use_separate_proj_weight=True,
        q_proj_weight=w_q,
        k_proj_weight=w_k,
        v_proj_weight=w_v,
        average_attn_weights=False,
    )


def _masked(x: Any, w: Any, b: Any, w_out: Any, mask: Any, padding: Any) -> Any:
    # Every query may look at the first key.
    hidden = torch.arange(3) > 0
    return _multi_head(x, w, b, w_out, attn_mask=mask & hidden, key_padding_mask=padding & hidden)


def _with_biases(x: Any, w: Any, b: Any, w_out: Any, k: Any, v: Any, mask: Any) -> Any:
    return _multi_head(
        x, w, b, w_out, bias_k=k, bias_v=v, add_zero_attn=True, attn_mask=mask, need_weights=True
    )


MODULE = ((3, 2, 4), (12, 4), (12,), (4, 4))

SAMPLES: dict[str, list[Sample]] = {
    "scaled_dot_product_attention": [
        Sample(F.scaled_dot_product_attention, SIZES, keeps=(BATCH,) * 3),
        Sample(F.scaled_dot_product_attention, SIZES, keeps=(HEADS,) * 3),
        Sample(F.scaled_dot_product_attention, SIZES, keeps=(QUERIES, ALL, ALL)),
        Sample(_causal, SAME, keeps=(HEADS,) * 3),
        Sample(_attention(is_causal=True), SAME, keeps=(QUERIES, ALL, ALL)),
        Sample(_attention(), (*SIZES, (4, 1, 3)), keeps=(HEADS, HEADS, HEADS, BATCH)),
        Sample(_attention(), (*SIZES, (5, 3)), keeps=(QUERIES, ALL, ALL, BATCH)),
        Sample(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            (*SIZES, (2, 1, 5, 3)),
            values=("real", "real", "real", "truth"),
            keeps=(HEADS, HEADS, HEADS, ALL),
        ),
        Sample(_attention(enable_gqa=True), GROUPED, keeps=(HEADS,) * 3),
        Sample(_attention(enable_gqa=True), GROUPED, keeps=(UNEVEN, ALL, ALL)),
        Sample(
            _attention(enable_gqa=True, is_causal=True),
            ((6, 5, 4), (2, 5, 4), (3, 5, 3)),
        ),
        Sample(_attention(scale=0.3), ((2, 1, 3, 5, 4), (3, 4, 4), (1, 1, 4, 3))),
        Sample(_attention(), ((0, 2, 3, 4), (0, 2, 3, 4), (0, 2, 3, 4))),
        # Without features, all keys weigh the same.
        Sample(_attention(), ((2, 3, 0), (2, 5, 0), (2, 5, 2))),
    ],
    "multi_head_attention_forward": [
        Sample(_multi_head, MODULE, keeps=(HEADS, ALL, ALL, ALL)),
        Sample(_multi_head, ((3, 4), (12, 4), (12,), (4, 4))),
        Sample(lambda *given: _multi_head(*given, need_weights=True), MODULE),
        Sample(
            _masked,
            (*MODULE, (4, 3, 3), (2, 3)),
            values=("real", "real", "real", "real", "truth", "truth"),
        ),
        Sample(_with_biases, (*MODULE, (1, 1, 4), (1, 1, 4), (3, 3))),
        Sample(
            _crossed,
            ((3, 2, 4), (5, 2, 3), (5, 2, 6), (4, 4), (4, 3), (4, 6), (4, 4)),
        ),
    ],
    "_nested_tensor_from_mask_left_aligned": [
        Sample(
            torch._nested_tensor_from_mask_left_aligned,
            ((2, 3, 4), (2, 3)),
            values=("real", "truth"),
            has_grad=False,
            keeps=(BATCH, ALL),
        )
    ],
}
