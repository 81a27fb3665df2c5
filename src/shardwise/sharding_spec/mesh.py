"""DTensor's way to say a layout: a mesh of ranks and a placement per mesh axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise._torch_compat import mesh_placement_types
from shardwise.arguments import items
from shardwise.errors import ArgumentTypeError, SpecError
from shardwise.geometry.box import Boxes, Ints
from shardwise.geometry.splits import even_cuts, even_piece, product_boxes
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
        axes_of = self._axes_by_dim(sizes)
        coordinates = np.stack(
            np.unravel_index(np.arange(len(self.ranks)), self.mesh_shape), axis=1
        )

        @cache  # ranks that differ only along other axes hold the same part of this dim
        def part(dim: int, at: tuple[int, ...]) -> tuple[Ints, Ints]:
            intervals = self._part_of_dim(sizes[dim], axes_of[dim], at)
            ends = np.array(intervals, dtype=np.int64).reshape(-1, 2)
            return ends[:, 0], ends[:, 1]

        boxes = [
            product_boxes([part(d, tuple(at[axes_of[d]].tolist())) for d in range(len(sizes))])
            for at in coordinates
        ]
        owners = np.repeat(np.arange(len(boxes)), [len(starts) for starts, _ in boxes])
        pending = self._pending()
        return Pieces(
            Boxes(np.concatenate([a for a, _ in boxes]), np.concatenate([b for _, b in boxes])),
            owners,
            [placement_at(rank, self.device) for rank in self.ranks],
            None if pending is None else self._terms(coordinates)[owners],
            pending,
        )

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
