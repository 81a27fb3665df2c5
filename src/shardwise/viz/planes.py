"""What a picture shows: the distinct boxes of a layout, and its 2-D planes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints

__all__ = ["Plane", "Regions", "iter_planes", "num_planes"]


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The distinct boxes with elements of a layout; replicas and addends are one region."""

    layout: Layout
    starts: Ints  # (n, ndim)
    stops: Ints  # (n, ndim)
    rows: Ints  # rows of the layout's arrays, grouped by region
    first: Ints  # (n + 1,): region i has rows[first[i]:first[i + 1]]

    @classmethod
    def of(cls, layout: Layout) -> Regions:
        """The boxes with elements of a layout, and who holds each."""
        rows = np.flatnonzero(layout.boxes.volumes)
        starts, stops = layout.boxes.starts[rows], layout.boxes.stops[rows]
        # A layout's entries are sorted by box and distinct boxes share no start.
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (starts[1:] != starts[:-1]).any(axis=1)
        first = np.append(np.flatnonzero(new), len(rows))
        return cls(layout, starts[new], stops[new], rows, first)

    def __len__(self) -> int:
        return len(self.starts)

    def cuts(self, dim: int) -> Ints:
        """Distinct offsets at which a region starts or stops, ascending."""
        return _cuts(self.starts[:, dim], self.layout.shape[dim])

    def ranks_by_term(self, region: int) -> list[list[int]]:
        """Ranks that hold a region, ascending, for each of its terms."""
        rows = self.rows[self.first[region] : self.first[region + 1]]
        ranks = self.layout.owners[rows].tolist()
        if self.layout.terms is None:
            return [ranks]
        by_term: dict[int, list[int]] = {}
        for rank, term in zip(ranks, self.layout.terms[rows].tolist(), strict=True):
            by_term.setdefault(term, []).append(rank)
        return [by_term[term] for term in sorted(by_term)]

    def ranks_of(self, region: int, most: int) -> list[int]:
        """The first `most` ranks that hold a region, ascending."""
        rows = self.rows[self.first[region] : self.first[region + 1]]
        ranks: list[int] = np.unique(self.layout.owners[rows])[:most].tolist()
        return ranks


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """Regions cut through by one 2-D plane: the last two dims at one place of the others.

    A tensor of fewer dims is seen as one row of cells.
    """

    regions: Regions
    picked: Ints  # (n,): which regions
    starts: Ints  # (n, 2)
    stops: Ints  # (n, 2)
    name: str | None  # its index expression, absent when the plane is the whole tensor

    def __len__(self) -> int:
        return len(self.picked)

    @property
    def ndim(self) -> int:
        """Dims of the tensor that run along the plane: 0, 1 or 2."""
        return min(self.regions.layout.ndim, 2)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the tensor."""
        rows, columns = (1, 1, *self.regions.layout.shape)[-2:]
        return rows, columns

    def cuts(self, dim: int) -> Ints:
        """Distinct offsets at which a region starts or stops, ascending."""
        return _cuts(self.starts[:, dim], self.shape[dim])

    def meeting(self, points: Ints, dim: int) -> Plane:
        """Only the regions that contain one of the ascending coordinates `points` of `dim`."""
        first = np.searchsorted(points, self.starts[:, dim])
        keep = np.searchsorted(points, self.stops[:, dim]) > first
        return Plane(
            self.regions, self.picked[keep], self.starts[keep], self.stops[keep], self.name
        )

    def spans(self, row_points: Ints, column_points: Ints) -> tuple[Ints, Ints]:
        """Points `[first, last)` that each region contains, (n, 2) each; none if between them."""
        points = (row_points, column_points)
        first = [np.searchsorted(at, self.starts[:, dim]) for dim, at in enumerate(points)]
        last = [np.searchsorted(at, self.stops[:, dim]) for dim, at in enumerate(points)]
        return np.stack(first, axis=1), np.stack(last, axis=1)


def num_planes(regions: Regions) -> int:
    """Planes that differ: one for each slab between neighbouring cuts of the leading dims."""
    count = 1
    for dim in range(regions.layout.ndim - 2):
        count *= len(regions.cuts(dim)) - 1
    return count


def iter_planes(regions: Regions) -> Iterator[Plane]:
    """The planes of `num_planes`, in row-major order."""
    leading = max(regions.layout.ndim - 2, 0)
    cuts = [regions.cuts(dim).tolist() for dim in range(leading)]
    for slab in itertools.product(*map(itertools.pairwise, cuts)):
        low = np.array([start for start, _ in slab], dtype=np.int64)
        inside = (regions.starts[:, :leading] <= low) & (low < regions.stops[:, :leading])
        picked = np.flatnonzero(inside.all(axis=1))
        index = ", ".join([*(f"{start}:{stop}" for start, stop in slab), ":", ":"])
        yield Plane(
            regions,
            picked,
            _last_two(regions.starts[picked], fill=0),
            _last_two(regions.stops[picked], fill=1),
            f"[{index}]" if leading else None,
        )


def _cuts(starts: Ints, size: int) -> Ints:
    """Distinct starts and the size; in a tiling every other stop is a start too."""
    lows = np.sort(starts)  # np.unique hashes, which is many times slower for distinct values
    return np.append(lows[np.diff(lows, prepend=-1) > 0], np.int64(size))


def _last_two(corners: Ints, *, fill: int) -> Ints:
    """The last two columns, with columns of `fill` put before where there are fewer."""
    pad = np.full((len(corners), max(2 - corners.shape[1], 0)), fill, dtype=np.int64)
    return np.hstack([pad, corners])[:, -2:]
