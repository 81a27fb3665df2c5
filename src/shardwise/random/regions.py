"""Where the elements of a box are in the global tensor, in row-major order.

A box is filled slab by slab, and a slab is read as rows: runs of elements that follow each other
in the global tensor. A cut along dim 0 has one long run, a cut along the last dim many short ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.geometry import Box
from shardwise.random.arrays import Array, up_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Rows", "Slab", "slabs"]


@dataclass(frozen=True, slots=True)
class Rows:
    """A box as runs of `length` elements each; the first begins at flat index `first`."""

    first: int
    length: int
    steps: tuple[tuple[int, int], ...]  # (how many, how far apart) of the dims outside of runs

    @classmethod
    def of(cls, box: Box, shape: Sequence[int]) -> Rows:
        """The runs of a box in a tensor of this shape."""
        strides = _strides(shape)
        dim = max(0, box.ndim - 1)
        while dim and box.shape[dim] == shape[dim]:  # then the dim before goes on where this ends
            dim -= 1
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        steps = zip(box.shape[:dim], strides[:dim], strict=True)
        length = math.prod(box.shape[dim:])
        return cls(first, length, tuple(step for step in steps if step[0] > 1))

    @property
    def count(self) -> int:
        """How many runs there are."""
        return math.prod(size for size, _ in self.steps)

    @property
    def last(self) -> int:
        """The largest flat index."""
        return self.first + sum((size - 1) * step for size, step in self.steps) + self.length - 1

    def starts(self, device: torch.device) -> Array:
        """Flat index at which each run begins, in row-major order."""
        on_cpu = device.type == "cpu"
        found: Array = (
            np.array([self.first]) if on_cpu else torch.tensor([self.first], device=device)
        )
        for size, step in self.steps:
            found = (found[:, None] + up_to(size, like=found) * step).reshape(-1)
        return found

    def offset(self, size: int) -> int | None:
        """Where in a block of `size` elements each run begins; None if they differ."""
        return None if any(step % size for _, step in self.steps) else self.first % size


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of a box: its place in the box, its shape, and where it is in the global tensor."""

    index: tuple[slice, ...]
    shape: tuple[int, ...]
    rows: Rows


def slabs(box: Box, shape: Sequence[int], limit: int) -> Iterator[Slab]:
    """Parts of at most `limit` elements that make up `box`; few of them are small.

    Dims are taken whole from the last one on, as many as fit. The next one is cut evenly, and
    those before it are walked through one by one.
    """
    sizes, whole, volume = box.shape, box.ndim, 1
    while whole and volume * sizes[whole - 1] <= limit:
        whole -= 1
        volume *= sizes[whole]
    if whole == 0:
        yield Slab((), sizes, Rows.of(box, shape))
        return
    cut, strides = whole - 1, _strides(shape)
    step = math.ceil(sizes[cut] / math.ceil(sizes[cut] / (limit // volume)))
    for size, starts in _even_parts(sizes[cut], step):
        part = (*(1 for _ in sizes[:cut]), size, *sizes[whole:])
        rows = Rows.of(Box.at(box.start, part), shape)  # but for `first`, the same for all
        for start, *at in itertools.product(starts, *map(range, sizes[:cut])):
            index = (*(slice(a, a + 1) for a in at), slice(start, start + size))
            first = rows.first + sum(map(int.__mul__, (*at, start), strides))
            yield Slab(index, part, Rows(first, rows.length, rows.steps))


def _even_parts(size: int, step: int) -> Iterator[tuple[int, range]]:
    """Parts of `step` and what is left: the size of some parts, and where each of them starts."""
    left = size % step
    yield step, range(0, size - left, step)
    if left:
        yield left, range(size - left, size, left)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
