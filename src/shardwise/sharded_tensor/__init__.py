"""Layer 7: the sharded tensor."""

from shardwise.sharded_tensor import (  # noqa: F401  # for their handlers of torch functions
    autograd,
    backward,
    comparing,
    copying,
    draws,
    dropout,
    embedding,
    embedding_bag,
    fallback,
    foreach,
    gradient_hooks,
    indexing,
    inspecting,
    like_factories,
    list_norms,
    moving,
    pickling,
    running,
    through_views,
)

from shardwise.sharded_tensor import methods  # noqa: F401  # after all handlers  # isort: skip

# The seed's submodules, which its users reach as attributes of this one.
from shardwise.sharded_tensor import api, logger, reshard, utils  # noqa: F401  # the seed's  # isort: skip
from shardwise.sharded_tensor._ops import (  # noqa: F401  # the seed's
    allclose,
    constant_,
    equal,
    kaiming_uniform_,
    normal_,
    sharded_embedding,
    sharded_embedding_bag,
    uniform_,
)
from shardwise.sharded_tensor.dispatch import _sharded_op_impl, custom_sharded_op_impl
from shardwise.sharded_tensor.distributing import (
    as_local_rows,
    as_replicated,
    distribute,
    from_callback,
)
from shardwise.sharded_tensor.factories import empty, full, ones, zeros
from shardwise.sharded_tensor.from_shards import init_from_local_shards
from shardwise.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded_tensor.random_fills import rand, randn
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.state_dict import pre_load_state_dict_hook, state_dict_hook
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_sharded_op_impl",
    "as_local_rows",
    "as_replicated",
    "custom_sharded_op_impl",
    "distribute",
    "empty",
    "from_callback",
    "full",
    "init_from_local_shards",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]
