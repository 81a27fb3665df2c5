"""Fourier transforms: the dims that are transformed are whole, all others taken one by one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.ops.call_arguments import arguments_of, operands_named
from shardwise.ops.pattern import decide_along
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []


def _decide(call: Call, *, num_dims: int | None) -> Decision | None:
    """Along the last `num_dims` dims, if nothing else is said; None: along all."""
    operands = operands_named(call, "input")
    if operands is None:
        return None
    given = arguments_of(call, "input s dim")
    ndim, size, dims = len(operands[0].shape), given.get("s"), given.get("dim")
    count = (ndim if size is None else len(size)) if num_dims is None else num_dims
    if dims is None:
        dims = range(-count, 0)
    return decide_along(call, [dims] if isinstance(dims, int) else dims)


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _end, _count in (("", 1), ("2", 2), ("n", None)):
        _rule = Rule(f"fft.{_name}{_end}", partial(_decide, num_dims=_count))
        register(_rule, [getattr(torch.fft, _name + _end)])
