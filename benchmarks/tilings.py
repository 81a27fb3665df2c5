"""Sets of boxes to measure with: tilings of several kinds, and tilings with one fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Boxes
from shardwise.geometry.splits import product_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints


@dataclass(frozen=True, slots=True)
class Tiling:
    """Boxes, and the shape that they are meant to tile."""

    shape: tuple[int, ...]
    boxes: Boxes

    def shuffled(self, *, seed: int = 0) -> Tiling:
        """The same boxes in random order."""
        order = np.random.default_rng(seed).permutation(len(self.boxes))
        return Tiling(self.shape, self.boxes[order])

    def starting_with(self, box: int) -> Tiling:
        """The same boxes with this one first."""
        order = np.arange(len(self.boxes))
        order[[0, box]] = box, 0
        return Tiling(self.shape, self.boxes[order])

    def with_gap(self) -> Tiling:
        """All boxes but the one in the middle of the list."""
        keep = np.arange(len(self.boxes)) != len(self.boxes) // 2
        return Tiling(self.shape, self.boxes[keep])

    def with_overlap(self) -> Tiling:
        """One box, near the middle of the list, longer by one along the first dim."""
        stops = self.boxes.stops.copy()
        inner = np.flatnonzero(stops[:, 0] < self.shape[0])
        stops[inner[len(inner) // 2], 0] += 1
        return Tiling(self.shape, Boxes(self.boxes.starts, stops))


def grid(shape: Sequence[int], parts: Sequence[int]) -> Tiling:
    """Grid of `parts` nearly equal pieces per dim, row-major; none is empty."""
    intervals = []
    for size, pieces in zip(shape, parts, strict=True):
        cuts: Ints = np.arange(pieces + 1, dtype=np.int64) * size // pieces
        intervals.append((cuts[:-1], cuts[1:]))
    return Tiling(tuple(shape), Boxes(*product_boxes(intervals)))


def near_square(num_boxes: int) -> tuple[int, int]:
    """The two factors of `num_boxes` that are nearest to each other, the smaller first."""
    smaller = next(k for k in range(int(num_boxes**0.5), 0, -1) if num_boxes % k == 0)
    return smaller, num_boxes // smaller


def half_rows_half_columns(shape: tuple[int, int], num_boxes: int) -> Tiling:
    """Long thin boxes: rows fill the upper half, columns the lower half."""
    upper = shape[0] // 2
    rows = grid((upper, shape[1]), (num_boxes // 2, 1)).boxes
    columns = grid((shape[0] - upper, shape[1]), (1, num_boxes - num_boxes // 2)).boxes
    below = np.array([upper, 0])
    return Tiling(
        shape,
        Boxes(
            np.concatenate([rows.starts, columns.starts + below]),
            np.concatenate([rows.stops, columns.stops + below]),
        ),
    )


def guillotine(shape: Sequence[int], num_boxes: int, *, seed: int = 0) -> Tiling:
    """Irregular tiling by random straight cuts through single boxes.

    All cuts of a level are made together; a level cuts a random half of the boxes, so sizes and
    depths differ widely. `shape` must have room for the boxes, or this does not end.
    """
    rng = np.random.default_rng(seed)
    starts, stops = np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)
    while len(starts) < num_boxes:
        dim = rng.integers(len(shape), size=len(starts))
        able = np.flatnonzero((stops - starts)[np.arange(len(starts)), dim] > 1)
        chosen = rng.permutation(able)[: min(num_boxes - len(starts), -(-len(able) // 2))]
        along = dim[chosen]
        at = rng.integers(starts[chosen, along] + 1, stops[chosen, along])
        upper_starts, upper_stops = starts[chosen], stops[chosen]
        upper_starts[np.arange(len(chosen)), along] = at
        stops[chosen, along] = at
        starts = np.concatenate([starts, upper_starts])
        stops = np.concatenate([stops, upper_stops])
    return Tiling(tuple(shape), Boxes(starts, stops))
