"""The seed's functions below `ShardedTensor.reshard`, for every pair of specs.

They work on one local tensor per rank. `shardwise.reshard` is the function for sharded tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.comm.agreement import agree
from shardwise.comm.process_group import communicator
from shardwise.errors import OpError
from shardwise.metadata import TensorProperties
from shardwise.placement import parse_placement, rank_of
from shardwise.sharded_tensor.from_shards import only_piece
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.seed_views import local_shards_of
from shardwise.sharded_tensor.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.metadata import ShardMetadata
    from shardwise.placement import PlacementLike
    from shardwise.sharded_tensor.shard import Shard
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "build_reshard_metadata",
    "get_idx_from_placements",
    "reshard_local_shard",
    "reshuffle_local_shard",
]


def get_idx_from_placements(placements: Iterable[PlacementLike], current_rank: int) -> int:
    """Position of the first placement on `current_rank`, a global rank."""
    ranks = [rank_of(parse_placement(placement)) for placement in placements]
    if current_rank not in ranks:
        raise OpError(
            "current_rank not in the placement.", expected=f"one of {ranks}", got=current_rank
        )
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: Sequence[int], sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Metadata of all shards, by rank, and the ranks in the spec's own order.

    The spec alone says how many shards there are: `world_size`, the seed's, is not asked.
    """
    metadata = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties())
    ranks = [rank_of(shard.placement) for shard in metadata.shards_metadata]
    by_rank = sorted(zip(ranks, metadata.shards_metadata, strict=True), key=lambda pair: pair[0])
    return [shard for _, shard in by_rank], ranks


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: ProcessGroup | Communicator | None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards by `resharding_spec`, and the metadata of all, from its shard by another.

    All ranks of the group call it. Differentiable. A rank that `sharding_spec` gives nothing
    passes any tensor of the dtype, of which nothing is used.
    """
    members = communicator(pg)
    size = tuple(st_size)
    problem: Exception | None = None
    values: dict[str, object] = {"st_size": size, "dtype": local_tensor.dtype}
    try:
        source, target = sharding_spec.layout(size), resharding_spec.layout(size)
        for layout in (source, target):
            members.ranks.check_members(layout.ranks, what="the specs' placements")
        pieces = only_piece(local_tensor, source, members.rank)
        values |= {"sharding_spec": source, "resharding_spec": target}
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("reshard_local_shard", values, group=members, hot=True, problem=problem)
    # The part without elements of a tensor that is not used still ties its graph to the others'.
    carriers = tuple(pieces) or (local_tensor.reshape(-1)[:0],)
    state = State(source, carriers, members.rank, members, sharding_spec)
    moved = reshard_state(
        state,
        target,
        spec=resharding_spec,
        devices=resharding_spec.local_devices(size, members.rank),
    )
    metadata, _ = build_reshard_metadata(size, resharding_spec, len(members.ranks))
    return local_shards_of(moved), metadata


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: Sequence[int],
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: ProcessGroup | Communicator | None,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """As `reshard_local_shard`; in the seed this one is for specs that cut the same dim."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
