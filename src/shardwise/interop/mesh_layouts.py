"""What a mesh and placements mean for boxes: pure functions of layouts.

DTensor has one local tensor per rank. Where a strided shard gives a rank several boxes, the local
tensor has them side by side, in the order of the global tensor.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shardwise._torch_compat import mesh_placement_types
from shardwise.sharding_spec.mesh import MeshShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardwise.geometry import Box, Layout

__all__ = ["find_placements", "have_same_data", "local_shape", "regions_in_local"]

Region = tuple[slice, ...]


def regions_in_local(boxes: Sequence[Box]) -> list[Region]:
    """Where each box of a rank lies in its one local tensor.

    The boxes are all combinations of some pieces per dim, as a mesh cuts them.
    """
    starts = [_starts(pieces) for pieces in _pieces(boxes)]
    return [
        tuple(
            slice(along[low], along[low] + high - low)
            for along, low, high in zip(starts, box.start, box.stop, strict=True)
        )
        for box in boxes
    ]


def local_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the local tensor that has all boxes of a rank."""
    return tuple(sum(high - low for low, high in pieces) for pieces in _pieces(boxes))


def _pieces(boxes: Sequence[Box]) -> list[list[tuple[int, int]]]:
    """Per dim the pieces that the boxes have of it, ascending."""
    dims = range(boxes[0].ndim)
    return [sorted({(box.start[dim], box.stop[dim]) for box in boxes}) for dim in dims]


def _starts(pieces: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Start of each piece in the global dim -> its start where they lie end to end."""
    sizes = [high - low for low, high in pieces]
    return {
        low: before
        for (low, _), before in zip(pieces, itertools.accumulate(sizes, initial=0), strict=False)
    }


def have_same_data(one: Layout, other: Layout) -> bool:
    """Whether every rank holds the same elements in the same boxes.

    What boxes without elements there are, and how addends are numbered, makes no difference.
    """
    if one == other:
        return True
    if one.shape != other.shape or one.pending != other.pending:
        return False
    return _holders(one) == _holders(other)


def _holders(layout: Layout) -> dict[Box, list[list[int]]]:
    """The ranks of each term of each box that has elements."""
    found: defaultdict[Box, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for box, rank, term in layout:
        if not box.is_empty:
            found[box][term].append(rank)
    return {box: sorted(sorted(ranks) for ranks in terms.values()) for box, terms in found.items()}


def find_placements(layout: Layout, mesh: NDArray[np.int64]) -> tuple[Any, ...] | None:
    """Shard, Replicate and Partial, one per axis of the mesh, that give the layout; or None.

    Where several do, say on an axis with one rank, it is the one with the fewest cuts.
    """
    known = mesh_placement_types()
    choices = [known.replicate(), *(known.shard(dim) for dim in range(layout.ndim))]
    if layout.pending is not None:
        choices.append(known.partial(layout.pending))
    if set(layout.ranks) - set(mesh.ravel().tolist()):
        return None
    for placements in itertools.product(choices, repeat=mesh.ndim):
        found = MeshShardingSpec(mesh, placements).layout(layout.shape)
        if have_same_data(found, layout):
            return placements
    return None
