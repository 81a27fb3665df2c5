"""Plans: how a model is sharded."""

from shardwise.sharding_plan.api import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
