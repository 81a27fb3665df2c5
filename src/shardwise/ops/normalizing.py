"""Normalisations: torch's kernel where what is normalised is whole, else by exchanged statistics.

What travels of a piece are its number of elements, mean and sum of squared deviations (the sum of
squares for `rms_norm`), and back the gradients of these.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from shardwise.errors import ArgumentValueError, OpError
from shardwise.ops import folds
from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.outlines import outlines
from shardwise.ops.own_functions import own_function
from shardwise.ops.reduction import Fold, Reduced, everywhere, terms_of
from shardwise.ops.rule import Decision, Need, Rule, composite, register
from shardwise.ops.statistics import Finish, beside, decide_pieces, decide_with_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.rule import Call

__all__: list[str] = []

_CHANNELS = (1,)  # the dim of the tensor that weight, bias and running statistics have


# -- pieces ----------------------------------------------------------------------------------------


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
        x, mean, scale, weight = ctx.saved_tensors
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


def _scaled(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    scale: torch.Tensor,
    affine: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    found: torch.Tensor = _Scaled.apply(x, mean, scale, *affine)  # type: ignore[no-untyped-call]
    return found


class _Affine(NamedTuple):
    """Which of weight and bias a call has."""

    has_weight: bool
    has_bias: bool = False

    def of(self, aside: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        left = iter(aside)
        return [next(left) if has else None for has in self]


def _moments(dims: tuple[int, ...]) -> Fold:
    """Count, sum of squared deviations and mean over these dims."""
    return folds.moments(Reduced((), dims), [], 0, is_std=False, is_complex=False)


def _by_moments(
    reduced: Reduced,
    eps: float,
    affine: _Affine,
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
        return _scaled(piece, mean, scale, affine.of(aside))

    return Finish(start, lambda slots: fold.merge((slots,))[0], (0.0, 0.0, 0.0), end, unit)


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


# -- decisions -------------------------------------------------------------------------------------


def _decide(
    call: Call,
    reduced: Reduced,
    dims: tuple[int, ...],
    finish: Finish,
    local: Callable[..., torch.Tensor] | None = None,
) -> Decision:
    """A norm of the first operand; the others have its dims `dims`.

    `local`, if torch's function of the call itself will not do, is what it is on a piece that has
    all it needs: given the box, the piece and what is beside it.
    """
    outlines(call)  # raises what torch raises
    x, *others = call.operands
    if not math.prod(x.shape):
        return everywhere(call)
    layout = x.layout.bar
    besides = [beside(one, dims, layout, call.rank) for one in others]
    terms = terms_of(layout, reduced, call.rank)
    if terms.is_whole:
        return decide_pieces(call, layout, besides, finish.unit, local)
    return decide_with_statistics(call, terms, layout, finish, besides)


def _affine_of(given: Mapping[str, Any]) -> _Affine:
    return _Affine(given.get("weight") is not None, given.get("bias") is not None)


def _in_order(call: Call, given: Mapping[str, Any]) -> bool:
    """Whether the operands are input, weight and bias in this order."""
    wanted = [given["input"], given.get("weight"), given.get("bias")]
    return [id(one) for one in wanted if one is not None] == list(map(id, call.operands))


# -- layer_norm, rms_norm, group_norm --------------------------------------------------------------


def _layer_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input normalized_shape weight bias eps cudnn_enable")
    if given is None or not _in_order(call, given):
        return None
    reduced, dims = _last_dims(given)
    eps, affine = given.get("eps", 1e-5), _affine_of(given)

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside) if aside else (None, None)
        return torch.layer_norm(ones, (1,) * len(dims), weight, bias)

    return _decide(call, reduced, dims, _by_moments(reduced, eps, affine, unit))


def _last_dims(given: Mapping[str, Any]) -> tuple[Reduced, tuple[int, ...]]:
    shape = given["input"].shape
    dims = tuple(range(len(shape) - len(given["normalized_shape"]), len(shape)))
    return Reduced(shape, dims, keepdim=True), dims


def _rms_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input normalized_shape weight eps")
    if given is None or not _in_order(call, given):
        return None
    reduced, dims = _last_dims(given)
    eps, affine = given.get("eps"), _Affine(given.get("weight") is not None)
    least = torch.finfo(given["input"].dtype).eps if eps is None else eps

    def start(piece: torch.Tensor, box: Box) -> torch.Tensor:
        return piece.square().sum(reduced.dims, keepdim=True).unsqueeze(0)

    def end(
        piece: torch.Tensor, statistics: torch.Tensor, box: Box, *aside: torch.Tensor
    ) -> torch.Tensor:
        scale = (statistics[0] / reduced.count + least).rsqrt()
        return _scaled(piece, None, scale, [*affine.of(aside)])

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(ones, (1,) * len(dims), aside[0] if aside else None)

    finish = Finish(start, lambda slots: slots.sum(0), (0.0,), end, unit)
    return _decide(call, reduced, dims, finish)


def _group_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input num_groups weight bias eps cudnn_enabled")
    if given is None or not _in_order(call, given):
        return None
    outlines(call)
    shape, eps, affine = given["input"].shape, given.get("eps", 1e-5), _affine_of(given)
    size = shape[1] // given["num_groups"]
    dims = tuple(range(2, len(shape)))
    reduced = Reduced(shape, dims, keepdim=True, group=(1, max(size, 1)))

    def local(box: Box, piece: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside)
        return torch.group_norm(piece, box.shape[1] // size, weight, bias, eps)

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside) if aside else (None, None)
        return torch.group_norm(ones, 1, weight, bias)

    finish = _by_moments(reduced, eps, affine, unit)
    return _decide(call, reduced, _CHANNELS, finish, local)


register(Rule("layer_norm", _layer_norm), [torch.layer_norm])
register(Rule("rms_norm", _rms_norm), [torch.rms_norm])
register(Rule("group_norm", _group_norm), [torch.group_norm])


@composite("layer_norm", [F.layer_norm])
def _functional_layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    return torch.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


@composite("rms_norm", [F.rms_norm])
def _functional_rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return torch.rms_norm(input, tuple(normalized_shape), weight, eps)


@composite("group_norm", [F.group_norm])
def _functional_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    _check_channels("group_norm", input, weight=weight, bias=bias)
    if num_groups > 0:
        _check_values("group_norm", input, math.prod(input.shape) // num_groups)
    return torch.group_norm(input, num_groups, weight, bias, eps)


def _check_values(what: str, input: torch.Tensor, count: int) -> None:
    """Raises if there is no variance, of one value."""
    if count == 1:
        raise ArgumentValueError(
            what,
            expected="more than 1 value per channel when training",
            got=f"input of size {list(input.shape)}",
        )


def _check_channels(what: str, input: torch.Tensor, **others: torch.Tensor | None) -> None:
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


# -- batch_norm, instance_norm ---------------------------------------------------------------------


@own_function
def _channel_norm(
    input: torch.Tensor,
    dims: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input normalised over `dims`, its mean, and its variance as of a sample."""
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
    affine = [None if one is None else one.reshape(shape) for one in (weight, bias)]
    result = _scaled(input, mean, (var + eps).rsqrt(), affine)
    return result, mean.squeeze(dims), input.var(dims)


def _batch_unit(ones: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(
        ones, None, None, ones.new_zeros(1), ones.new_ones(1), False, 0.0, 1.0, False
    )


def _decide_channel_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input dims weight bias eps")
    assert given is not None
    x = call.operands[0]
    if not math.prod(x.shape):
        return everywhere(call)
    reduced = Reduced(x.shape, given["dims"])

    def more(statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, square, mean = statistics.unbind(0)
        return mean, square / (reduced.count - 1)

    finish = _by_moments(reduced, given["eps"], _affine_of(given), _batch_unit)
    finish = finish._replace(more=more, num_more=2)
    layout = x.layout.bar
    besides = [beside(one, _CHANNELS, layout, call.rank) for one in call.operands[1:]]
    terms = terms_of(layout, reduced, call.rank)
    return decide_with_statistics(call, terms, layout, finish, besides)


def _decide_eval(call: Call) -> Decision | None:
    """With known statistics it is a function of elements."""
    x, *others = call.operands
    outlines(call)
    layout = x.layout.bar
    besides = [beside(one, _CHANNELS, layout, call.rank) for one in others]
    has = [one is not None for one in call.args[1:-1]]

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        left = iter(aside)
        return _known_norm(ones, *[next(left) if one else None for one in has], 1.0)

    return decide_pieces(call, layout, besides, unit)


@own_function
def _known_norm(input: torch.Tensor, *given: Any) -> torch.Tensor:
    """`torch.batch_norm` by known statistics: weight, bias, mean, variance, eps."""
    weight, bias, mean, var, eps = given
    return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, False)


@own_function
def _brought(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The statistics where `like` is: what a function does to write them is its own work."""
    return x


def _decide_brought(call: Call) -> Decision | None:
    x, like = call.operands

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        return [list(pieces[0])]

    return Decision(
        (Need(x.layout), Need(like.layout)),
        (x.layout,),
        kernel,
        finish=(like.layout.bar,),
        phantom=lambda x, like: [x.reshape(-1)],
    )


register(Rule("batch_norm", _decide_channel_norm), [_channel_norm])
register(Rule("batch_norm", _decide_eval), [_known_norm])
register(Rule("batch_norm", _decide_brought), [_brought])


def _update(running: torch.Tensor | None, fresh: torch.Tensor, momentum: float) -> None:
    """Moves running statistics towards those of a batch, sharded or the same on all ranks."""
    if running is None:
        return
    with torch.no_grad():
        found: Any = fresh.detach()
        if torch.overrides.has_torch_function_unary(found):
            found = _brought(found, running)
            if not torch.overrides.has_torch_function_unary(running):
                found = found.full_tensor()
        running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)


@composite("batch_norm", [F.batch_norm])
def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if training and input.dim() > 1:
        _check_values("batch_norm", input, math.prod(input.shape) // max(input.shape[1], 1))
    found: torch.Tensor = _torch_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, False
    )
    return found


@composite("batch_norm", [torch.batch_norm])
def _torch_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    others = {"running_mean": running_mean, "running_var": running_var}
    _check_channels("batch_norm", input, weight=weight, bias=bias, **others)
    if (running_mean is None) != (running_var is None):
        raise ArgumentValueError(
            "running_mean and running_var of batch_norm", expected="both or none", got="one"
        )
    if not training:
        if running_mean is None or running_var is None:
            raise OpError("batch_norm", expected="running statistics, in evaluation", got="none")
        known = [running_mean, running_var]
        if torch.is_grad_enabled():  # backward needs them as they are now
            known = [one.detach().clone() for one in known]
        return _known_norm(input, weight, bias, *known, eps)
    dims = tuple(dim for dim in range(input.dim()) if dim != 1)
    result, mean, var = _channel_norm(input, dims, weight, bias, eps)
    _update(running_mean, mean, momentum)
    _update(running_var, var, momentum)
    return result


@composite("instance_norm", [F.instance_norm])
def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if use_input_stats:
        _check_values("instance_norm", input, math.prod(input.shape[2:]))
    found: torch.Tensor = _torch_instance_norm(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, False
    )
    return found


@composite("instance_norm", [torch.instance_norm])
def _torch_instance_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    if not use_input_stats:
        known: torch.Tensor = _torch_batch_norm(
            input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
        )
        return known
    others = {"running_mean": running_mean, "running_var": running_var}
    _check_channels("instance_norm", input, weight=weight, bias=bias, **others)
    dims = tuple(range(2, input.dim()))
    result, mean, var = _channel_norm(input, dims, weight, bias, eps)
    if running_mean is not None:
        _update(running_mean, mean.mean(0), momentum)
    if running_var is not None:
        _update(running_var, var.mean(0), momentum)
    return result


# -- by a norm -------------------------------------------------------------------------------------


@composite("normalize", [F.normalize])
def _normalize(
    input: torch.Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    norm = torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)
    return input / norm if out is None else torch.div(input, norm, out=out)
