"""Layer 8: the seed's functions on tensors and modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.modules.outputs import _collect_local_shard, _reshard_output
from shardwise.modules.sharding import shard_module, shard_parameter
from shardwise.sharded_tensor.distributing import distribute
from shardwise.sharded_tensor.pickling import _get_current_process_group, load_with_process_group
from shardwise.sharded_tensor.tensor import ShardedTensor  # noqa: TC001  # the seed hands it on
from shardwise.sharder import Sharder  # noqa: F401  # likewise
from shardwise.sharding_plan.api import ShardingPlan  # noqa: F401  # likewise
from shardwise.sharding_spec import ChunkShardingSpec  # noqa: F401  # likewise
from shardwise.sharding_spec.spec import ShardingSpec  # noqa: TC001  # likewise

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = [
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]


def _shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """The full `tensor` of one rank of the group, cut by the spec; as `shardwise.distribute`."""
    return distribute(tensor, sharding_spec, src_rank=src_rank, process_group=process_group)
