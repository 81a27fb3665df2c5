"""Door: the seed's path of specs, their inference and custom ops."""

from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec._internals import (
    check_tensor,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharding_spec.custom_ops import (
    _dispatch_custom_op,
    _has_custom_op,
    custom_sharding_spec_op,
)
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec
from shardwise.sharding_spec.infer import _infer_sharding_spec_from_shards_metadata
from shardwise.sharding_spec.spec import DevicePlacementSpec, PlacementSpec, ShardingSpec

__all__ = [
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_dispatch_custom_op",
    "_has_custom_op",
    "_infer_sharding_spec_from_shards_metadata",
    "check_tensor",
    "custom_sharding_spec_op",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
