"""The group of ranks that a model is spread over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentValueError
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["check_group", "group_of"]


def group_of(model: nn.Module, process_group: ProcessGroup | None = None) -> Communicator:
    """The group that is given, or that of the model's sharded tensors, or the default one."""
    if process_group is None:
        for tensor in (*model.parameters(), *model.buffers()):
            if isinstance(tensor, ShardedTensor):
                return tensor._state.comm
    return communicator(process_group)


def check_group(name: str, tensor: ShardedTensor, members: Communicator) -> None:
    """Raises unless the tensor of this name belongs to the model's group."""
    ranks = tensor._state.comm.ranks
    if tuple(ranks) != tuple(members.ranks):
        raise ArgumentValueError(
            f"{name!r} of the model",
            rank=members.rank,
            expected=f"the group of ranks {list(members.ranks)}, as of the others",
            got=f"ranks {list(ranks)}",
            fix="Bring it into one group: shardwise.reshard(st, to, process_group=...).",
        )
