"""What a plan does to outputs and inputs of modules, by hooks that another plan takes off again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.modules.inputs import add_input_hook
from shardwise.modules.outputs import LocalOutput, ReshardedOutput

if TYPE_CHECKING:
    from torch import nn

    from shardwise.comm.communicator import Communicator
    from shardwise.sharding_plan.matching import Matched

__all__ = ["add_plan_hooks", "remove_plan_hooks"]

_HANDLES = "_shardwise_plan_hooks"  # attribute of a module: what takes its hooks off


def add_plan_hooks(model: nn.Module, matched: Matched, members: Communicator) -> None:
    """Has submodules do to outputs and inputs what a plan says."""
    for path, spec in matched.outputs:
        module = model.get_submodule(path)
        _keep(module, module.register_forward_hook(ReshardedOutput(_named(path), spec)))
    for path in matched.locals:
        module = model.get_submodule(path)
        _keep(module, module.register_forward_hook(LocalOutput(_named(path))))
    for path, meaning in matched.inputs:
        module = model.get_submodule(path)
        _keep(module, *add_input_hook(module, _named(path), meaning, members))


def remove_plan_hooks(model: nn.Module) -> None:
    """Ends what plans have done to outputs and inputs of the model's modules."""
    for module in model.modules():
        for handle in vars(module).pop(_HANDLES, ()):
            handle.remove()


def _keep(module: nn.Module, *handles: Any) -> None:
    vars(module).setdefault(_HANDLES, []).extend(handles)


def _named(path: str) -> str:
    """A module's name in messages."""
    return path or "(the whole module)"
