"""Door: the seed's path of the sharded tensor and of what remote shards are known by."""

from shardwise.sharded_tensor.remote_shards import _register_remote_shards, _sharded_tensor_map

__all__ = ["_register_remote_shards", "_sharded_tensor_map"]
