"""What a plan does to outputs and inputs of modules, by hooks that can be taken off again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from shardwise.sharding_plan.matching import Matched

__all__ = ["replace_plan_hooks"]

HANDLES = "_shardwise_plan_hooks"  # attribute of a module: what removes the hooks of its plan


def replace_plan_hooks(model: nn.Module, matched: Matched) -> None:
    """Takes off what an earlier plan did to outputs and inputs."""
    for module in model.modules():
        for handle in vars(module).pop(HANDLES, ()):
            handle.remove()
