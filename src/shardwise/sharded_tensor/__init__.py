"""Layer 7: the sharded tensor."""

# Imported for their handlers of torch functions.
from shardwise.sharded_tensor import (  # noqa: F401
    autograd,
    comparing,
    copying,
    inspecting,
    moving,
    pickling,
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
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.state_dict import pre_load_state_dict_hook, state_dict_hook
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase
from shardwise.sharded_tensor.to_layout import absent, reshard

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
    "pre_load_state_dict_hook",
    "reshard",
    "state_dict_hook",
    "zeros",
]
