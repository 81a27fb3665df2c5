"""Who shards a whole submodule, where sharding its parameters one by one does not do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Sharder"]


class Sharder(ABC):
    """Makes a sharded module of a plain one; an entry of `ShardingPlan.plan`."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that takes the place of `module`: the same one, changed, or another."""
