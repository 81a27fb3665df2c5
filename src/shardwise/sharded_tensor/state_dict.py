"""Hooks that put sharded tensors which are plain attributes of modules into state dicts.

Parameters and buffers need no hook.

    module._register_state_dict_hook(state_dict_hook)
    module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["pre_load_state_dict_hook", "state_dict_hook"]


def state_dict_hook(
    module: torch.nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Adds the sharded tensors among the attributes of `module` and of all modules in it."""
    for key, submodule, name in _attributes(module, prefix):
        value = vars(submodule)[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Sets attributes of `module`, and of all modules in it, to the sharded tensors found.

    With `strict`, what was found is taken out of `state_dict`, where it would be unexpected.
    """
    for key, submodule, name in _attributes(module, prefix):
        if isinstance(state_dict.get(key), ShardedTensor):
            setattr(submodule, name, state_dict.pop(key) if strict else state_dict[key])


def _attributes(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Key in a state dict, module and name of each plain attribute."""
    for path, submodule in module.named_modules():
        start = prefix + path + ("." if path else "")
        for name in list(vars(submodule)):
            yield start + name, submodule, name
