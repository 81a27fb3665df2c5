"""Sections side by side in one dim, each cut on its own: fused QKV, gate and up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import is_whole_number, items, whole_number
from shardwise.errors import SpecError
from shardwise.geometry.splits import even_cuts, sized_cuts
from shardwise.placement import Placement, PlacementLike, parse_placements
from shardwise.sharding_spec.along import boxes_along, check_sizes
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces, check_dim, dim_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FusedShardingSpec"]


@dataclass(frozen=True)
class FusedShardingSpec(BuiltinSpec):
    """Cut every section of `dim` over all placements, so each holds one box per section.

    A section is its length (cut evenly, as torch.chunk does) or a list of lengths, one per
    placement.

    >>> spec = FusedShardingSpec(0, [4, 2, 2], ["rank:0/cpu", "rank:1/cpu"])  # Q, K, V
    >>> [str(box) for box in spec.layout((8, 3)).boxes_of(0)]
    ['[0:2, 0:3]', '[4:5, 0:3]', '[6:7, 0:3]']
    """

    dim: int
    sections: tuple[int | tuple[int, ...], ...]
    placements: list[Placement]

    def __init__(
        self,
        dim: int,
        sections: Iterable[int | Sequence[int]],
        placements: Iterable[PlacementLike],
    ) -> None:
        name = type(self).__name__
        listed = parse_placements(placements, name)
        lengths = items(sections, f"{name}.sections", of="lengths such as [8, 4, 4]")
        parsed = tuple(_parse_section(length, len(listed)) for length in lengths)
        if not parsed:
            raise SpecError(f"{name}.sections", expected="at least one length", got="none")
        object.__setattr__(self, "dim", check_dim(dim, name))
        object.__setattr__(self, "sections", parsed)
        object.__setattr__(self, "placements", listed)

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        sizes = tuple(shape)
        dim = dim_of(self.dim, sizes, type(self).__name__)
        lengths = [s if isinstance(s, int) else sum(s) for s in self.sections]
        if sum(lengths) != sizes[dim]:
            raise SpecError(
                "FusedShardingSpec.sections",
                expected=f"lengths that add up to {sizes[dim]}, the size of dim {dim} of {sizes}",
                got=f"{lengths}, together {sum(lengths)}",
            )
        offsets = sized_cuts(sizes[dim], lengths)[:-1]
        cuts = np.stack(  # (sections, placements + 1)
            [
                offset
                + (
                    even_cuts(s, len(self.placements))
                    if isinstance(s, int)
                    else sized_cuts(sum(s), s)
                )
                for offset, s in zip(offsets, self.sections, strict=True)
            ]
        )
        boxes = boxes_along(sizes, dim, cuts[:, :-1].ravel(), cuts[:, 1:].ravel())
        owners = np.tile(np.arange(len(self.placements)), len(self.sections))
        return Pieces(boxes, owners, self.placements)


def _parse_section(section: object, parts: int) -> int | tuple[int, ...]:
    if is_whole_number(section):
        return whole_number(section, "FusedShardingSpec.sections")
    return check_sizes(section, parts, "FusedShardingSpec.sections")
