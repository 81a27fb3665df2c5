"""Shards of any layout, and their metadata, for tests that put tensors together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import rank_of
from shardwise.sharded_tensor import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise import Layout


def numbers(shape: Sequence[int]) -> torch.Tensor:
    """The full tensor of which these are shards: 1, 2, 3, ..."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(tuple(shape)) + 1


def shards_of(layout: Layout, rank: int, *, requires_grad: bool = False) -> list[Shard]:
    """A rank's shards of `numbers`, in the layout's order."""
    full = numbers(layout.shape)
    return [
        Shard.from_tensor_and_offsets(
            full[box.slices()].clone().requires_grad_(requires_grad), box.start, rank
        )
        for box in layout.boxes_of(rank)
    ]


def reversed_shards(layout: Layout, rank: int, *, requires_grad: bool = False) -> list[Shard]:
    """The same in another order, which callers may choose."""
    return shards_of(layout, rank, requires_grad=requires_grad)[::-1]


def row(rank: int, tensor: torch.Tensor | None = None, *, at: int | None = None) -> Shard:
    """Rows [2 * rank, 2 * rank + 2) of a tensor of 3 columns."""
    given = torch.zeros(2, 3) if tensor is None else tensor
    return Shard.from_tensor_and_offsets(given, [2 * rank if at is None else at, 0], rank)


def metadata_of(layout: Layout, /, **properties: Any) -> ShardedTensorMetadata:
    """All shards, not in the layout's order."""
    shards = [ShardMetadata(e.box.start, e.box.shape, f"rank:{e.rank}/cpu") for e in layout]
    return ShardedTensorMetadata(
        shards[::-1], torch.Size(layout.shape), TensorProperties(torch.float64, **properties)
    )


def entries(metadata: ShardedTensorMetadata) -> list[tuple[Any, int]]:
    """Box and rank of all shards, in one order."""
    return sorted((m.box, rank_of(m.placement)) for m in metadata.shards_metadata)
