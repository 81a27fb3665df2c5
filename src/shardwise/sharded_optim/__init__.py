"""Optimizers of sharded tensors, as the seed has them."""

from shardwise.sharded_optim.api import ShardedOptimizer
from shardwise.sharded_optim.named_params import named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]
