"""Convolutions: products of batch and channels, for which pictures have to be whole.

[Note: groups] The channels that a group reads are as many units as the channels it gives, so a cut
between groups is one and the same on both sides. A rank that has a part of what a group gives reads
all that the group reads.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError
from shardwise.ops.call_arguments import arguments_of, operands_named, place_of
from shardwise.ops.forms import ALIKE, Scale
from shardwise.ops.names import functions_named
from shardwise.ops.pattern import Pattern
from shardwise.ops.rule import Call, Rule, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.forms import Run
    from shardwise.ops.rule import Decision, Invoke, Operand

__all__: list[str] = []

_PICTURE, _KERNEL, _RESULT = "HWD", "IJK", "XYZ"  # whole dims of the operands and the result
_ARGUMENTS = "input weight bias stride padding dilation groups"
_ARGUMENTS_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


def _decide(ndim: int, *, is_transposed: bool) -> Callable[[Call], Decision | None]:
    def decide(call: Call) -> Decision | None:
        tensors = operands_named(call, "input weight bias", least=2)
        if tensors is None:
            return None  # which torch refuses
        x, weight, *bias = tensors
        names = _ARGUMENTS_TRANSPOSED if is_transposed else _ARGUMENTS
        groups = arguments_of(call, names).get("groups", 1)
        _check_shapes(tensors, ndim, groups, is_transposed=is_transposed)
        batch = "n" if len(x.shape) == ndim + 2 else ""
        picture, kernel, result = (one[:ndim] for one in (_PICTURE, _KERNEL, _RESULT))

        def pattern(read: str, weights: str, made: str, **more: Any) -> Pattern:
            text = f"{batch}{read}{picture},{weights}{kernel}->{batch}{made}{result}"
            addend = (made, bias[0]) if bias else None
            return Pattern(text, (x, weight), addend, **more)

        if groups == 1:
            return pattern("c", "co" if is_transposed else "oc", "o").decide(call)
        if is_transposed:  # the weight has the channels that are read first, and no others
            return pattern("C", "RO", "M").decide(call)
        return _decide_groups(call, pattern, tensors, groups, dim=len(batch))

    return decide


def _check_shapes(
    tensors: Sequence[Operand], ndim: int, groups: int, *, is_transposed: bool
) -> None:
    """Refuses what torch refuses, too, but not of outlines."""
    x, weight, *bias = (one.shape for one in tensors)
    first, second = (*weight, 1, 1)[:2]
    read, made = (first, second * groups) if is_transposed else (second * groups, first)
    is_fit = len(x) in (ndim + 1, ndim + 2) and len(weight) == ndim + 2
    if groups > 0 and not (is_fit and x[-ndim - 1] == read and bias in ([], [(made,)])):
        raise OpError(
            f"a convolution of {ndim} dims",
            expected="shapes that fit",
            got=f"input {x}, weight {weight}, bias {(*bias, None)[0]} and {groups} groups",
            fix="Sizes are global ones: those of the full tensors.",
        )


def _decide_groups(
    call: Call,
    pattern: Callable[..., Pattern],
    tensors: Sequence[Operand],
    groups: int,
    *,
    dim: int,
) -> Decision | None:
    """[Note: groups]"""
    x, weight, *_ = tensors
    num_made, num_read, *_ = weight.shape
    if groups < 1 or num_made % groups:
        return None  # which torch refuses
    per_group = Scale(num_read, num_made // groups)
    scales = [ALIKE] * len(x.shape)
    scales[dim] = per_group
    places = [place_of(call, one) for one in tensors]
    # The label of channels comes after that of the batch, if there is one.
    return pattern("o", "oC", "o", scales=(tuple(scales), (ALIKE,) * len(weight.shape))).decide(
        call,
        run=_grouped(call, per_group, places, dim),
        is_own=lambda space: space.stop[dim] - space.start[dim] == num_made,
    )


def _grouped(call: Call, per_group: Scale, places: Sequence[int], dim: int) -> Run:
    """The convolution of a block: of whole groups at once, of parts of a group one by one."""
    num_read, num_made = per_group

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> torch.Tensor:
        x, weight, *bias = (tensors[place] for place in places)
        first, last = space.start[dim], space.stop[dim]
        inner = (-(-first // num_made) * num_made, last // num_made * num_made)
        bounds = sorted({first, last, *[cut for cut in inner if first < cut < last]})
        parts = []
        for low, high in itertools.pairwise(bounds):
            groups = max((high - low) // num_made, 1)
            start = (low // num_made - first // num_made) * num_read
            read = x.narrow(dim, start, groups * num_read)
            own = [one.narrow(0, low - first, high - low) for one in (weight, *bias)]
            given = dict(zip(places, (read, *own), strict=True))
            parts.append(_with_groups(call, groups).invoke(*[given[k] for k in sorted(given)]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return run


def _with_groups(call: Call, groups: int) -> Call:
    if len(call.args) > 6:
        return call._replace(args=(*call.args[:6], groups, *call.args[7:]))
    return call._replace(kwargs=call.kwargs | {"groups": groups})


for _ndim in (1, 2, 3):
    for _name, _is_transposed in ((f"conv{_ndim}d", False), (f"conv_transpose{_ndim}d", True)):
        register(
            Rule(_name, _decide(_ndim, is_transposed=_is_transposed)), functions_named([_name])
        )
