"""Where parts of saved boxes lie in files: pure arithmetic on boxes and strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.checkpoint.index import SavedTensor
    from shardwise.geometry import Boxes

__all__ = ["Part", "Region", "overlapping", "parts_of", "slices_in"]


class Region(NamedTuple):
    """Elements of a saved box: where the first lies behind that of the box, and how far apart."""

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def span(self) -> int:
        """Elements from the first to the last, with those that lie between."""
        return _span(self.shape, self.strides)

    @property
    def is_run(self) -> bool:
        """Whether nothing lies between, and the order is row-major."""
        triples = zip(self.shape, self.strides, _row_major(self.shape), strict=True)
        return all(size == 1 or step == whole for size, step, whole in triples)

    def at(self, box: Box) -> Region:
        """The elements of a box of its shape."""
        return Region(self.first + _dot(box.start, self.strides), box.shape, self.strides)

    def windows(self, most: int) -> Iterator[Box]:
        """Boxes of its shape that span at most so many elements each, or are a single one."""
        return _windows(Box.whole(self.shape), self.strides, most)


class Part(NamedTuple):
    """What a saved box has of a wanted one."""

    number: int  # of the saved box
    region: Region
    is_run: bool  # of the region
    into: tuple[slice, ...] | None  # what it is of the wanted box; None: all


def parts_of(tensor: SavedTensor, box: Box) -> tuple[Part, ...]:
    """Where a box of a tensor lies in its saved boxes."""
    return tuple(_part(tensor, number, box) for number in overlapping(tensor.boxes, box))


def _part(tensor: SavedTensor, number: int, box: Box) -> Part:
    saved = tensor.boxes[number]
    common = box & saved
    assert common is not None
    strides = _row_major(saved.shape)
    if tensor.strides is not None:
        strides = tuple(tensor.strides[number].tolist())
    within = common.relative_to(saved)
    region = Region(0, saved.shape, strides).at(within)
    return Part(number, region, region.is_run, None if common == box else slices_in(common, box))


def overlapping(boxes: Boxes, box: Box) -> list[int]:
    """The numbers of those boxes that have elements in common with `box`."""
    low = np.maximum(boxes.starts, np.array(box.start, np.int64))
    high = np.minimum(boxes.stops, np.array(box.stop, np.int64))
    found: list[int] = np.flatnonzero((low < high).all(axis=1)).tolist()
    return found


def slices_in(part: Box, box: Box) -> tuple[slice, ...]:
    """Index that cuts a part of a box out of a tensor of the box."""
    return tuple(
        slice(low - origin, high - origin)
        for low, high, origin in zip(part.start, part.stop, box.start, strict=True)
    )


def _windows(box: Box, strides: Sequence[int], most: int) -> Iterator[Box]:
    shape = box.shape
    if _span(shape, strides) <= most:
        yield box
        return
    # Along what lies farthest apart: strides are those of a box without gaps, so that what is
    # one step of this dim spans no more than the stride.
    steps = [step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)]
    dim = steps.index(max(steps))
    length = max(most // strides[dim], 1)
    for start in range(box.start[dim], box.stop[dim], length):
        part = box.with_range(dim, start, min(start + length, box.stop[dim]))
        yield from _windows(part, strides, most)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + _dot([size - 1 for size in shape], strides)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a box whose elements lie in row-major order."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


def _dot(numbers: Sequence[int], steps: Sequence[int]) -> int:
    return sum(number * step for number, step in zip(numbers, steps, strict=True))
