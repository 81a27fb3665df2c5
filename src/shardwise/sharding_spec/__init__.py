"""Layer 4: recipes from a shape to a Layout."""

from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec.api import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
)
from shardwise.sharding_spec.block_cyclic import BlockCyclicShardingSpec
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.fixed import FixedShardingSpec
from shardwise.sharding_spec.flat import FlatShardingSpec
from shardwise.sharding_spec.fused import FusedShardingSpec
from shardwise.sharding_spec.grid import GridShardingSpec
from shardwise.sharding_spec.mesh import MeshShardingSpec
from shardwise.sharding_spec.replicated import PartialShardingSpec, ReplicatedShardingSpec
from shardwise.sharding_spec.short import parse_spec

__all__ = [
    "BlockCyclicShardingSpec",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "FixedShardingSpec",
    "FlatShardingSpec",
    "FusedShardingSpec",
    "GridShardingSpec",
    "MeshShardingSpec",
    "PartialShardingSpec",
    "PlacementSpec",
    "ReplicatedShardingSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "parse_spec",
]
