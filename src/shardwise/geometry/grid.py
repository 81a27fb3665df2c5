"""Grid: the factored form of a layout whose boxes are products of cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry.box import Ints, frozen_ints

__all__ = ["Grid", "grid_cuts"]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The factored form of a layout: cuts per dim and owners per cell; empty cells are left out.

    Cell `(i, j)` is `[cuts[0][i], cuts[0][i + 1]) x [cuts[1][j], cuts[1][j + 1])`. A cell with
    fewer owners than the one with the most is filled up with -1.
    """

    cuts: tuple[Ints, ...]  # per dim, (cells + 1,)
    owners: Ints  # (cells of dim 0, ..., owners per cell): ranks
    rows: Ints  # same shape: rows of the layout's arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.cuts, self.owners, self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells per dim."""
        return tuple(len(cuts) - 1 for cuts in self.cuts)


def _restore(cuts: tuple[Ints, ...], owners: Ints, rows: Ints) -> Grid:
    return Grid(tuple(map(frozen_ints, cuts)), frozen_ints(owners), frozen_ints(rows))


def grid_cuts(starts: Ints, shape: tuple[int, ...]) -> list[Ints] | None:
    """Cuts per dim if boxes that start here, (n, ndim), in order, are a grid; they tile `shape`."""
    if not len(starts):
        return None
    cuts = []
    band = len(starts)  # the first boxes, alike in all dims before this one
    for dim, size in enumerate(shape):
        column = starts[:band, dim]
        steps = np.flatnonzero(column[1:] != column[:-1]) + 1
        cuts.append(np.concatenate([column[:1], column[steps], [size]]))
        band = int(steps[0]) if len(steps) else band
    cells = [len(along) - 1 for along in cuts]
    if math.prod(cells) != len(starts):
        return None
    # Where every cell of a grid has one start, no box reaches into another cell: its start would
    # be covered twice. So the boxes are the cells.
    lows = np.ix_(*(along[:-1] for along in cuts))
    columns = (column.reshape(cells) for column in starts.T)
    is_grid = all((a == b).all() for a, b in zip(columns, lows, strict=True))
    return cuts if is_grid else None
