"""A process group of one rank, so that a REPL works."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise._torch_compat import HashStore
from shardwise.errors import ArgumentValueError

__all__ = ["init_single"]


def init_single() -> None:
    """Makes this process the only rank of the default group; does nothing if it is already.

    For a REPL, a notebook or a script that runs without torchrun: everything works, on one rank.

    >>> import shardwise
    >>> shardwise.init_single()
    >>> st = shardwise.sharded_tensor.ones(shardwise.chunk(0), 4, 6)
    >>> st.local_tensor().shape
    torch.Size([4, 6])
    >>> torch.distributed.destroy_process_group()
    """
    if dist.is_initialized():
        if dist.get_world_size() != 1:
            raise ArgumentValueError(
                "init_single",
                rank=dist.get_rank(),
                expected="no process group yet",
                got=f"one of {dist.get_world_size()} ranks",
                fix="Leave the call out: the tensors will use that group.",
            )
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
