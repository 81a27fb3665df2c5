"""Door: the seed's path of the tensor class and what belongs to it."""

from shardwise.sharded_tensor.factories import _create_tensor_from_params
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded_tensor.remote_shards import _register_remote_shards, _sharded_tensor_map
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_register_remote_shards",
    "_sharded_tensor_map",
]
