"""Ragged ranges of the flattened tensor, as FSDP and RaggedShard cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry.box import Boxes
from shardwise.geometry.splits import even_cuts, flat_range_boxes, sized_cuts
from shardwise.placement import Placement, PlacementLike, parse_placements
from shardwise.sharding_spec.along import check_sizes
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FlatShardingSpec"]


@dataclass(frozen=True)
class FlatShardingSpec(BuiltinSpec):
    """Cut the row-major order of all elements: evenly, or by `sizes`, one count per placement.

    A range of a d-dim tensor is at most 2d - 1 boxes; a placement with no elements holds none.

    >>> spec = FlatShardingSpec(["rank:0/cpu", "rank:1/cpu"], sizes=[7, 5])
    >>> [str(box) for box in spec.layout((3, 4)).boxes_of(0)]
    ['[0:1, 0:4]', '[1:2, 0:3]']
    """

    placements: list[Placement]
    sizes: tuple[int, ...] | None = None

    def __init__(
        self, placements: Iterable[PlacementLike], sizes: Sequence[int] | None = None
    ) -> None:
        name = type(self).__name__
        listed = parse_placements(placements, name)
        object.__setattr__(self, "placements", listed)
        lengths = None if sizes is None else check_sizes(sizes, len(listed), name)
        object.__setattr__(self, "sizes", lengths)

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        numel = math.prod(shape)
        cuts = (
            even_cuts(numel, len(self.placements))
            if self.sizes is None
            else sized_cuts(numel, self.sizes)
        ).tolist()
        ranges = [flat_range_boxes(shape, a, b) for a, b in itertools.pairwise(cuts)]
        owners = np.repeat(np.arange(len(ranges)), [len(boxes) for boxes in ranges])
        boxes = Boxes.of([box for boxes in ranges for box in boxes], len(shape))
        return Pieces(boxes, owners, self.placements)
