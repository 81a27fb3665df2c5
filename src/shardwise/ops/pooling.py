"""Pooling, resizing and their kin: pictures are whole, batch and channels are taken one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from shardwise.ops.call_arguments import arguments_of, operands_named
from shardwise.ops.names import functions_named
from shardwise.ops.pattern import Pattern
from shardwise.ops.rule import Call, Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.ops.rule import Decision, Invoke

__all__: list[str] = []

_PICTURE, _RESULT = "HWD", "XYZ"


class _Row(NamedTuple):
    """A torch function: the names of its tensors, and what it does to their dims."""

    arguments: str
    text: str  # [Note: patterns] in `pattern.py`

    def decide(self, call: Call) -> Decision | None:
        tensors = operands_named(call, self.arguments)
        return None if tensors is None else Pattern(self.text, tuple(tensors)).decide(call)


def _of_pictures(ndim: int) -> dict[str, _Row]:
    """The functions that have a name for each number of dims of a picture."""
    picture, result = _PICTURE[:ndim], _RESULT[:ndim]
    pooled = _Row("input", f"...{picture}->...{result}")
    names = (
        f"max_pool{ndim}d max_pool{ndim}d_with_indices avg_pool{ndim}d lp_pool{ndim}d "
        f"adaptive_avg_pool{ndim}d adaptive_max_pool{ndim}d adaptive_max_pool{ndim}d_with_indices"
    )
    unpooled = _Row("input indices", f"...{picture},...{picture}->...{result}")
    return dict.fromkeys(names.split(), pooled) | {f"max_unpool{ndim}d": unpooled}


def _decide_interpolate(call: Call) -> Decision | None:
    ndim = len(arguments_of(call, "input")["input"].shape) - 2
    if not 1 <= ndim <= len(_PICTURE):
        return None  # which torch refuses
    return _Row("input", f"nc{_PICTURE[:ndim]}->nc{_RESULT[:ndim]}").decide(call)


def _decide_grid_sample(call: Call) -> Decision | None:
    ndim = len(arguments_of(call, "input")["input"].shape) - 2
    taken = "xyz"[:ndim]
    return _Row("input grid", f"nc{_PICTURE[:ndim]},n{taken}G->nc{taken}").decide(call)


def _decide_affine_grid(call: Call) -> Decision | None:
    tensors = operands_named(call, "theta")
    if tensors is None:
        return None
    given = arguments_of(call, "theta size align_corners")
    size = given["size"]

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> torch.Tensor:
        count = space.stop[0] - space.start[0]
        return F.affine_grid(tensors[0], [count, *size[1:]], given.get("align_corners"))

    text = f"nAB->n{_RESULT[: len(size) - 2]}G"
    return Pattern(text, tuple(tensors)).decide(call, run=run)


for _ndim in (1, 2, 3):
    for _name, _row in _of_pictures(_ndim).items():
        register(Rule(_name, _row.decide), functions_named([_name]))
register(Rule("interpolate", _decide_interpolate), functions_named(["interpolate"]))
register(Rule("grid_sample", _decide_grid_sample), functions_named(["grid_sample"]))
register(Rule("affine_grid", _decide_affine_grid), functions_named(["affine_grid"]))
# Not the method `unfold`, which is a view.
register(Rule("unfold", _Row("input", "...CHW->...PL").decide), [F.unfold])
register(Rule("fold", _Row("input", "...PL->...CXY").decide), functions_named(["fold"]))


@composite("pixel_shuffle", functions_named(["pixel_shuffle"]))
def _pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    factor = upscale_factor
    split = input.unflatten(-3, (-1, factor, factor))
    leading = range(input.dim() - 3)
    c, i, j, h, w = range(input.dim() - 3, input.dim() + 2)
    return split.permute(*leading, c, h, i, w, j).flatten(-4, -3).flatten(-2)


@composite("pixel_unshuffle", functions_named(["pixel_unshuffle"]))
def _pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    factor = downscale_factor
    split = input.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    leading = range(input.dim() - 3)
    c, h, i, w, j = range(input.dim() - 3, input.dim() + 2)
    return split.permute(*leading, c, i, j, h, w).flatten(-5, -3)


@composite("channel_shuffle", functions_named(["channel_shuffle", "native_channel_shuffle"]))
def _channel_shuffle(input: Any, groups: int) -> Any:
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
