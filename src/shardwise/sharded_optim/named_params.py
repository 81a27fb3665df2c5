"""What an optimizer is to work on: parameters, and sharded tensors that are plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

__all__ = ["named_params_with_sharded_tensor"]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors: sharded tensors among plain attributes, then all parameters.

    Each tensor comes once. `prefix` and `recurse` as in `Module.named_parameters`.
    """
    seen: set[int] = set()
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for path, submodule in modules:
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter
