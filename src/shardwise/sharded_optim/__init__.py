"""Optimizers of sharded tensors, as the seed has them."""

from shardwise.sharded_optim.api import ShardedOptimizer
from shardwise.sharded_optim.named_params import named_params_with_sharded_tensor
from shardwise.sharded_tensor.tensor import ShardedTensor  # noqa: F401  # the seed hands it on

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]
