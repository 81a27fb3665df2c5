"""Losses of elements: torch's own function without reduction on every piece, then the reduction."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.call_site import user_level
from shardwise.errors import OpError
from shardwise.ops.loss_reductions import reduced_by, reduction_of
from shardwise.ops.names import functions_named
from shardwise.ops.own_functions import own_function
from shardwise.ops.pointwise import decide_pointwise
from shardwise.ops.rule import Rule, composite, register

__all__: list[str] = []


@own_function
def _by_elements(function: Any, *tensors: Any, **options: Any) -> torch.Tensor:
    """A loss of torch's, without its reduction, which works element by element."""
    result: torch.Tensor = function(*tensors, reduction="none", **options)
    return result


register(
    Rule("loss_elements", lambda call: decide_pointwise(call, None), asks_torch=True),
    [_by_elements],
)


def _of_elements(name: str, num_tensors: int = 2, *, only_input: bool = False) -> None:
    """A loss that torch has of so many tensors and of numbers.

    `only_input`: it has no gradient of the others. Then all ranks have to leave them out of their
    graphs, also those that hold nothing of the input.
    """
    function = getattr(F, name)
    signature = inspect.signature(function)

    @composite(name, [function])
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        reduction = reduction_of(*[given.pop(one) for one in _REDUCTION])
        tensors = [given.pop(one) for one in list(given)[:num_tensors]]
        if only_input:
            tensors[1:] = [
                one.detach() if isinstance(one, torch.Tensor) else one for one in tensors[1:]
            ]
        return reduced_by(_by_elements(function, *tensors, **given), reduction)


_REDUCTION = ("reduction", "size_average", "reduce")
_of_elements("smooth_l1_loss")
_of_elements("soft_margin_loss")
_of_elements("hinge_embedding_loss", only_input=True)
_of_elements("poisson_nll_loss")
_of_elements("margin_ranking_loss", num_tensors=3)


def _check_weight(name: str, input: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != input.shape:
        raise OpError(
            f"{name} with weights",
            expected=f"weights of the input's shape {tuple(input.shape)}",
            got=tuple(weight.shape),
        )


def _weighed(
    name: str,
    losses: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
) -> torch.Tensor:
    """The losses reduced; with weights a mean is one by weight."""
    if weight is None:
        return reduced_by(losses, reduction)
    _check_weight(name, input, weight)
    losses = losses * weight
    if reduction == "mean":
        return losses.sum() / weight.sum()
    return reduced_by(losses, reduction)


def _with_weight(name: str) -> None:
    function = getattr(F, name)

    @composite(name, [function])
    def run(
        input: torch.Tensor,
        target: torch.Tensor,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reduction = reduction_of(reduction, size_average, reduce)
        return _weighed(name, _by_elements(function, input, target), input, weight, reduction)


_with_weight("mse_loss")
_with_weight("l1_loss")


@composite("huber_loss", [F.huber_loss])
def _huber_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    losses = _by_elements(F.huber_loss, input, target, delta=delta)
    if weight is not None:
        _check_weight("huber_loss", input, weight)
        losses = losses * weight
    return reduced_by(losses, reduction_of(reduction, None, None))


@composite("binary_cross_entropy", [F.binary_cross_entropy])
def _binary_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    _check_alike("binary_cross_entropy", input, target)
    return reduced_by(_by_elements(F.binary_cross_entropy, input, target, weight), reduction)


def _check_alike(name: str, input: torch.Tensor, target: torch.Tensor) -> None:
    if input.shape != target.shape:
        raise ValueError(
            f"{name}: target size ({tuple(target.shape)}) must be the same as input size "
            f"({tuple(input.shape)})"
        )


@composite("binary_cross_entropy_with_logits", [F.binary_cross_entropy_with_logits])
def _binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    _check_alike("binary_cross_entropy_with_logits", input, target)
    return reduced_by(_by_elements(_bce_of_logits, input, target, weight, pos_weight), reduction)


def _bce_of_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    *,
    reduction: str,
) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(
        input, target, weight, reduction=reduction, pos_weight=pos_weight
    )


@composite("kl_div", [F.kl_div])
def _kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> torch.Tensor:
    is_batchmean = reduction == "batchmean" and size_average is None and reduce is None
    if reduction == "mean" and size_average is None and reduce is None:
        warnings.warn(
            "reduction: 'mean' divides the total loss by both the batch size and the support size. "
            "'batchmean' divides only by the batch size, as the KL divergence is defined.",
            stacklevel=user_level(),
        )
    reduction = "sum" if is_batchmean else reduction_of(reduction, size_average, reduce)
    found = reduced_by(_by_elements(F.kl_div, input, target, log_target=log_target), reduction)
    return found / input.shape[0] if is_batchmean and input.dim() else found


@composite("gaussian_nll_loss", [F.gaussian_nll_loss])
def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    if isinstance(var, torch.Tensor) and input.shape[:-1] == var.shape != input.shape:
        var = var.unsqueeze(-1)
    elif isinstance(var, float):
        var = torch.full((1,) * input.dim(), var, dtype=input.dtype, device=input.device)
    losses = _by_elements(_gaussian_elements, input, target, var, full=full, eps=eps)
    return reduced_by(losses, reduction_of(reduction, None, None))


def _gaussian_elements(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor,
    *,
    reduction: str,
    full: bool,
    eps: float,
) -> torch.Tensor:
    return F.gaussian_nll_loss(
        input, target, var.expand(input.shape), full=full, eps=eps, reduction=reduction
    )


@composite("multilabel_soft_margin_loss", [F.multilabel_soft_margin_loss])
def _multilabel_soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    losses = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    if weight is not None:
        losses = losses * weight
    return reduced_by(losses.mean(-1), reduction)


# -- of distances ----------------------------------------------------------------------------------


@composite("cosine_similarity", functions_named(["cosine_similarity"]))
def _cosine_similarity(
    x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    ndim = max(x1.dim(), x2.dim())
    dim = dim % max(ndim, 1) - ndim  # of both, as they are broadcast

    def norm(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        return found.clamp_min(eps)

    return (x1 / norm(x1) * (x2 / norm(x2))).sum(dim)


@composite("pairwise_distance", functions_named(["pairwise_distance"]))
def _pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@composite("cosine_embedding_loss", [F.cosine_embedding_loss])
def _cosine_embedding_loss(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    dim = target.dim()
    if input1.dim() != input2.dim() or input1.dim() != dim + 1:
        raise OpError(
            "cosine_embedding_loss",
            expected="inputs of one dim more than the target",
            got=f"{input1.dim()} and {input2.dim()} dims beside {dim}",
        )
    least = 1e-12  # torch's, for this loss

    def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sum(dim)

    norms = (squares(input1, input1) + least) * (squares(input2, input2) + least)
    cosine = squares(input1, input2) / norms.sqrt()
    apart = (cosine - margin).clamp_min(0)
    losses = torch.where(target == 1, 1 - cosine, torch.where(target == -1, apart, 0.0))
    return reduced_by(losses, reduction)


@composite("triplet_margin_loss", [F.triplet_margin_loss])
def _triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    reduction = reduction_of(reduction, size_average, reduce)
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    near = _pairwise_distance(anchor, positive, p, eps)
    far = _pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, _pairwise_distance(positive, negative, p, eps))
    return reduced_by((margin + near - far).clamp_min(0), reduction)
