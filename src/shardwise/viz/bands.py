"""Scale: how many terminal cells, or pixels, each stretch of a dim gets.

A *band* is a run of coordinates along one dim that is drawn alike: the piece between two
neighbouring cuts or, where there are more pieces than cells, one sampled coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints

__all__ = ["Bands", "column_bands", "pixel_bands", "row_bands", "scaled_cells"]


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """The bands of one dim, in order."""

    points: Ints  # (n,): a coordinate in each
    cells: Ints  # (n,): terminal cells, or pixels, of each
    ticks: Ints  # (n + 1,): offset to write at each, and the dim's size
    ruled: bool  # a wall stands between neighbours, if different boxes meet there
    sampled: bool  # some cuts are not seen

    def __len__(self) -> int:
        return len(self.points)

    @property
    def lattice_cells(self) -> Ints:
        """Cells of wall, band, wall, ..., band, wall: (2n + 1,). The frame is always there."""
        counts = np.full(2 * len(self) + 1, int(self.ruled), dtype=np.int64)
        counts[1::2] = self.cells
        counts[[0, -1]] = 1
        return counts

    @property
    def offsets(self) -> Ints:
        """Where in the drawing each of `lattice_cells` begins."""
        counts = self.lattice_cells
        offsets: Ints = np.cumsum(counts) - counts
        return offsets


def row_bands(cuts: Ints, *, target: int, most: int) -> Bands:
    """Bands of the vertical dim: as many lines as scale and legibility need, up to `most`.

    With many pieces the walls between rows go first, which makes room for more rows.
    """
    pieces = len(cuts) - 1
    if pieces > most:
        return _sample_bands(int(cuts[-1]), most // 2)
    spare = most * 5 // 8 - (pieces + 1)
    if pieces > spare:
        return _piece_bands(cuts, total=pieces, least=1, ruled=False)
    # Two lines a piece on average, so that uneven pieces look uneven.
    wanted = max(target, 2 * pieces if pieces > 1 else 1)
    return _piece_bands(cuts, total=min(wanted, spare), least=1, ruled=True)


def column_bands(
    cuts: Ints, *, target: int, room: int, keyed_room: int, least: Sequence[int]
) -> Bands:
    """Bands of the horizontal dim in `room` cells, walls included.

    `least` are the cells that every band should have, the best choice first. If none of them
    fits there are no walls and no room for numbers, and `keyed_room` cells are taken.
    """
    pieces = len(cuts) - 1
    for cells in least:
        spare = room - (pieces + 1)
        if pieces * cells <= spare:
            wanted = max(target, pieces * (cells + 1))
            return _piece_bands(cuts, total=min(wanted, spare), least=cells, ruled=True)
    if pieces <= keyed_room - 2:
        return _piece_bands(cuts, total=keyed_room - 2, least=1, ruled=False)
    return _sample_bands(int(cuts[-1]), keyed_room - 2)


def pixel_bands(cuts: Ints, *, room: int, least: int) -> Bands:
    """Bands of a dim in `room` pixels, each of at least `least` of them."""
    if (len(cuts) - 1) * least <= room:
        return _piece_bands(cuts, total=room, least=least, ruled=False)
    samples = _sample_bands(int(cuts[-1]), max(1, room // least))
    return replace(samples, cells=least * samples.cells)


def scaled_cells(sizes: Ints, *, total: int, least: int) -> Ints:
    """Cells per size, `max(least, size * scale)`, with the largest scale that fits `total`.

    One rule for all, so equal sizes get equal cells and larger ones never fewer.

    >>> scaled_cells(np.array([1, 4, 4, 1000]), total=20, least=2).tolist()
    [2, 2, 2, 14]
    """

    def cells_at(scale: float) -> Ints:
        # The epsilon keeps an exact share (3 * (1 / 3)) from being rounded down.
        cells: Ints = np.maximum(least, np.floor(sizes * scale + 1e-9).astype(np.int64))
        return cells

    low, high = 0.0, total / float(sizes.max())
    if cells_at(high).sum() <= total:
        return cells_at(high)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if cells_at(middle).sum() <= total else (low, middle)
    return cells_at(low)


def _piece_bands(cuts: Ints, *, total: int, least: int, ruled: bool) -> Bands:
    cells = scaled_cells(np.diff(cuts), total=total, least=least)
    return Bands(cuts[:-1], cells, cuts, ruled=ruled, sampled=False)


def _sample_bands(size: int, count: int) -> Bands:
    """`count` bands of one cell, each showing the coordinate at its centre."""
    points = np.array([(2 * i + 1) * size // (2 * count) for i in range(count)], dtype=np.int64)
    ones = np.ones(count, dtype=np.int64)
    return Bands(points, ones, np.append(points, size), ruled=False, sampled=True)
