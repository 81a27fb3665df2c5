"""One dim, cut evenly or by chosen sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry.splits import even_cuts, sized_cuts
from shardwise.placement import Placement, PlacementLike, parse_placements
from shardwise.sharding_spec.along import boxes_along, check_sizes
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces, check_dim, dim_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.geometry.box import Ints

__all__ = ["ChunkShardingSpec"]


@dataclass(frozen=True)
class ChunkShardingSpec(BuiltinSpec):
    """Cut along `dim`: evenly as torch.chunk does, or by `sizes`, one length per placement.

    Any number of placements; a rank may appear several times. Where torch.chunk would give fewer
    pieces than there are placements, the last ones are empty.

    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"], sizes=[5, 3])
    >>> spec.layout((8, 6)).boxes_of(1)
    (Box(start=(5, 0), stop=(8, 6)),)
    """

    dim: int
    placements: list[Placement]
    sizes: tuple[int, ...] | None = None

    def __init__(
        self, dim: int, placements: Iterable[PlacementLike], sizes: Sequence[int] | None = None
    ) -> None:
        name = type(self).__name__
        listed = parse_placements(placements, name)
        object.__setattr__(self, "dim", check_dim(dim, name))
        object.__setattr__(self, "placements", listed)
        lengths = None if sizes is None else check_sizes(sizes, len(listed), name)
        object.__setattr__(self, "sizes", lengths)

    def cuts(self, size: int) -> Ints:
        """Cuts of a dim of `size`."""
        if self.sizes is None:
            return even_cuts(size, len(self.placements))
        return sized_cuts(size, self.sizes)

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        sizes = tuple(shape)
        dim = dim_of(self.dim, sizes, type(self).__name__)
        cuts = self.cuts(sizes[dim])
        boxes = boxes_along(sizes, dim, cuts[:-1], cuts[1:])
        return Pieces(boxes, np.arange(len(self.placements)), self.placements)
