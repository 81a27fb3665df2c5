"""Several dims cut at once: an n-D grid of cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise._torch_compat import remote_device
from shardwise.arguments import is_whole_number, items, whole_number, whole_numbers
from shardwise.errors import SpecError
from shardwise.frozen_list import FrozenList
from shardwise.geometry.box import Boxes
from shardwise.geometry.splits import even_cuts, product_boxes, sized_cuts
from shardwise.placement import Placement, PlacementLike, parse_placement, parse_placements
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GridShardingSpec"]

Split = int | tuple[int, ...]


@dataclass(frozen=True)
class GridShardingSpec(BuiltinSpec):
    """A grid of cells: per dim a number of even pieces, or the lengths of the pieces.

    `placements` has one item per cell in row-major order; an item that is itself a list places
    replicas of the cell.

    >>> spec = GridShardingSpec([2, [1, 5]], [f"rank:{r}/cpu" for r in range(4)])
    >>> spec.layout((8, 6)).boxes_of(3)
    (Box(start=(4, 1), stop=(8, 6)),)
    """

    splits: tuple[Split, ...]
    placements: list[Placement | list[Placement]]

    def __init__(
        self,
        splits: Sequence[int | Sequence[int]],
        placements: Sequence[PlacementLike | Sequence[PlacementLike]],
    ) -> None:
        per_dim = items(splits, "GridShardingSpec.splits", of="counts or sizes, one per dim")
        per_cell = items(placements, "GridShardingSpec.placements", of="placements, one per cell")
        cells = FrozenList(map(_parse_cell, per_cell))
        object.__setattr__(self, "splits", tuple(map(_parse_split, per_dim)))
        object.__setattr__(self, "placements", cells)
        shape = [s if isinstance(s, int) else len(s) for s in self.splits]
        if math.prod(shape) != len(cells):
            cells_shown = "x".join(map(str, shape)) or "0-d"
            raise SpecError(
                "GridShardingSpec.placements",
                expected=f"{math.prod(shape)}, one per cell of a {cells_shown} grid",
                got=len(cells),
                fix="Take as many ranks as cells; an item that is a list places replicas.",
            )

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        if len(self.splits) != len(shape):
            raise SpecError(
                "GridShardingSpec.splits",
                expected=f"{len(shape)} items, one per dim of {tuple(shape)}",
                got=f"{len(self.splits)}: {list(self.splits)}",
                fix="Use 1 for a dim that stays whole.",
            )
        cuts = [
            even_cuts(size, split) if isinstance(split, int) else sized_cuts(size, split)
            for size, split in zip(shape, self.splits, strict=True)
        ]
        starts, stops = product_boxes([(c[:-1], c[1:]) for c in cuts])
        copies = [cell if isinstance(cell, list) else [cell] for cell in self.placements]
        cell_of = np.repeat(np.arange(len(copies)), [len(cell) for cell in copies])
        placements = [placement for cell in copies for placement in cell]
        return Pieces(
            Boxes(starts[cell_of], stops[cell_of]), np.arange(len(placements)), placements
        )


def _parse_split(split: int | Sequence[int]) -> Split:
    if is_whole_number(split):
        return whole_number(split, "GridShardingSpec.splits", least=1)
    return whole_numbers(split, "GridShardingSpec.splits")


def _parse_cell(cell: PlacementLike | Sequence[PlacementLike]) -> Placement | FrozenList[Placement]:
    if isinstance(cell, str | torch.device | remote_device):
        return parse_placement(cell)
    return parse_placements(cell, "GridShardingSpec")
