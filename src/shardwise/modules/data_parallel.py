"""Sharded models beside torch's DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise._torch_compat import ignore_in_ddp
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ddp_ignore"]


def ddp_ignore(model: nn.Module) -> nn.Module:
    """Has `DistributedDataParallel(model)` leave the sharded tensors alone; returns the model.

    Call it once the model is sharded, before DistributedDataParallel. Copies of a sharded
    parameter on several ranks are replicas in its layout, whose gradients are summed as they are
    computed: the reducer has nothing to do for them.
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    ignore_in_ddp(model, [name for name, one in named if isinstance(one, ShardedTensor)])
    return model
