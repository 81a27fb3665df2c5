"""Who reads what: each byte of a tensor once over all ranks, as a pure function of its layout.

[Note: sharing] What one rank needs, it reads itself. A box that several ranks hold is a row of
elements, of which each of them reads a range into its own memory and gets the others' from them.
Small boxes are read by one rank, in turn. Of a pending reduction the entries of the lowest term
get the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Box, Layout
from shardwise.geometry.splits import even_cuts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.geometry.box import Ints

__all__ = ["Lot", "Range", "filled_rows", "lots", "shard_of_box", "single_rows"]

_LEAST = 1 << 16  # bytes that a rank reads of a box, if others could
_MOST_KNOWN = 1024  # answers that are kept: many tensors have one layout
_MOST_READERS = 64  # of a box: each of them sends to all other owners


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `[start, stop)` of a box in row-major order; `reader` reads them for `owners`."""

    row: int  # of the layout: the box's first entry
    start: int
    stop: int
    owners: tuple[int, ...]
    reader: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Lot:
    """Ranges of one tensor that are read and passed on together, one after the other."""

    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Elements of all ranges."""
        return sum(one.size for one in self.ranges)

    def layouts(self) -> tuple[Layout, Layout]:
        """The elements in a row, on the ranks that read them and on those that wait for them."""
        stops = np.cumsum([one.size for one in self.ranges]).tolist()
        boxes = [
            Box((stop - one.size,), (stop,)) for stop, one in zip(stops, self.ranges, strict=True)
        ]
        waiting = [
            (box, rank)
            for box, one in zip(boxes, self.ranges, strict=True)
            for rank in one.owners
            if rank != one.reader
        ]
        return (
            Layout((self.size,), boxes, [one.reader for one in self.ranges]),
            Layout((self.size,), [box for box, _ in waiting], [rank for _, rank in waiting]),
        )


def filled_rows(layout: Layout) -> Ints:
    """The entries that get values: all, or of a pending reduction those of each lowest term."""
    rows = np.flatnonzero(layout.boxes.is_full)
    if layout.terms is None:
        return rows
    box = np.repeat(np.arange(len(layout.box_rows) - 1), np.diff(layout.box_rows))
    lowest = np.minimum.reduceat(layout.terms, layout.box_rows[:-1])
    filled: Ints = rows[layout.terms[rows] == lowest[box[rows]]]
    return filled


def _by_box(layout: Layout) -> Iterator[Ints]:
    """The entries that get values, box by box."""
    rows = filled_rows(layout)
    box = np.searchsorted(layout.box_rows, rows, side="right")
    yield from np.split(rows, np.flatnonzero(box[1:] != box[:-1]) + 1)


@lru_cache(maxsize=_MOST_KNOWN)
def single_rows(layout: Layout, rank: int) -> tuple[int, ...]:
    """The entries of a rank that get values and that nobody else holds."""
    if layout.has_every_box_once:
        rows = layout.rows_of(rank)
        return tuple(rows[layout.boxes.is_full[rows]].tolist())
    return tuple(
        int(rows[0])
        for rows in _by_box(layout)
        if len(rows) == 1 and int(layout.owners[rows[0]]) == rank
    )


@lru_cache(maxsize=_MOST_KNOWN)
def shard_of_box(layout: Layout, rank: int) -> dict[int, int]:
    """Which local shard of a rank is the box whose first entry that gets values is the key."""
    shards = {row: number for number, row in enumerate(layout.rows_of(rank).tolist())}
    return {
        int(rows[0]): shards[row]
        for rows in _by_box(layout)
        for row in rows.tolist()
        if row in shards
    }


def lots(
    layout: Layout, itemsize: int, *, turn: int = 0, max_bytes: int | None = None
) -> tuple[Lot, ...]:
    """The boxes that several ranks hold, in ranges; a lot has at most `max_bytes`.

    `turn` is the number of the tensor, by which ranks take turns to read small boxes.
    """
    return _lots(layout, itemsize, turn % _MOST_READERS, max_bytes)


@lru_cache(maxsize=_MOST_KNOWN)
def _lots(layout: Layout, itemsize: int, turn: int, max_bytes: int | None) -> tuple[Lot, ...]:
    if layout.has_every_box_once:
        return ()
    shared = [rows for rows in _by_box(layout) if len(rows) > 1]
    ranges = [one for rows in shared for one in _ranges(layout, rows, itemsize, turn)]
    if max_bytes is None:
        return (Lot(tuple(ranges)),) if ranges else ()
    most = max(max_bytes // itemsize, 1)
    found: list[list[Range]] = []
    room = 0
    for one in ranges:
        for start in range(one.start, one.stop, most):
            stop = min(start + most, one.stop)
            if stop - start > room:
                found.append([])
                room = most
            found[-1].append(Range(one.row, start, stop, one.owners, one.reader))
            room -= stop - start
    return tuple(Lot(tuple(some)) for some in found)


def _ranges(layout: Layout, rows: Ints, itemsize: int, turn: int) -> Iterator[Range]:
    owners: Sequence[int] = layout.owners[rows].tolist()
    volume = layout.boxes[int(rows[0])].volume
    count = min(max(volume * itemsize // _LEAST, 1), len(owners), _MOST_READERS)
    cuts = even_cuts(volume, count).tolist()
    for number in range(count):
        if cuts[number] < cuts[number + 1]:
            reader = owners[(number + turn) % len(owners)]
            yield Range(int(rows[0]), cuts[number], cuts[number + 1], tuple(owners), reader)
