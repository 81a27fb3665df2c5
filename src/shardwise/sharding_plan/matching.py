"""From the names and patterns of a plan to the tensors and submodules of a module."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardwise.sharder import Sharder
from shardwise.sharding_spec.short import parse_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from shardwise.sharding_plan.api import Meaning, ShardingPlan
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["Matched", "Target", "match"]


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter or buffer that is to be sharded: once, also if it has several names."""

    names: tuple[str, ...]  # dotted; several if it is tied
    tensor: torch.Tensor
    spec: ShardingSpec


@dataclass(frozen=True, slots=True)
class Matched:
    """What a plan means for a module."""

    targets: tuple[Target, ...]
    sharders: tuple[tuple[str, Sharder], ...]
    outputs: tuple[tuple[str, ShardingSpec], ...]
    locals: tuple[str, ...]  # modules that return the local tensor
    inputs: tuple[tuple[str, Meaning], ...]


def match(plan: ShardingPlan, module: nn.Module, ranks: Sequence[int], device: str) -> Matched:
    """What `plan` means for `module` over these ranks; raises before anything moves."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))

    def spec_of(spec: ShardingSpec | str) -> ShardingSpec:
        return parse_spec(spec, ranks=ranks, device=device) if isinstance(spec, str) else spec

    sharders: list[tuple[str, Sharder]] = []
    found: dict[int, tuple[list[str], torch.Tensor, ShardingSpec]] = {}
    for pattern, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            sharders += [(path, entry) for path in modules if fnmatchcase(path, pattern)]
            continue
        for name, tensor in named.items():
            if fnmatchcase(name, pattern):
                found.setdefault(id(tensor), ([], tensor, spec_of(entry)))[0].append(name)

    def paths(pattern: str) -> list[str]:
        return [path for path in modules if fnmatchcase(path, pattern)]

    return Matched(
        tuple(Target(tuple(names), tensor, spec) for names, tensor, spec in found.values()),
        tuple(sharders),
        tuple((p, spec_of(s)) for key, s in (plan.output_plan or {}).items() for p in paths(key)),
        tuple(p for key in plan.return_local_tensor or () for p in paths(key)),
        tuple((p, one) for key, one in (plan.input_plan or {}).items() for p in paths(key)),
    )
