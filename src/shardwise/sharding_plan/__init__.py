"""Plans: how a model is sharded."""

from shardwise.sharding_plan.api import ShardingPlan, ShardingPlanner
from shardwise.sharding_plan.plan_sharder import PlanSharder

__all__ = ["PlanSharder", "ShardingPlan", "ShardingPlanner"]
