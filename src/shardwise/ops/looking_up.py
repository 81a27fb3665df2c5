"""Looking elements up by indices that are tensors: products in the sense of `contraction.py`.

[Note: look-ups] The result of `x[ids]` has the labels of `ids`, and those of `x` but for the dim
that is indexed, which is as if summed over: exactly one of its positions adds something. So a rank
that holds a range of that dim looks up what falls in it, and has zeros for the rest; different
ranges leave a pending sum. Where the dim is whole, torch's own function does it.
"""

from __future__ import annotations

import torch

from shardwise._torch_compat import assert_async
from shardwise.errors import OutOfRangeError

__all__ = ["check_range", "with_zeros_outside", "within"]


def check_range(index: torch.Tensor, size: int, *, what: str, least: int = 0) -> None:
    """Raises if an index is none of `least` to `size - 1`; of CUDA tensors later, as torch does."""
    if not index.numel():
        return
    low, high = torch.aminmax(index)
    if index.device.type != "cpu":
        message = f"{what}: index out of range"
        assert_async((low >= least) & (high < size), message)
        return
    if int(low) < least or int(high) >= size:
        raise OutOfRangeError(
            f"{what}: index out of range in self",
            expected=f"indices from {least} to {size - 1}",
            got=int(low) if int(low) < least else int(high),
        )


def within(index: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices counted from `low`, any for those that are not in the range, and which are in it."""
    return (index - low).clamp_(0, high - low - 1), (index >= low) & (index < high)


def with_zeros_outside(found: torch.Tensor, is_inside: torch.Tensor) -> torch.Tensor:
    return torch.where(is_inside, found, found.new_zeros(()))
