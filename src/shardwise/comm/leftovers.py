"""Memory that is free goes back to the system, where the C library would keep it.

It does not always find room in what it keeps for what it is asked for next: tensors that are given
up one by one, for others of the same size, may take twice the memory in the end.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Leftovers", "give_back"]

_MUCH = 64 << 20  # bytes


class Leftovers:
    """What the tensors of a long work no longer use, which goes back before it is much.

    Not at once, since giving back takes time, and so does being given it again.
    """

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So much more is free now."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _MUCH:
            self._num_bytes = 0
            give_back()


def give_back() -> None:
    """Gives all memory back that is free."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """The C library's call; None where it has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
