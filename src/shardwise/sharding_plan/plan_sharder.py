"""Sharders that only say a plan: it joins the plan of the model, and moves in the same exchange."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from shardwise.comm import communicator
from shardwise.sharder import Sharder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardwise.sharding_plan.api import ShardingPlan

__all__ = ["PlanSharder"]


class PlanSharder(Sharder):
    """A Sharder for a kind of submodule that is sharded in place, by a plan of its own.

    In a `ShardingPlan`, the entries of its plan count as entries of that: they are checked with the
    others, and all tensors move together.
    """

    @abstractmethod
    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        """The plan of `module`, by names inside it, over `ranks`. Pure: nothing is sent.

        Specs may be text, which means `ranks` where it names none. Other ranks than these hold
        nothing.
        """

    def shard(self, module: nn.Module) -> nn.Module:
        """Shards `module` alone, in place, over the default process group. All ranks call it."""
        from shardwise.modules.sharding import shard_module

        shard_module(module, self.plan(module, tuple(communicator().ranks)))
        return module
