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

__all__ = ["Mark", "mark_of"]

_FIRST_TAG = _NUM_TAGS = 1 << 28  # apart from those of early messages, which begin at 1 << 30


class Mark(NamedTuple):
    """What stands for an exchange."""

    tag: int  # the same in every process, and another for what is moved otherwise
    source: Layout  # those of its first tensor, for messages
    target: Layout

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


def mark_of(
    moved: Sequence[tuple[TransferPlan, torch.dtype]], max_bytes: int | None = None
) -> Mark:
    """The mark of the exchange of some tensors."""
    # Of whole numbers, Python's hash is the same everywhere.
    value = hash((max_bytes or 0, *[(plan.mark, _mark_of_dtype(dtype)) for plan, dtype in moved]))
    return Mark(_FIRST_TAG + value % _NUM_TAGS, moved[0][0].source, moved[0][0].target)


@lru_cache(maxsize=64)
def _mark_of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
