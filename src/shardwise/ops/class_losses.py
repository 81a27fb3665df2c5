"""cross_entropy and nll_loss: where classes are cut, logits stay where they are.

Targets that are classes are a matter of `row_losses.py`; those that are probabilities, of elements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from shardwise.errors import OpError
from shardwise.ops.beside import beside, decide_pieces
from shardwise.ops.loss_reductions import reduced_by, reduction_of
from shardwise.ops.outlines import outlines
from shardwise.ops.own_functions import own_function
from shardwise.ops.row_losses import Options, class_dim, row_losses
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []


# -- by targets that are probabilities -------------------------------------------------------------


@own_function
def _by_classes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each class of x times its weight."""
    dim = class_dim(x.dim())
    return x * weight.reshape([-1 if k == dim else 1 for k in range(x.dim())])


def _decide_by_classes(call: Call) -> Decision | None:
    outlines(call)
    x, weight = call.operands
    layout = x.layout.bar
    dims = (class_dim(len(x.shape)),)
    besides = [beside(weight, dims, layout, call.rank)]
    return decide_pieces(call, layout, besides, _by_classes)


register(Rule("cross_entropy", _decide_by_classes), [_by_classes])


def _of_probabilities(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    smoothing: float,
) -> torch.Tensor:
    dim = class_dim(input.dim())
    if smoothing:
        target = target * (1 - smoothing) + smoothing / input.shape[dim]
    product = torch.log_softmax(input, dim) * target
    if weight is not None:
        product = _by_classes(product, weight)
    if reduction == "none":
        return -product.sum(dim)
    total = -product.sum()
    return total if reduction == "sum" else total / (math.prod(input.shape) / input.shape[dim])


# -- the functions ---------------------------------------------------------------------------------


def _of_indices(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    options: Options,
) -> torch.Tensor:
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise OpError(
            "a loss of classes: there is no gradient of its weight", fix="Pass weight.detach()."
        )
    if target.dtype not in (torch.int64, torch.uint8):
        raise OpError(
            "the target of a loss of classes",
            expected="dtype torch.int64 or torch.uint8, or probabilities of the input's shape",
            got=f"{target.dtype} of shape {tuple(target.shape)}",
        )
    if target.dtype != torch.int64:
        target = target.to(torch.int64)
    losses, weights = row_losses(input, target, weight, *options)
    if reduction != "mean":
        return reduced_by(losses, reduction)
    return losses.sum() / weights.sum()


@composite("cross_entropy", [F.cross_entropy])
def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if input.shape == target.shape and target.is_floating_point():
        return _of_probabilities(input, target, weight, reduction, label_smoothing)
    options = Options(ignore_index, float(label_smoothing), is_log=False)
    return _of_indices(input, target, weight, reduction, options)


@composite("nll_loss", [F.nll_loss])
def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    options = Options(ignore_index, 0.0, is_log=True)
    return _of_indices(input, target, weight, reduction, options)
