"""The seed's checks and split arithmetic on metadata, with its strict meaning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import SpecError, TilingError
from shardwise.geometry.overlap import overlapping_pairs
from shardwise.geometry.splits import chunk_length, split_size
from shardwise.geometry.tiling import check_tiling, is_tiling
from shardwise.metadata import ShardMetadata, shard_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

__all__ = [
    "check_tensor",
    "distinct_shards",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Raises if two shards share an element. Gaps are allowed; identical boxes are not."""
    if len(shards) < 2:
        return
    boxes = shard_boxes(shards)
    # Shards that tile their bounding box, the usual case, are known not to overlap at once.
    bounds = boxes.stops.max(axis=0).tolist()
    if math.prod(bounds) < 2**63 and is_tiling(boxes, bounds):
        return
    for i, j in overlapping_pairs(boxes, limit=1):
        raise TilingError(
            f"Shards {shards[i]} and {shards[j]} overlap",
            got=f"common elements {boxes[i] & boxes[j]}",
            fix="Cut one of them shorter; for copies of one box pass replicas=True to the spec.",
        )


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raises unless the shards, known not to overlap, fit and cover a tensor of these dims."""
    dims = tuple(tensor_dims)
    if len(dims) != len(shards_metadata[0].shard_offsets):
        raise TilingError(
            f"Rank of tensor is {len(dims)}, but shards rank is "
            f"{len(shards_metadata[0].shard_offsets)}",
            fix=f"Describe every shard with {len(dims)} offsets and sizes.",
        )
    boxes = shard_boxes(shards_metadata)
    beyond = np.argwhere(boxes.stops > np.array(dims, dtype=np.int64))
    if len(beyond):
        row, dim = beyond[0].tolist()
        shard = shards_metadata[row]
        raise TilingError(
            f"Shard offset {shard.shard_offsets[dim]} and length {shard.shard_sizes[dim]} "
            f"exceeds tensor dim: {dims[dim]} for shard {shard}"
        )
    volume = sum(map(math.prod, boxes.shapes.tolist()))  # Python's numbers: any size
    if volume != math.prod(dims):
        raise TilingError(
            f"Total volume of shards: {volume} does not match tensor volume: {math.prod(dims)}, "
            f"in other words all the individual shards do not cover the entire tensor "
            f"(each element once)"
            + (f": {check_tiling(boxes, dims).describe()}" if math.prod(dims) < 2**63 else "")
        )


def get_split_size(dim_size: int, chunks: int) -> int:
    """Length of a full chunk, as torch.chunk cuts."""
    return split_size(dim_size, chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Length of chunk `idx` of a dim cut into pieces of `split_size`; 0 past the end."""
    return chunk_length(dim_size, split_size, idx)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """(start, size) of the chunk that `spec` gives to `rank` when `world_size` chunks are cut."""
    for idx, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            if spec.sizes is not None:
                return sum(spec.sizes[:idx]), spec.sizes[idx]
            length = split_size(sharding_dim_size, world_size)
            start = min(idx * length, sharding_dim_size)
            return start, chunk_length(sharding_dim_size, length, idx)
    raise SpecError(
        "get_chunk_sharding_params",
        expected=f"a rank of the spec's placements {spec.placements}",
        got=f"rank {rank}",
    )


def distinct_shards(shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    """The first shard of each box."""
    first: dict[tuple[int, ...], ShardMetadata] = {}
    for shard in shards:
        first.setdefault((*shard.shard_offsets, *shard.shard_sizes), shard)
    return list(first.values())
