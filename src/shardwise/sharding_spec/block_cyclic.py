"""Blocks of one dim, dealt out in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import whole_number
from shardwise.errors import SpecError
from shardwise.geometry.splits import block_cuts
from shardwise.placement import Placement, PlacementLike, parse_placements
from shardwise.sharding_spec.along import boxes_along
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces, check_dim, dim_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BlockCyclicShardingSpec"]

_MOST_BLOCKS = 10_000_000  # a slip of the pen should not fill the memory


@dataclass(frozen=True)
class BlockCyclicShardingSpec(BuiltinSpec):
    """Cut `dim` into blocks of length `block` and deal them out in turn, as ScaLAPACK does.

    The last block may be shorter; placements that get no block hold nothing.

    >>> spec = BlockCyclicShardingSpec(0, 2, ["rank:0/cpu", "rank:1/cpu"])
    >>> [str(box) for box in spec.layout((7,)).boxes_of(0)]
    ['[0:2]', '[4:6]']
    """

    dim: int
    block: int
    placements: list[Placement]

    def __init__(self, dim: int, block: int, placements: Iterable[PlacementLike]) -> None:
        name = type(self).__name__
        object.__setattr__(self, "dim", check_dim(dim, name))
        object.__setattr__(self, "block", whole_number(block, f"{name}.block", least=1))
        object.__setattr__(self, "placements", parse_placements(placements, name))

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        sizes = tuple(shape)
        dim = dim_of(self.dim, sizes, type(self).__name__)
        if (num_blocks := -(-sizes[dim] // self.block)) > _MOST_BLOCKS:
            raise SpecError(
                "BlockCyclicShardingSpec",
                expected=f"at most {_MOST_BLOCKS:,} blocks",
                got=f"{num_blocks:,} of dim {dim} of {sizes}",
                fix="Take a larger block.",
            )
        cuts = block_cuts(sizes[dim], self.block)
        owners = np.arange(len(cuts) - 1) % len(self.placements)
        return Pieces(boxes_along(sizes, dim, cuts[:-1], cuts[1:]), owners, self.placements)
