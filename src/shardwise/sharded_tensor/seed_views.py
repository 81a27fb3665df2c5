"""The seed's view of a state: metadata and shards, made anew for whoever asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import placement_at
from shardwise.sharded_tensor.shard import Shard

if TYPE_CHECKING:
    from shardwise.sharded_tensor.state import State

__all__ = ["local_shards_of", "metadata_of", "unwrapped"]


def metadata_of(state: State) -> ShardedTensorMetadata:
    """Offsets, sizes and placements of all shards, in the spec's own order."""
    properties = TensorProperties(
        dtype=state.dtype,
        requires_grad=state.requires_grad,
        pin_memory=bool(state.shards) and state.shards[0].is_pinned(),
    )
    return state.sharding_spec().build_metadata(torch.Size(state.layout.shape), properties)


def local_shards_of(state: State) -> list[Shard]:
    """This rank's pieces, in the layout's order."""
    return [
        Shard(tensor, ShardMetadata(box.start, box.shape, placement_at(rank, tensor.device)))
        for rank, box, tensor in zip(state.owners, state.boxes, unwrapped(state), strict=True)
    ]


def unwrapped(state: State) -> tuple[torch.Tensor, ...]:
    """The local tensors; those of a pending sum are detached."""
    if state.layout.pending is None:
        return state.shards
    return tuple(shard.detach() for shard in state.shards)
