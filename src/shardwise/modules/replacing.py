"""Other tensors in place of the plain parameters and buffers of a module.

[Note: the same Parameter] A parameter stays the same object, so that an optimizer that was made
before, or a list that holds it, has the new tensor. torch can swap what two objects are unless
something refers to the plain one weakly or a graph that is alive needs it; then a new Parameter
takes its place in the module, as the seed has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._torch_compat import can_swap, gradient_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Owner", "owners_of", "put_in_place"]

Owner = tuple[nn.Module, str]  # a module, and its own name for a tensor


def owners_of(module: nn.Module, names: Sequence[str]) -> list[Owner]:
    """Who has the tensor of these dotted names."""
    split = [name.rpartition(".") for name in names]
    return [(module.get_submodule(path), name) for path, _, name in split]


def put_in_place(old: torch.Tensor, made: torch.Tensor, owners: Sequence[Owner]) -> None:
    """Makes `made` what the plain tensor `old` was, under all its names.

    It gets the attributes and hooks of `old`; a gradient is left behind.
    [Note: the same Parameter]
    """
    hooks = gradient_hooks(old)
    new: Any = _swapped(old, made) if isinstance(old, nn.Parameter) else made
    if new is not old:
        for name, value in vars(old).items():
            setattr(new, name, value)
        for module, name in owners:
            if getattr(module, name, None) is old:
                setattr(module, name, new)
    # On the object that stays: a hook may be called with it.
    for hook in hooks.on_gradient:
        new.register_hook(hook)
    for hook in hooks.when_accumulated:
        new.register_post_accumulate_grad_hook(hook)


def _swapped(old: nn.Parameter, made: torch.Tensor) -> nn.Parameter:
    """The old Parameter, with the new tensor; or a new one. [Note: the same Parameter]"""
    new = nn.Parameter(made, requires_grad=old.requires_grad)
    if not can_swap(old):
        return new
    kept = dict(vars(old))
    torch.utils.swap_tensors(old, new)
    for name, value in kept.items():
        setattr(old, name, value)
    return old
