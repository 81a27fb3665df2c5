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

from shardwise.comm.fingerprint import detailed
from shardwise.words import plural, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan

__all__ = ["NO_EXCHANGE", "Mark", "Words", "difference", "mark_of"]

_FIRST_TAG = _NUM_TAGS = 1 << 28  # apart from those of early messages, which begin at 1 << 30
_LONGEST = 400  # characters of a layout's boxes


class Mark(NamedTuple):
    """What stands for an exchange."""

    tag: int  # the same in every process, and another for what is moved otherwise
    num_tensors: int
    source: Layout  # the rest is for error messages: of the first tensor
    target: Layout
    dtype: torch.dtype
    max_bytes: int | None

    @property
    def words(self) -> Words:
        """What is moved, for an error message."""
        others = ""
        if self.num_tensors > 1:
            others = f" and {plural(self.num_tensors - 1, 'more tensor')}"
        cap = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        sides = self.source, self.target
        boxes = [shortened(detailed(side), most=_LONGEST) for side in sides]
        return Words(
            f"{self.source} to {self.target} in {self.dtype}{others}{cap}",
            f"{boxes[0]} to {boxes[1]} in {self.dtype}{others}{cap}",
        )


class Words(NamedTuple):
    """What an exchange moves, in words."""

    short: str
    long: str  # of exchanges whose short ones are alike: with the boxes of the first tensor


NO_EXCHANGE = Words(*["messages of no exchange"] * 2)  # those without a mark
_UNKNOWN = Words(*["something else"] * 2)  # of a rank that has not said it yet


def difference(rank: int, words: Words, other: int, their_words: Words | None) -> str:
    """Of ranks that do not move the same: what each moves, if it is known of the other."""
    (here, here_in_full), (there, there_in_full) = words, their_words or _UNKNOWN
    if here == there:
        here, there = here_in_full, there_in_full
    if here == there:
        there = "the same as far as it is shown here, but not all boxes, owners, or other tensors"
    return f"ranks do not move the same: rank {rank}: {here}; rank {other}: {there}"


def mark_of(
    moved: Sequence[tuple[TransferPlan, torch.dtype]],
    max_bytes: int | None = None,
    *,
    num_tensors: int = 1,
) -> Mark:
    """The mark of the exchange of some tensors, of which several may be moved as one."""
    # Of whole numbers, Python's hash is the same everywhere.
    value = hash((max_bytes or 0, *[(plan.mark, _mark_of_dtype(dtype)) for plan, dtype in moved]))
    (plan, dtype), tag = moved[0], _FIRST_TAG + value % _NUM_TAGS
    return Mark(tag, num_tensors, plan.source, plan.target, dtype, max_bytes)


@lru_cache(maxsize=64)
def _mark_of_dtype(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
