"""Memory for the messages of an exchange that cannot leave or land where they lie.

Without a cap every message gets new memory, which the allocator often has warm. The rounds under a
cap share one piece: a C library that gets memory back, and is asked for messages of other sizes in
the next round, would take more from the system all the same, many times the cap.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from shardwise.comm.pages import new_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["MessageMemory", "NewMemory", "Slab"]

_LARGEST = 16  # bytes of an element of any dtype


class MessageMemory(Protocol):
    """Where messages are packed, and land."""

    def next_round(self) -> None:
        """What was taken is no longer used."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor, with whatever was in its memory."""


class NewMemory:
    """New for every message."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def next_round(self) -> None:
        """Nothing: what is no longer used is gone."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return new_tensor(shape, dtype, self._device)


class Slab:
    """One piece, which is given out bit by bit, and all of it again to the next round."""

    def __init__(
        self,
        rounds: Sequence[Sequence[int]],
        dtypes: Collection[torch.dtype],
        device: torch.device,
    ) -> None:
        """For rounds whose messages take so many bytes, of tensors of these dtypes."""
        self._size = max(map(sum, rounds), default=0)
        self._step = min((dtype.itemsize for dtype in dtypes), default=1)
        if len({dtype.itemsize for dtype in dtypes}) > 1:  # then there are gaps between messages
            self._step = _LARGEST
            self._size += _LARGEST * max(map(len, rounds), default=0)
        self._device = device
        self._memory: torch.Tensor | None = None
        self._at = 0

    def next_round(self) -> None:
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start = -(-self._at // self._step) * self._step
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > self._size:  # a message that was not foreseen
            return new_tensor(shape, dtype, self._device)
        self._at = stop
        if self._memory is None:
            self._memory = new_tensor((self._size,), torch.uint8, self._device)
        return self._memory[start:stop].view(dtype).view(shape)
