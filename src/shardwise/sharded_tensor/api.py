"""Door: the seed's path of the tensor class and what belongs to it."""

from shardwise.sharded_tensor.factories import _create_tensor_from_params
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded_tensor.metadata_of_shards import (
    build_global_metadata,
    build_metadata_from_local_shards,
)
from shardwise.sharded_tensor.remote_shards import _register_remote_shards, _sharded_tensor_map
from shardwise.sharded_tensor.reshard import reshard_local_shard, reshuffle_local_shard
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase
from shardwise.sharding_spec._internals import (
    check_tensor,
    validate_non_overlapping_shards_metadata,
)

__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_register_remote_shards",
    "_sharded_tensor_map",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "reshard_local_shard",
    "reshuffle_local_shard",
    "validate_non_overlapping_shards_metadata",
]
