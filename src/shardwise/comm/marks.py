"""Numbers that stand for exchanges, by which messages of different ones are kept apart.

[Note: marks] Hot paths compare nothing, so ranks may be in different exchanges: another spec on one
rank, or one call more. Where messages have tags, those of an exchange have one that is made of what
it moves and of how many exchanges the group has begun. So messages of different exchanges never
meet, and no data land where they do not belong; ranks wait in vain, and `watch.py` finds out why.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from shardwise.transfer import TransferPlan

__all__ = ["FIRST_TAG", "NUM_TAGS", "mark_of"]

FIRST_TAG = NUM_TAGS = 1 << 28  # apart from those of early messages, which begin at 1 << 30


def mark_of(moved: Iterable[tuple[TransferPlan, torch.dtype]], max_bytes: int | None = None) -> int:
    """The same in every process, and another for what is moved otherwise."""
    # Of whole numbers, Python's hash is the same everywhere.
    return hash((max_bytes or 0, *[(plan.mark, _mark_of_dtype(dtype)) for plan, dtype in moved]))


@lru_cache(maxsize=64)
def _mark_of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
