"""Layer 7: the sharded tensor."""

# Imported for their handlers of torch functions.
from shardwise.sharded_tensor import autograd, comparing, copying, inspecting, moving  # noqa: F401
from shardwise.sharded_tensor.dispatch import custom_sharded_op_impl
from shardwise.sharded_tensor.distributing import (
    as_local_rows,
    as_replicated,
    distribute,
    from_callback,
)
from shardwise.sharded_tensor.factories import empty, full, ones, zeros
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "as_local_rows",
    "as_replicated",
    "custom_sharded_op_impl",
    "distribute",
    "empty",
    "from_callback",
    "full",
    "ones",
    "zeros",
]
