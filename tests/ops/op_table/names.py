"""Which of torch's ops must work by a rule, and what is known to be wrong."""

from __future__ import annotations

from typing import Any

__all__ = ["KNOWN_WRONG", "MAY_GATHER", "must_have_rule"]

# Names of the first and second part of the ops, as torch's table has them. All its classes of
# unary and binary functions of elements belong to them too.
_REQUIRED = """
    addcdiv addcmul clamp lerp logaddexp2 masked_fill to where nn.functional.gelu
    nn.functional.hardswish nn.functional.leaky_relu

    addbmm addmm addmm.decomposed addmv addr baddbmm bmm dot einsum inner linalg.vecdot matmul mm mv
    nn.functional.bilinear nn.functional.linear outer tensordot vdot __rmatmul__

    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum dist
    kthvalue linalg.norm linalg.vector_norm logcumsumexp logsumexp max.reduction_no_dim
    max.reduction_with_dim mean median min.reduction_no_dim min.reduction_with_dim mode nanmean
    nanmedian nansum norm norm.fro norm.inf prod sort std std.unbiased std_mean std_mean.unbiased
    sum topk var var.unbiased var_mean var_mean.unbiased

    normal.in_place uniform rand_like randn_like

    softmax softmax.with_dtype log_softmax log_softmax.with_dtype nn.functional.softmin
    nn.functional.softmin.with_dtype nn.functional.layer_norm nn.functional.rms_norm
    nn.functional.group_norm nn.functional.batch_norm nn.functional.cross_entropy
    nn.functional.nll_loss nn.functional.mse_loss nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div

    nn.functional.dropout nn.functional.rrelu bernoulli nn.functional.glu

    view view_as reshape reshape_as flatten unflatten ravel transpose permute t T mT movedim squeeze
    squeeze.multiple unsqueeze expand expand_as broadcast_to repeat narrow select __getitem__

    cat stack hstack vstack split split.list_args split_with_sizes chunk unbind flip roll
    nn.functional.pad.constant constant_pad_nd tril triu

    gather index_select scatter take_along_dim index_put nn.functional.embedding
    nn.functional.embedding_bag

    nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward
    nn.functional.conv1d nn.functional.conv2d nn.functional.avg_pool1d nn.functional.avg_pool2d
    nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.adaptive_avg_pool1d
    nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool1d
    nn.functional.adaptive_max_pool2d nn.functional.interpolate.nearest
    nn.functional.interpolate.linear nn.functional.interpolate.bilinear
    nn.functional.interpolate.bicubic nn.functional.interpolate.area
"""

# Ops that must have a rule but gather for some calls, and for which: the remark on the page.
MAY_GATHER: dict[str, str] = {
    "linalg.norm": "gathers for matrix norms other than Frobenius's",
    "median": "gathers without a dim",
    "nanmedian": "gathers without a dim",
    "narrow": "gathers where its start is a tensor",
    "topk": "gathers for a 0-d tensor",
}

# Ops that are wrong for some call, with the reason. Each is tested to be still wrong.
KNOWN_WRONG: dict[str, str] = {}


def must_have_rule(name: str, op: Any) -> bool:
    """Whether the op is one of those that may not gather."""
    is_of_elements = type(op).__name__ in ("UnaryUfuncInfo", "BinaryUfuncInfo")
    return is_of_elements or name in _REQUIRED.split()
