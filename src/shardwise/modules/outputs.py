"""Hooks on what modules return. They are objects, so that modules with them can be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import OpError
from shardwise.modules.nested import map_tensors, tensors_in
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.to_layout import reshard
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["LocalOutput", "ReshardedOutput", "_collect_local_shard", "_reshard_output"]


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Has `module` return its sharded tensors in the layout of a spec; returns the module.

    What it computes is not changed in place: a parameter that it returns stays where it is.
    """
    module.register_forward_hook(ReshardedOutput(type(module).__name__, resharding_spec))
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Has `module` return the local tensors of its sharded ones; returns the module.

    Of a tensor that a ChunkShardingSpec cuts into pieces of one, that dim is left out.
    """
    module.register_forward_hook(LocalOutput(type(module).__name__))
    return module


@dataclass(frozen=True, slots=True)
class ReshardedOutput:
    """The hook of `output_plan`."""

    name: str  # of the module
    spec: ShardingSpec

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, ShardedTensor):  # as most are, and there is nothing to look for
            return self._moved(output)
        _check_sharded(output, self.name, "output_plan")
        return map_tensors(self._moved, output)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor
        try:
            return reshard(tensor, self.spec)
        except Exception as error:
            error.add_note(f"while bringing the output of {self.name!r} to its output_plan")
            raise


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """The hook of `return_local_tensor`."""

    name: str  # of the module

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        _check_sharded(output, self.name, "return_local_tensor")
        return map_tensors(self._local, output)

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor
        layout = tensor.shard_layout
        # Looked at for all ranks, so that all raise.
        odd = [rank for rank in tensor._state.comm.ranks if len(layout.boxes_of(rank)) != 1]
        if odd:
            raise OpError(
                f"return_local_tensor of {self.name!r}",
                rank=tensor._state.rank,
                expected="an output of which each rank has one piece",
                got=f"{layout}, of which rank {odd[0]} has {len(layout.boxes_of(odd[0]))}",
                fix="Bring it to such a layout first, in output_plan, or leave the module out of "
                "return_local_tensor and use local_shards().",
            )
        local, spec = tensor.local_tensor(), tensor.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and local.size(int(spec.dim)) == 1:
            return local.squeeze(int(spec.dim))
        return local


def _check_sharded(output: Any, name: str, entry: str) -> None:
    if not any(isinstance(tensor, ShardedTensor) for tensor in tensors_in(output)):
        raise OpError(
            f"{entry} of {name!r}",
            expected="a module that returns a ShardedTensor, alone or in tuples, lists, dicts "
            "and dataclasses",
            got=type(output).__name__,
            fix=f"Leave it out of {entry}, or give its inputs a meaning in input_plan, so that "
            "they are sharded.",
        )
