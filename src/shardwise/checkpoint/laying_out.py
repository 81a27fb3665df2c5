"""The layouts that a converted checkpoint gets: from a plan, or by rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.checkpoint.placing import Wanted
from shardwise.errors import CheckpointError, ShardingPlanError
from shardwise.geometry import Layout
from shardwise.sharding_plan.api import ShardingPlan
from shardwise.sharding_plan.matching import match
from shardwise.sharding_spec.short import chunk

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

__all__ = ["Checkpoint", "as_plan", "layouts_of", "whole_in_files"]


class Checkpoint(nn.Module):
    """A module with the names and shapes of a checkpoint, for a plan to be matched with."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], same_as: Mapping[str, str]) -> None:
        super().__init__()
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        for name in shapes:
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                # Not by add_module, which refuses names that a Module has: `train`, `type`.
                found = module._modules.get(part)
                if found is None:
                    found = module._modules[part] = nn.Module()
                module = found
            module._buffers[last] = tensors[same_as.get(name, name)]


def as_plan(plan: ShardingPlan | Mapping[str, str] | str | os.PathLike[str]) -> ShardingPlan:
    """A plan that is given as it is, as a dict of specs by name, or as a file."""
    if isinstance(plan, ShardingPlan):
        return plan
    if isinstance(plan, str) or hasattr(plan, "__fspath__"):
        try:
            return ShardingPlan.load(plan)
        except OSError as error:
            raise ShardingPlanError(f"plan in {Path(plan)}", got=error.strerror) from error
    return ShardingPlan(dict(plan))


def layouts_of(
    shapes: Mapping[str, tuple[int, ...]],
    plan: ShardingPlan | None,
    world_size: int,
    same_as: Mapping[str, str],
) -> dict[str, Layout]:
    """The layout of each tensor over ranks 0 to `world_size`; tied ones (`same_as`) have the same.

    By the plan, where it has an entry; others are on every rank then. Without a plan all tensors
    are cut into rows, those without dims are on every rank.
    """
    ranks = range(world_size)
    if plan is None:
        rows = chunk(0, ranks=ranks, device="cpu")
        return {
            name: rows.layout(shape) if shape else Layout.replicated(shape, ranks)
            for name, shape in shapes.items()
        }
    matched = match(plan, Checkpoint(shapes, same_as), ranks, "cpu")
    if matched.sharders:
        path, sharder = matched.sharders[0]
        raise ShardingPlanError(
            f"{path!r} of the plan",
            expected="a spec",
            got=f"a {type(sharder).__name__}",
            fix="A Sharder needs the model's modules; name the tensors and give them specs.",
        )
    found = {name: Layout.replicated(shape, ranks) for name, shape in shapes.items()}
    for one in matched.tensors:
        for name in one.names:
            found[name] = _nothing_pending(one.spec.layout(shapes[name]), name)
    return found


def _nothing_pending(layout: Layout, name: str) -> Layout:
    if layout.pending is not None:
        raise CheckpointError(
            f"layout of {name!r}",
            expected="one with nothing to be reduced",
            got=layout,
            fix='Take another spec, such as "chunk(0)".',
        )
    return layout


def whole_in_files(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], max_bytes: int
) -> list[Wanted]:
    """Whole tensors, on rank k those of file k: in order, at most `max_bytes` in each file.

    A tensor that is larger has a file of its own. So Hugging Face folders are split.
    """
    file, filled = 0, 0
    wanted = []
    for name, shape, dtype in tensors:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if filled and filled + nbytes > max_bytes:
            file, filled = file + 1, 0
        filled += nbytes
        wanted.append(Wanted(name, Layout.replicated(shape, [file]), dtype))
    return wanted
