"""What norms share: mean 0 and variance 1 by exchanged moments, then weight and bias.

What travels of a piece are its number of elements, mean and sum of squared deviations, and back the
gradients of these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.errors import ArgumentValueError, OpError
from shardwise.ops import folds
from shardwise.ops.statistics import Finish
from shardwise.ops.terms import Reduced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.slots import Fold

__all__ = [
    "CHANNELS",
    "Affine",
    "affine_of",
    "by_moments",
    "check_channels",
    "check_values",
    "scaled",
]

CHANNELS = (1,)  # the dim of the tensor that weight, bias and running statistics have


class _Scaled(torch.autograd.Function):
    """(x - mean) * scale * weight + bias, which keeps nothing of the size of x but x itself.

    `mean`, `weight` and `bias` may be None. Backward is made of torch functions of what is kept, so
    gradients of gradients are right.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        x, mean, scale, weight, bias = given
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.bias_shape = None if bias is None else bias.shape
        found: torch.Tensor = x * scale if mean is None else (x - mean).mul_(scale)
        if weight is not None:
            found.mul_(weight)
        if bias is not None:
            found.add_(bias)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Of complex numbers the gradient of a factor has the others' conjugates.
        saved: list[Any] = [None if one is None else one.conj() for one in ctx.saved_tensors]
        x, mean, scale, weight = saved
        of_scaled = grad if weight is None else grad * weight
        of_x = of_scaled * scale
        of_mean = None if mean is None else -of_x.sum_to_size(mean.shape)
        product = grad * (x if mean is None else x - mean)
        scaled = product if weight is None else product * weight
        of_scale = scaled.sum_to_size(scale.shape)
        of_weight = None
        if weight is not None and ctx.needs_input_grad[3]:
            of_weight = (product * scale).sum_to_size(weight.shape).to(weight.dtype)
        of_bias = None
        if ctx.bias_shape is not None and ctx.needs_input_grad[4]:
            of_bias = grad.sum_to_size(ctx.bias_shape)
        return of_x, of_mean, of_scale, of_weight, of_bias


def scaled(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    scale: torch.Tensor,
    affine: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """`(x - mean) * scale`, then weight and bias, with its own backward."""
    found: torch.Tensor = _Scaled.apply(x, mean, scale, *affine)  # type: ignore[no-untyped-call]  # torch's
    return found


class Affine(NamedTuple):
    """Which of weight and bias a call has."""

    has_weight: bool
    has_bias: bool = False

    def of(self, aside: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Weight and bias among the tensors aside, None for one that is absent."""
        left = iter(aside)
        return [next(left) if has else None for has in self]


def affine_of(given: Mapping[str, Any]) -> Affine:
    """Which of weight and bias a call has."""
    return Affine(given.get("weight") is not None, given.get("bias") is not None)


def by_moments(
    reduced: Reduced,
    eps: float,
    affine: Affine,
    unit: Callable[..., torch.Tensor],
) -> Finish:
    """Mean 0 and variance 1 over the reduced dims, then weight and bias."""
    fold = _moments(reduced.dims)

    def start(piece: torch.Tensor, box: Box) -> torch.Tensor:
        if reduced.group is None:
            return fold.lift(piece, box)[0]
        return torch.cat(_group_moments(piece, box, reduced.group[1]), 2)

    def end(
        piece: torch.Tensor, statistics: torch.Tensor, box: Box, *aside: torch.Tensor
    ) -> torch.Tensor:
        _, square, mean = statistics.unbind(0)
        scale = (square / reduced.count + eps).rsqrt()
        if reduced.group is not None:
            index = _group_index(box, reduced.group[1], piece.device)
            mean, scale = mean.index_select(1, index), scale.index_select(1, index)
        return scaled(piece, mean, scale, affine.of(aside))

    return Finish(start, lambda slots: fold.merge((slots,))[0], (0.0, 0.0, 0.0), end, unit)


def _moments(dims: tuple[int, ...]) -> Fold:
    """Count, sum of squared deviations and mean over these dims."""
    return folds.moments(Reduced((), dims), [], 0, is_std=False, is_complex=False)


def _group_moments(piece: torch.Tensor, box: Box, size: int) -> list[torch.Tensor]:
    """Of each group of channels that a piece has some of; the first and last may be cut."""
    low, high = box.start[1], box.stop[1]
    inner = min(-(-low // size) * size, high), max(high // size * size, low)
    edges = sorted({low, high, *(edge for edge in inner if low <= edge <= high)})
    fold = _moments(tuple(range(2, piece.ndim + 1)))
    found = []
    for first, last in pairwise(edges):
        part = piece.narrow(1, first - low, last - first)
        count = max((last - first) // size, 1)
        grouped = part.reshape(len(part), count, (last - first) // count, *part.shape[2:])
        found.append(fold.lift(grouped, box)[0].squeeze(3))
    return found


def _group_index(box: Box, size: int, device: torch.device) -> torch.Tensor:
    """For each channel of a box its group, counted from the first that it has some of."""
    channels = torch.arange(box.start[1], box.stop[1], device=device)
    return channels // size - box.start[1] // size


def check_values(what: str, input: torch.Tensor, count: int) -> None:
    """Raises if there is no variance, of one value."""
    if count == 1:
        raise ArgumentValueError(
            what,
            expected="more than 1 value per channel when training",
            got=f"input of size {list(input.shape)}",
        )


def check_channels(what: str, input: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises unless there is an element of each of the others for every channel."""
    if input.dim() < 2:
        raise OpError(what, expected="a tensor of 2 dims or more", got=input.dim())
    for name, one in others.items():
        if one is not None and one.shape != input.shape[1:2]:
            raise OpError(
                f"{name} of {what}",
                expected=f"shape {tuple(input.shape[1:2])}, one per channel",
                got=tuple(one.shape),
            )
