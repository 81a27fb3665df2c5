"""Layer 7: the sharded tensor. So far only its metadata, at the seed's path."""

from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

__all__ = ["ShardedTensorMetadata", "TensorProperties"]
