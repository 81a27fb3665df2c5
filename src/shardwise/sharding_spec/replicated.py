"""The whole tensor on every rank: as copies, or as addends of a pending reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import SpecError
from shardwise.geometry.box import Box, Boxes
from shardwise.geometry.layout import REDUCE_OPS, ReduceOp
from shardwise.placement import Placement, PlacementLike, parse_placements
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PartialShardingSpec", "ReplicatedShardingSpec", "parse_reduce_op"]


@dataclass(frozen=True)
class ReplicatedShardingSpec(BuiltinSpec):
    """A copy of the whole tensor at each placement (with one placement: the tensor, there)."""

    placements: list[Placement]

    def __init__(self, placements: Iterable[PlacementLike]) -> None:
        object.__setattr__(self, "placements", parse_placements(placements, type(self).__name__))

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        return Pieces(*_whole_at_each(shape, self.placements))


@dataclass(frozen=True)
class PartialShardingSpec(BuiltinSpec):
    """One addend of the whole tensor at each placement; the tensor is their reduction.

    With one placement nothing is pending: the layout is that of the tensor itself.
    """

    placements: list[Placement]
    reduce_op: ReduceOp = "sum"

    def __init__(self, placements: Iterable[PlacementLike], reduce_op: object = "sum") -> None:
        name = type(self).__name__
        object.__setattr__(self, "placements", parse_placements(placements, name))
        object.__setattr__(self, "reduce_op", parse_reduce_op(reduce_op, name))

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        terms = np.arange(len(self.placements))
        return Pieces(*_whole_at_each(shape, self.placements), terms, self.reduce_op)


def _whole_at_each(
    shape: Sequence[int], placements: list[Placement]
) -> tuple[Boxes, np.ndarray, list[Placement]]:
    boxes = Boxes.of([Box.whole(shape)] * len(placements), len(shape))
    return boxes, np.arange(len(placements)), placements


def parse_reduce_op(op: object, what: str) -> ReduceOp:
    """The operation by shardwise's name, from that name or a torch.distributed.ReduceOp."""
    # torch's ReduceOp.SUM prints as "RedOpType.SUM"; an instance ReduceOp(SUM) has it as `op`.
    name = op if isinstance(op, str) else str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
    for known in REDUCE_OPS:
        if name == known:
            return known
    raise SpecError(f"{what}: reduce_op", expected=f"one of {REDUCE_OPS}", got=repr(op))
