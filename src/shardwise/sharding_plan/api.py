"""What becomes of a model: which parameter is cut how, and what goes in and comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from shardwise.sharder import Sharder

__all__ = ["Meaning", "ShardingPlan", "ShardingPlanner"]

Meaning = Literal["local_rows", "replicated"] | ShardingSpec | str
"""What a plain input is: each rank's own rows, the same on all ranks, or cut by a spec."""


@dataclass
class ShardingPlan:
    """How a module is sharded, by dotted names, which may be patterns (`layers.*.mlp.up.weight`).

    `plan`: a spec for a parameter or buffer, a `Sharder` for a submodule. `output_plan`: the spec
    that a submodule's output is brought to. `return_local_tensor`: submodules that return the local
    tensor of their output. `input_plan`: what the plain inputs of a submodule mean; the module
    runs under `plain_inputs("replicated")` then. The module itself is "". A spec may be text, as
    `parse_spec` reads it, for the ranks of the group that the module is sharded over.
    """

    plan: Mapping[str, ShardingSpec | Sharder | str]
    output_plan: Mapping[str, ShardingSpec | str] | None = None
    return_local_tensor: Sequence[str] | None = None
    input_plan: Mapping[str, Meaning] | None = None


class ShardingPlanner(ABC):
    """Makes plans of modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan by which `module` is to be sharded."""
