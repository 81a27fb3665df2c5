"""The group of ranks that saves or loads a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from shardwise.comm.alone import ALONE
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.process_group import communicator
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["group_of_tensors"]


def group_of_tensors(
    tensors: Iterable[torch.Tensor], process_group: ProcessGroup | Communicator | None = None
) -> Communicator:
    """The group that is given, or the one that all sharded tensors are of, or the default one.

    Where there is no process group, this process alone.
    """
    if process_group is not None:
        return communicator(process_group)
    states = [tensor._state for tensor in tensors if isinstance(tensor, ShardedTensor)]
    groups = {state.members.ranks: state.members for state in states if state.members is not None}
    if len(groups) == 1:
        return next(iter(groups.values()))
    if simulated_rank.get() is not None or (dist.is_available() and dist.is_initialized()):
        return communicator()
    return ALONE
