"""Norms of channels, with running statistics: batch_norm and instance_norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise.errors import ArgumentValueError, OpError
from shardwise.ops.beside import beside, decide_pieces
from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.normalizing import (
    CHANNELS,
    affine_of,
    by_moments,
    check_channels,
    check_values,
    scaled,
)
from shardwise.ops.outlines import outlines
from shardwise.ops.own_functions import own_function
from shardwise.ops.reducing import everywhere
from shardwise.ops.rule import Decision, Need, Rule, composite, register
from shardwise.ops.statistics import decide_with_statistics
from shardwise.ops.terms import Reduced, terms_of

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces

__all__: list[str] = []


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
    result = scaled(input, mean, (var + eps).rsqrt(), affine)
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

    finish = by_moments(reduced, given["eps"], affine_of(given), _batch_unit)
    finish = finish._replace(more=more, num_more=2)
    layout = x.layout.bar
    besides = [beside(one, CHANNELS, layout, call.rank) for one in call.operands[1:]]
    terms = terms_of(layout, reduced, call.rank)
    return decide_with_statistics(call, terms, layout, finish, besides)


def _decide_eval(call: Call) -> Decision | None:
    """With known statistics it is a function of elements."""
    x, *others = call.operands
    outlines(call)
    layout = x.layout.bar
    besides = [beside(one, CHANNELS, layout, call.rank) for one in others]
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

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
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
        check_values("batch_norm", input, math.prod(input.shape) // max(input.shape[1], 1))
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
    check_channels("batch_norm", input, weight=weight, bias=bias, **others)
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
        check_values("instance_norm", input, math.prod(input.shape[2:]))
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
    check_channels("instance_norm", input, weight=weight, bias=bias, **others)
    if input.dim() == 2:  # of which each element is all there is of a sample's channel
        result, mean, var = _channel_norm(input.unsqueeze(-1), (2,), weight, bias, eps)
        result = result.squeeze(-1)
    else:
        dims = tuple(range(2, input.dim()))
        result, mean, var = _channel_norm(input, dims, weight, bias, eps)
    if running_mean is not None:
        _update(running_mean, mean.mean(0), momentum)
    if running_var is not None:
        _update(running_var, var.mean(0), momentum)
    return result
