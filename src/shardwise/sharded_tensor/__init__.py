"""Layer 7: the sharded tensor."""

# Imported for their handlers of torch functions.
from shardwise.sharded_tensor import (  # noqa: F401
    autograd,
    comparing,
    copying,
    fallback,
    inspecting,
    moving,
)
from shardwise.sharded_tensor.dispatch import custom_sharded_op_impl
from shardwise.sharded_tensor.distributing import (
    as_local_rows,
    as_replicated,
    distribute,
    from_callback,
)
from shardwise.sharded_tensor.factories import empty, full, ones, zeros
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded_tensor.random_fills import rand, randn
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase
from shardwise.sharded_tensor.to_layout import absent, reshard
from shardwise.sharded_tensor.to_layouts import reshard_all

__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "absent",
    "as_local_rows",
    "as_replicated",
    "custom_sharded_op_impl",
    "distribute",
    "empty",
    "from_callback",
    "full",
    "ones",
    "rand",
    "randn",
    "reshard",
    "reshard_all",
    "zeros",
]
