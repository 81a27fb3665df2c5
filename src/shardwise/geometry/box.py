"""Boxes: one (`Box`), and many as two arrays (`Boxes`)."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from shardwise.arguments import whole_numbers
from shardwise.errors import ArgumentTypeError, ArgumentValueError, GeometryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Box", "Boxes", "Ints", "as_shape", "frozen_ints", "rows_of_ints"]

Ints = NDArray[np.int64]  # arrays of coordinates


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Tuple of plain ints; raises if an entry is not a whole number >= 0."""
    sizes = whole_numbers(shape, "shape")
    if max(math.prod(sizes), *sizes, 0) >= 2**63:
        raise GeometryError("shape", expected="fewer than 2**63 elements", got=sizes)
    return sizes


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Half-open hyper-rectangle `[start, stop)` in global tensor coordinates.

    >>> Box((0, 2), (4, 6)) & Box((2, 0), (8, 4))
    Box(start=(2, 2), stop=(4, 4))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = whole_numbers(self.start, "Box.start"), whole_numbers(self.stop, "Box.stop")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        if len(start) != len(stop):
            raise GeometryError(
                "Box", expected="start and stop of one length", got=f"{start} and {stop}"
            )
        if any(map(operator.gt, start, stop)):
            raise GeometryError("Box", expected="start <= stop in every dim", got=str(self))

    @classmethod
    def at(cls, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Box of `shape` whose low corner is at `offset`."""
        start, sizes = whole_numbers(offset, "offset"), whole_numbers(shape, "shape")
        if len(start) != len(sizes):
            raise GeometryError(
                "Box.at", expected="offset and shape of one length", got=f"{start} and {sizes}"
            )
        return cls(start, tuple(map(operator.add, start, sizes)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Box that is the whole of a tensor of `shape`."""
        sizes = whole_numbers(shape, "shape")
        return cls((0,) * len(sizes), sizes)

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> Box:
        """Box of a range (start, stop) for each dim."""
        listed = list(ranges)
        return cls(tuple(low for low, _ in listed), tuple(high for _, high in listed))

    @classmethod
    def _trusted(cls, start: tuple[int, ...], stop: tuple[int, ...]) -> Box:
        """Box of ends that are known to be right: checking takes most of a box's time."""
        box = object.__new__(cls)
        object.__setattr__(box, "start", start)
        object.__setattr__(box, "stop", stop)
        return box

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dim."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for the 0-d box."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return self.volume == 0

    def __and__(self, other: Box) -> Box | None:
        """Overlap of two boxes, or None if it is empty (empty boxes never move data)."""
        if not isinstance(other, Box):
            return NotImplemented
        self._check_same_ndim(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box._trusted(start, stop) if all(map(operator.lt, start, stop)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box (an empty one always is)."""
        self._check_same_ndim(other)
        inside = all(map(operator.le, self.start, other.start))
        return other.is_empty or (inside and all(map(operator.le, other.stop, self.stop)))

    def __contains__(self, point: Sequence[int]) -> bool:
        """Whether the element at `point` is in this box."""
        at = whole_numbers(point, "point")
        return len(at) == self.ndim and all(
            a <= x < b for a, x, b in zip(self.start, at, self.stop, strict=True)
        )

    def shift(self, offset: Sequence[int]) -> Box:
        """This box moved by `offset`, which may be negative."""
        if len(offset) != self.ndim:
            raise GeometryError("offset", expected=f"{self.ndim} numbers", got=tuple(offset))
        return Box.at(tuple(map(operator.add, self.start, offset)), self.shape)

    def with_range(self, dim: int, start: int, stop: int) -> Box:
        """The box with another range along one dim (negative dims count from the end)."""
        if not -self.ndim <= dim < self.ndim:
            raise GeometryError("dim", expected=f"one of the {self.ndim} dims of {self}", got=dim)
        dim %= self.ndim
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def along(self, dims: Iterable[int]) -> Box:
        """The ranges of these dims, in their order, as a box of its own."""
        chosen = tuple(dims)
        return Box(tuple(self.start[d] for d in chosen), tuple(self.stop[d] for d in chosen))

    def relative_to(self, origin: Box) -> Box:
        """This box in the coordinates of `origin`, which must contain it."""
        if not origin.contains(self):
            raise GeometryError(
                "relative coordinates", expected=f"a box inside {origin}", got=str(self)
            )
        if self.is_empty and any(map(operator.lt, self.start, origin.start)):
            return Box.at((0,) * self.ndim, self.shape)
        return self.shift(tuple(-a for a in origin.start))

    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this box out of a full tensor; `()` for the 0-d box."""
        return tuple(map(slice, self.start, self.stop))

    def _check_same_ndim(self, other: Box) -> None:
        if self.ndim != other.ndim:
            raise GeometryError("boxes", expected=f"{self.ndim} dims", got=f"{other.ndim}: {other}")

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def frozen_ints(values: object) -> Ints:
    """Read-only int64 array of `values`; shares memory only with what can no longer change."""
    given = np.asarray(values)
    if given.dtype.kind not in "iu" and given.size:
        raise ArgumentTypeError("array", expected="whole numbers", got=given.dtype)
    if given.dtype.kind == "u" and given.size and given.max() >= 2**63:
        raise ArgumentValueError("array", expected="numbers below 2**63", got=given.max())
    array = given.astype(np.int64, copy=False)
    if not array.flags.owndata:  # a view: its base may be writable
        array = array.copy()
        array.setflags(write=False)
    if array.flags.writeable:
        array = array.copy()
        array.setflags(write=False)
    return array


def rows_of_ints(rows: Iterable[Iterable[int]], num_rows: int, width: int) -> Ints:
    """Array (num_rows, width) of many short rows; several times faster than np.array on lists."""
    numbers = itertools.chain.from_iterable(rows)
    return np.fromiter(numbers, np.int64, num_rows * width).reshape(num_rows, width)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Many boxes of one number of dims, as two read-only arrays of shape (n, ndim).

    A sequence of `Box` for readers; arrays for everything that must be fast.
    """

    starts: Ints  # (n, ndim)
    stops: Ints  # (n, ndim)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", frozen_ints(self.starts))
        object.__setattr__(self, "stops", frozen_ints(self.stops))
        if self.starts.ndim != 2 or self.starts.shape != self.stops.shape:
            raise GeometryError(
                "Boxes",
                expected="starts and stops of one shape (n, ndim)",
                got=f"{self.starts.shape} and {self.stops.shape}",
            )
        bad = ((self.starts < 0) | (self.stops < self.starts)).any(axis=1)
        if bad.any():
            row = int(bad.argmax())
            raise GeometryError(
                f"box {row}",
                expected="0 <= start <= stop in every dim",
                got=f"start {self.starts[row].tolist()}, stop {self.stops[row].tolist()}",
            )

    @classmethod
    def of(cls, boxes: Iterable[Box], ndim: int) -> Boxes:
        """The same boxes as arrays; `ndim` gives the width when there are none."""
        listed = list(boxes)
        for row, box in enumerate(listed):
            if not isinstance(box, Box):
                raise ArgumentTypeError(
                    f"box {row}", expected="a Box", got=repr(box), fix="E.g. Box((0, 0), (4, 6))."
                )
            if len(box.start) != ndim:
                raise GeometryError(f"box {row}", expected=f"{ndim} dims", got=f"{box.ndim}: {box}")
        return cls(
            rows_of_ints((box.start for box in listed), len(listed), ndim),
            rows_of_ints((box.stop for box in listed), len(listed), ndim),
        )

    @property
    def ndim(self) -> int:
        """Number of dims of each box."""
        return int(self.starts.shape[1])

    @property
    def shapes(self) -> Ints:
        """Sizes per box, (n, ndim)."""
        return self.stops - self.starts

    @property
    def is_full(self) -> NDArray[np.bool_]:
        """Which boxes have elements, (n,)."""
        full: NDArray[np.bool_] = np.ones(len(self), dtype=bool)
        for start, stop in zip(self.starts.T, self.stops.T, strict=True):  # faster than whole rows
            full &= start < stop
        return full

    @property
    def volumes(self) -> Ints:
        """Elements per box, (n,); right where a box has fewer than 2**63."""
        volumes: Ints = np.prod(self.shapes, axis=1, dtype=np.int64)
        return volumes

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.intp] | NDArray[np.bool_]) -> Boxes: ...
    def __getitem__(self, index: int | slice | NDArray[np.intp] | NDArray[np.bool_]) -> Box | Boxes:
        starts, stops = self.starts[index], self.stops[index]
        if starts.ndim == 1:
            return Box._trusted(tuple(starts.tolist()), tuple(stops.tolist()))
        starts.setflags(write=False)  # picked rows are a new array, which need not be copied
        stops.setflags(write=False)
        return Boxes(starts, stops)

    def __iter__(self) -> Iterator[Box]:
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield Box._trusted(tuple(start), tuple(stop))

    def __reduce__(self) -> tuple[Any, ...]:
        return Boxes, (self.starts, self.stops)  # numpy forgets that an array is read-only
