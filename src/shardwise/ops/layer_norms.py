"""Norms of each sample by itself: layer_norm, rms_norm, group_norm and normalize.

Torch's kernel where what is normalised is whole, else by exchanged statistics: moments, and the sum
of squares for `rms_norm`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise.ops.beside import beside, decide_pieces
from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.normalizing import (
    CHANNELS,
    Affine,
    affine_of,
    by_moments,
    check_channels,
    check_values,
    scaled,
)
from shardwise.ops.outlines import outlines
from shardwise.ops.reducing import everywhere
from shardwise.ops.rule import Decision, Rule, composite, register
from shardwise.ops.slots import wide_dtype
from shardwise.ops.statistics import Finish, decide_with_statistics
from shardwise.ops.terms import Reduced, terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.rule import Call

__all__: list[str] = []


def _layer_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input normalized_shape weight bias eps cudnn_enable")
    if given is None or not _in_order(call, given):
        return None
    reduced, dims = _last_dims(given)
    eps, affine = given.get("eps", 1e-5), affine_of(given)

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside) if aside else (None, None)
        return torch.layer_norm(ones, (1,) * len(dims), weight, bias)

    return _decide(call, reduced, dims, by_moments(reduced, eps, affine, unit))


def _last_dims(given: Mapping[str, Any]) -> tuple[Reduced, tuple[int, ...]]:
    shape = given["input"].shape
    dims = tuple(range(len(shape) - len(given["normalized_shape"]), len(shape)))
    return Reduced(shape, dims, keepdim=True), dims


def _rms_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input normalized_shape weight eps")
    if given is None or not _in_order(call, given):
        return None
    reduced, dims = _last_dims(given)
    eps, affine = given.get("eps"), Affine(given.get("weight") is not None)
    # As torch has it: that of the dtype in which statistics are computed.
    least = torch.finfo(wide_dtype(given["input"].dtype)).eps if eps is None else eps

    def start(piece: torch.Tensor, box: Box) -> torch.Tensor:
        return piece.square().sum(reduced.dims, keepdim=True).unsqueeze(0)

    def end(
        piece: torch.Tensor, statistics: torch.Tensor, box: Box, *aside: torch.Tensor
    ) -> torch.Tensor:
        scale = (statistics[0] / reduced.count + least).rsqrt()
        return scaled(piece, None, scale, affine.of(aside))

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(ones, (1,) * len(dims), aside[0] if aside else None)

    finish = Finish(start, lambda slots: slots.sum(0), (0.0,), end, unit)
    return _decide(call, reduced, dims, finish)


def _group_norm(call: Call) -> Decision | None:
    given = known_arguments(call, "input num_groups weight bias eps cudnn_enabled")
    if given is None or not _in_order(call, given):
        return None
    outlines(call)
    shape, eps, affine = given["input"].shape, given.get("eps", 1e-5), affine_of(given)
    size = shape[1] // given["num_groups"]
    dims = tuple(range(2, len(shape)))
    reduced = Reduced(shape, dims, keepdim=True, group=(1, max(size, 1)))

    def local(box: Box, piece: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside)
        return torch.group_norm(piece, box.shape[1] // size, weight, bias, eps)

    def unit(ones: torch.Tensor, *aside: torch.Tensor) -> torch.Tensor:
        weight, bias = affine.of(aside) if aside else (None, None)
        return torch.group_norm(ones, 1, weight, bias)

    finish = by_moments(reduced, eps, affine, unit)
    return _decide(call, reduced, CHANNELS, finish, local)


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


def _in_order(call: Call, given: Mapping[str, Any]) -> bool:
    """Whether the operands are input, weight and bias in this order."""
    wanted = [given["input"], given.get("weight"), given.get("bias")]
    return [id(one) for one in wanted if one is not None] == list(map(id, call.operands))


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
    check_channels("group_norm", input, weight=weight, bias=bias)
    if num_groups > 0:
        check_values("group_norm", input, math.prod(input.shape) // num_groups)
    return torch.group_norm(input, num_groups, weight, bias, eps)


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
