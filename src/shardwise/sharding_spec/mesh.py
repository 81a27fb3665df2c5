"""DTensor's way to say a layout: a mesh of ranks and a placement per mesh axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise._torch_compat import mesh_placement_types
from shardwise.arguments import items
from shardwise.errors import ArgumentTypeError, SpecError
from shardwise.geometry.box import Boxes, Ints
from shardwise.geometry.splits import even_cuts, even_piece
from shardwise.placement import placement_at
from shardwise.sharding_spec.replicated import parse_reduce_op
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces, dim_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.geometry.layout import ReduceOp

__all__ = ["MeshShardingSpec"]

Intervals = tuple[tuple[int, int], ...]  # ascending, disjoint pieces of one dim


@dataclass(frozen=True)
class MeshShardingSpec(BuiltinSpec):
    """Shard, Replicate or Partial per axis of a mesh: the local shapes and offsets of DTensor.

    `mesh` is a DeviceMesh, or an array of ranks with a `device` beside it. Axes are applied from
    left to right, so several on one dim cut the pieces again. FSDP2's strided shards are taken
    too; there a rank holds several boxes.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> spec = MeshShardingSpec([[0, 1], [2, 3]], [Shard(0), Replicate()])
    >>> spec.layout((4, 6)).replicas_of(spec.layout((4, 6)).boxes_of(2)[0])
    (2, 3)
    """

    ranks: tuple[int, ...]  # of the mesh, row-major
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]  # DTensor's, one per axis
    device: str

    def __init__(
        self, mesh: DeviceMesh | ArrayLike, placements: Sequence[Any], device: str | None = None
    ) -> None:
        ranks = _mesh_ranks(mesh)
        listed = items(
            placements,
            "MeshShardingSpec.placements",
            of="DTensor's placements, such as [Shard(0), Replicate()]",
        )
        if len(listed) != ranks.ndim:
            raise SpecError(
                "MeshShardingSpec.placements",
                expected=f"{ranks.ndim}, one per axis of a mesh of shape {ranks.shape}",
                got=f"{len(listed)}: {listed}",
            )
        object.__setattr__(self, "ranks", tuple(ranks.ravel().tolist()))
        object.__setattr__(self, "mesh_shape", ranks.shape)
        object.__setattr__(self, "placements", tuple(listed))
        kind = device if device is not None else getattr(mesh, "device_type", "cpu")
        object.__setattr__(self, "device", str(kind))
        self._pending()

    def _pending(self) -> ReduceOp | None:
        """The one pending operation of all Partial axes; checks every placement's type."""
        known = mesh_placement_types()
        ops: list[ReduceOp] = []
        for axis, placement in enumerate(self.placements):
            kind = type(placement)
            if kind not in known:
                raise SpecError(
                    f"MeshShardingSpec.placements[{axis}]",
                    expected="Shard, Replicate or Partial of torch.distributed.tensor",
                    got=repr(placement),
                )
            if kind is known.partial:
                ops.append(parse_reduce_op(placement.reduce_op, "MeshShardingSpec"))
        if len(set(ops)) > 1:
            raise SpecError(
                "MeshShardingSpec.placements",
                expected="one pending operation at a time",
                got=" and ".join(dict.fromkeys(ops)),
                fix="Reduce one of them first.",
            )
        return ops[0] if ops else None

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        sizes = tuple(shape)
        owners = np.arange(len(self.ranks))
        coordinates = np.stack(np.unravel_index(owners, self.mesh_shape), axis=1)  # (ranks, axes)
        columns: list[Ints] = []  # a dim each: starts and stops of the pieces so far, (pieces, 2)
        for size, axes in zip(sizes, self._axes_by_dim(sizes), strict=True):
            ends, first, count = self._parts(size, axes, coordinates)
            repeats = count[owners]
            row = np.repeat(np.arange(len(owners)), repeats)  # each piece once per part of this dim
            part = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            owners = owners[row]
            columns = [*(column[row] for column in columns), ends[first[owners] + part]]
        corners = np.stack(columns, axis=1) if columns else np.zeros((len(owners), 0, 2), np.int64)
        pending = self._pending()
        return Pieces(
            Boxes(corners[:, :, 0], corners[:, :, 1]),
            owners,
            [placement_at(rank, self.device) for rank in self.ranks],
            None if pending is None else self._terms(coordinates)[owners],
            pending,
        )

    def _parts(self, size: int, axes: list[int], coordinates: Ints) -> tuple[Ints, Ints, Ints]:
        """Parts of a dim, (parts, 2), and each rank's first one and how many it has, (ranks,).

        Ranks that differ only along other axes share their parts.
        """
        shape = [self.mesh_shape[axis] for axis in axes]
        which = np.zeros(len(coordinates), np.int64)
        for axis, length in zip(axes, shape, strict=True):
            which = which * length + coordinates[:, axis]
        parts = [self._part_of_dim(size, axes, at) for at in np.ndindex(*shape)]
        count = np.array([len(intervals) for intervals in parts])
        ends = np.array([ends for intervals in parts for ends in intervals], dtype=np.int64)
        return ends, (np.cumsum(count) - count)[which], count[which]

    def _axes_by_dim(self, shape: tuple[int, ...]) -> list[list[int]]:
        """Mesh axes that cut each dim, left to right."""
        known = mesh_placement_types()
        axes: list[list[int]] = [[] for _ in shape]
        for axis, placement in enumerate(self.placements):
            if type(placement) in (known.shard, known.strided_shard):
                axes[dim_of(placement.dim, shape, f"MeshShardingSpec axis {axis}")].append(axis)
        return axes

    def _part_of_dim(self, size: int, axes: list[int], at: tuple[int, ...]) -> Intervals:
        """What is left of a dim after each axis took its part; `at`: a coordinate per axis."""
        left: Intervals = ((0, size),)
        for axis, index in zip(axes, at, strict=True):
            local = sum(b - a for a, b in left)
            sections = getattr(self.placements[axis], "split_factor", 1)
            starts = even_cuts(local, sections).tolist()
            taken: list[tuple[int, int]] = []
            for low, high in itertools.pairwise(starts):
                first, last = even_piece(high - low, self.mesh_shape[axis], index)
                taken += _select(left, low + first, low + last)
            # DTensor puts a piece without elements at the end of the dim.
            left = _joined(taken) or ((size, size),)
        return left

    def _terms(self, coordinates: Ints) -> Ints:
        """Term per rank: ranks that differ along Partial axes hold different addends."""
        partial = mesh_placement_types().partial
        terms = np.zeros(len(coordinates), np.int64)
        for axis, placement in enumerate(self.placements):
            if type(placement) is partial:
                terms = terms * self.mesh_shape[axis] + coordinates[:, axis]
        return terms


def _mesh_ranks(mesh: DeviceMesh | ArrayLike) -> Ints:
    """Ranks of a mesh as an array with one dim per axis."""
    try:
        ranks = np.asarray(getattr(mesh, "mesh", mesh))
    except ValueError:  # rows of different lengths
        ranks = np.empty(0)
    if ranks.dtype.kind not in "iu" or ranks.ndim == 0 or ranks.size == 0 or (ranks < 0).any():
        raise ArgumentTypeError(
            "MeshShardingSpec.mesh",
            expected="a DeviceMesh or an array of ranks",
            got=repr(mesh),
            fix="E.g. [[0, 1], [2, 3]].",
        )
    if len(np.unique(ranks)) != ranks.size:
        raise SpecError("MeshShardingSpec.mesh", expected="each rank once", got=ranks.tolist())
    return ranks.astype(np.int64)


def _select(intervals: Intervals, low: int, high: int) -> list[tuple[int, int]]:
    """Elements `[low, high)` of the intervals laid end to end."""
    selected, position = [], 0
    for a, b in intervals:
        first, last = max(low - position, 0), min(high - position, b - a)
        if first < last:
            selected.append((a + first, a + last))
        position += b - a
    return selected


def _joined(intervals: list[tuple[int, int]]) -> Intervals:
    """The same elements with touching neighbours made one."""
    joined: list[tuple[int, int]] = []
    for a, b in intervals:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)
