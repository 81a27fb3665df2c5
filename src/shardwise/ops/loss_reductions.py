"""How losses are reduced: `reduction=`, and what it was called long ago."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from shardwise.call_site import user_level

if TYPE_CHECKING:
    import torch

__all__ = ["reduced_by", "reduction_of"]


def reduction_of(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """What is asked for by `reduction` or, as it was long ago, by the other two."""
    if size_average is not None or reduce is not None:
        is_reduced = reduce is None or reduce
        is_mean = size_average is None or size_average
        reduction = ("mean" if is_mean else "sum") if is_reduced else "none"
        warnings.warn(
            "size_average and reduce args will be deprecated, please use "
            f"reduction='{reduction}' instead.",
            stacklevel=user_level(),
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def reduced_by(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    """The losses, their sum or their mean."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()
