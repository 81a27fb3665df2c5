"""What is asked of a plain tensor that becomes a sharded one, or a shard of one."""

from __future__ import annotations

import torch

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.sharded_tensor.usable import state_or_none

__all__ = ["check_contiguous", "check_strided", "checked_plain"]


def checked_plain(value: object, what: str, rank: int, *, fix: str | None = None) -> torch.Tensor:
    """The same, unless it is no tensor or a sharded one; `fix` is for the latter."""
    is_sharded = state_or_none(value) is not None
    if is_sharded or not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            what,
            rank=rank,
            expected="a plain torch.Tensor",
            got=type(value).__name__,
            fix=fix if is_sharded else None,
        )
    return value


def check_strided(tensor: torch.Tensor, rank: int, *, what: str | None = None) -> None:
    """Raises about a sparse tensor and the like; the phrase is the seed's."""
    if tensor.layout != torch.strided:
        phrase = "Only torch.strided layout is currently supported"
        raise ArgumentValueError(
            phrase if what is None else f"{what}: {phrase}", rank=rank, got=tensor.layout
        )


def check_contiguous(tensor: torch.Tensor, what: str, rank: int) -> None:
    """Raises unless the elements lie in row-major order; the phrase is the seed's."""
    if not tensor.is_contiguous():
        raise ArgumentValueError(
            f"{what} is not a contiguous Tensor",
            rank=rank,
            got=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            fix="Pass tensor.contiguous().",
        )
