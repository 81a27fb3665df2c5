"""From shards back to the spec that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry.splits import even_cuts
from shardwise.metadata import ShardMetadata, shard_boxes
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["_infer_sharding_spec_from_shards_metadata"]


def _infer_sharding_spec_from_shards_metadata(
    shards_metadata: Sequence[ShardMetadata],
) -> ShardingSpec:
    """Chunk spec if the shards are torch.chunk's along one dim, by offset; else Enumerable."""
    ndims = {len(shard.shard_offsets) for shard in shards_metadata}
    placed = [shard.placement for shard in shards_metadata if shard.placement is not None]
    if len(ndims) == 1 and len(placed) == len(shards_metadata):
        boxes = shard_boxes(shards_metadata)
        cut = np.flatnonzero((boxes.starts != 0).any(axis=0))
        same = (boxes.stops == boxes.stops[0]).all(axis=0)
        if len(cut) == 1 and np.delete(same, cut[0]).all():
            dim = int(cut[0])
            starts, stops = boxes.starts[:, dim], boxes.stops[:, dim]
            # The seed writes empty chunks past the end; the cut positions are what counts.
            size = int(stops[stops > starts].max(initial=0))
            order = np.lexsort([stops, starts])
            cuts = np.minimum(np.append(starts[order], size), size)
            lengths = (stops - starts)[order]
            if np.array_equal(cuts, even_cuts(size, len(placed))) and np.array_equal(
                lengths, np.diff(cuts)
            ):
                return ChunkShardingSpec(dim, [placed[k] for k in order.tolist()])
    return EnumerableShardingSpec(shards_metadata)
