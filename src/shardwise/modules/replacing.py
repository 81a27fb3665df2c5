"""Sharded tensors in place of the plain parameters and buffers of a module.

[Note: the same Parameter] A parameter stays the same object, so that an optimizer that was made
before, or a list that holds it, has the sharded one. torch can swap what two objects are unless
something refers to the plain one weakly or a graph that is alive needs it; then a new Parameter
takes its place in the module, as the seed has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise._torch_compat import gradient_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharded_tensor.tensor import ShardedTensor

__all__ = ["Owner", "owners_of", "put_in_place"]

Owner = tuple[nn.Module, str]  # a module, and its own name for a tensor


def owners_of(module: nn.Module, names: Sequence[str]) -> list[Owner]:
    """Who has the tensor of these dotted names."""
    split = [name.rpartition(".") for name in names]
    return [(module.get_submodule(path), name) for path, _, name in split]


def put_in_place(old: torch.Tensor, made: ShardedTensor, owners: Sequence[Owner]) -> None:
    """Makes `made` what `old` was, under all its names, with its attributes and hooks.

    The gradient that `old` may have is left behind. [Note: the same Parameter]
    """
    is_parameter = isinstance(old, nn.Parameter)
    new: torch.Tensor = (
        nn.Parameter(made, requires_grad=old.requires_grad) if is_parameter else made
    )
    for name, value in vars(old).items():
        setattr(new, name, value)
    on_gradient, when_accumulated = gradient_hooks(old)
    for hook in on_gradient:
        new.register_hook(hook)
    for hook in when_accumulated:
        new.register_post_accumulate_grad_hook(hook)
    if is_parameter:
        try:
            torch.utils.swap_tensors(old, new)
            return
        except RuntimeError:
            pass  # somebody holds on to the plain one
    for module, name in owners:
        if getattr(module, name, None) is old:
            setattr(module, name, new)
