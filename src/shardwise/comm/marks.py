"""Numbers that stand for exchanges, by which messages of different ones are kept apart.

[Note: marks] Hot paths compare nothing, so ranks may be in different exchanges: another spec on one
rank, or one call less. Where messages have tags, those of an exchange have one that is made of what
it moves. So messages of different exchanges never meet, and no data land where they do not belong;
ranks wait in vain, and `watch.py` finds out why.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan

__all__ = ["Mark", "difference", "mark_of"]

_FIRST_TAG = _NUM_TAGS = 1 << 28  # apart from those of early messages, which begin at 1 << 30


class Mark(NamedTuple):
    """What stands for an exchange."""

    tag: int  # the same in every process, and another for what is moved otherwise
    num_tensors: int
    source: Layout  # the rest is for error messages: of the first tensor
    target: Layout
    dtype: torch.dtype
    max_bytes: int | None

    def __str__(self) -> str:
        others = f" and {self.num_tensors - 1} more tensors" if self.num_tensors > 1 else ""
        cap = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"{self.source} to {self.target} in {self.dtype}{others}{cap}"


def difference(rank: int, mark: object, other: int, their_mark: object) -> str:
    """Of ranks that do not move the same: what each moves, by marks or their texts."""
    words, their_words = (str(one or "messages of no exchange") for one in (mark, their_mark))
    if words == their_words:
        their_words = "the same, but with other boxes or owners"
    return f"ranks do not move the same: rank {rank}: {words}; rank {other}: {their_words}"


def mark_of(
    moved: Sequence[tuple[TransferPlan, torch.dtype]], max_bytes: int | None = None
) -> Mark:
    """The mark of the exchange of some tensors."""
    # Of whole numbers, Python's hash is the same everywhere.
    value = hash((max_bytes or 0, *[(plan.mark, _mark_of_dtype(dtype)) for plan, dtype in moved]))
    (plan, dtype), tag = moved[0], _FIRST_TAG + value % _NUM_TAGS
    return Mark(tag, len(moved), plan.source, plan.target, dtype, max_bytes)


@lru_cache(maxsize=64)
def _mark_of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
