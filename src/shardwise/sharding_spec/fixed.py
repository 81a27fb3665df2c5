"""One layout as a spec: for tensors of one shape whose layout no recipe made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import SpecError
from shardwise.geometry.layout import Layout, check_layout
from shardwise.placement import placement_at
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["FixedShardingSpec"]


@dataclass(frozen=True)
class FixedShardingSpec(BuiltinSpec):
    """The given layout, for tensors of its shape; every shard on a `device` of its rank.

    >>> import shardwise
    >>> layout = shardwise.chunk(0, ranks=[1, 0]).layout((4, 6))
    >>> FixedShardingSpec(layout).layout((4, 6)) is layout
    True
    """

    fixed: Layout
    device: str = "cpu"

    def __init__(self, layout: Layout, device: str | torch.device = "cpu") -> None:
        check_layout(layout, "FixedShardingSpec.layout")
        object.__setattr__(self, "fixed", layout)
        object.__setattr__(self, "device", str(device))

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.fixed.shape:
            raise SpecError(
                "FixedShardingSpec",
                expected=f"a tensor of its layout's shape {self.fixed.shape}",
                got=shape,
                fix="A layout is of one shape; pass a spec such as shardwise.chunk(0).",
            )

    def layout(self, shape: Sequence[int]) -> Layout:
        self._check_shape(tuple(shape))
        return self.fixed

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        self._check_shape(tuple(shape))
        layout = self.fixed
        return Pieces(
            layout.boxes,
            np.searchsorted(layout.ranks, layout.owners),
            [placement_at(rank, self.device) for rank in layout.ranks],
            layout.terms,
            layout.pending,
        )
