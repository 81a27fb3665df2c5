"""What becomes of a model: which parameter is cut how, and what goes in and comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardwise.sharder import Sharder  # noqa: TC001  # the seed hands it on
from shardwise.sharding_plan.explaining import explain_plan
from shardwise.sharding_plan.files import (
    fields_from_plain,
    plain_plan,
    read_plain,
    write_plain,
)
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from torch import nn

    from shardwise.sharding_plan.explaining import PlanTable

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

    def explain(self, model: nn.Module, ranks: Sequence[int] | None = None) -> PlanTable:
        """What the plan does to `model`: its str is a table, `to_dict()` the same for programs.

        One row per parameter and buffer: shape, spec, bytes per rank now and after. Moves nothing;
        `ranks` default to those of the default process group.
        """
        return explain_plan(self, model, ranks)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists and text, which `from_dict` reads.

        >>> from shardwise.sharders import Rowwise
        >>> ShardingPlan({"up.weight": "chunk(0)", "down": Rowwise()}).to_dict()
        {'plan': {'up.weight': 'chunk(0)', 'down': 'Rowwise()'}}
        """
        return plain_plan(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ShardingPlan:
        """The plan of which `to_dict` gave this. Specs stay text, so ranks need not be known."""
        return cls(**fields_from_plain(plain))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as YAML (.yaml, .yml) or JSON (.json)."""
        write_plain(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ShardingPlan:
        """The plan in a YAML or JSON file."""
        return cls(**fields_from_plain(read_plain(path), source=str(path)))


class ShardingPlanner(ABC):
    """Makes plans of modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan by which `module` is to be sharded."""
