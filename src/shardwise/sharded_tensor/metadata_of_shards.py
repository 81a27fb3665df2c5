"""The metadata of a tensor from that of its shards: what one rank can check, and what all can.

Messages keep the phrases that callers of the seed look for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.arguments import items
from shardwise.comm.process_group import communicator
from shardwise.errors import AgreementError, ArgumentTypeError, ArgumentValueError, MetadataError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import rank_of
from shardwise.sharded_tensor.plain_tensors import check_strided
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.sizes_and_specs import checked_size
from shardwise.sharding_spec._internals import (
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.placement import Placement

__all__ = [
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_dense",
    "joined_metadata",
    "listed_shards",
    "local_metadata",
    "recalc_global_sharded_tensor_metadata",
    "settled_inside",
]


def listed_shards(local_shards: object) -> list[Shard]:
    """The shards as a list of our own; raises if something else is among them."""
    listed = items(local_shards, "local_shards", of="Shard")
    for row, shard in enumerate(listed):
        if not isinstance(shard, Shard):
            raise ArgumentTypeError(
                f"local_shards[{row}]",
                expected="a Shard",
                got=type(shard).__name__,
                fix="E.g. Shard.from_tensor_and_offsets(tensor, [0, 0], rank).",
            )
    return listed


def local_metadata(
    shards: Sequence[Shard], size: tuple[int, ...], members: Communicator
) -> ShardedTensorMetadata:
    """Metadata of one rank's shards, at least one, once they are known to be alike and here."""
    rank, first = members.rank, shards[0].tensor
    for shard in shards:
        tensor, metadata = shard.tensor, shard.metadata
        check_dense(tensor, rank)
        _check_place(shard, members)
        _check_alike(metadata.shard_sizes, list(tensor.shape), "size", rank)
        _check_alike(first.is_pinned(), tensor.is_pinned(), "pin_memory", rank)
        _check_alike(first.dtype, tensor.dtype, "dtype", rank)
        _check_alike(first.requires_grad, tensor.requires_grad, "requires_grad", rank)
    properties = TensorProperties.create_from_tensor(first)
    return ShardedTensorMetadata([s.metadata for s in shards], torch.Size(size), properties)


def check_dense(tensor: torch.Tensor, rank: int) -> None:
    """Raises unless the tensor is strided and contiguous."""
    check_strided(tensor, rank)
    if not tensor.is_contiguous():
        raise ArgumentValueError(
            "Only torch.contiguous_format memory_format is currently supported!",
            rank=rank,
            got=f"a local shard of shape {tuple(tensor.shape)} with strides {tensor.stride()}",
            fix="Pass tensor.contiguous().",
        )


def _check_place(shard: Shard, members: Communicator) -> None:
    """The shard belongs to this rank, and its tensor is on the device that its metadata says."""
    placement = shard.metadata.placement
    rank, device = _rank_and_device(placement, members)
    if rank != members.rank:
        raise MetadataError(
            "Local shard metadata's rank does not match with the rank in its process group!",
            rank=members.rank,
            expected=f"a placement on rank {members.rank}",
            got=placement,
            fix="Pass each shard on the rank that holds it; ranks are global.",
        )
    if shard.tensor.device != device:
        raise MetadataError(
            "Local shard tensor device does not match with local Shard's placement!",
            rank=members.rank,
            expected=f"the placement's device {device}",
            got=f"a tensor on {shard.tensor.device}",
        )


def _check_alike(one: object, other: object, name: str, rank: int) -> None:
    if one != other:
        raise MetadataError(
            f"Local shards' tensor {name} property need to be the same on rank:{rank}!",
            rank=rank,
            got=f"{name}={one} and {name}={other}",
        )


def joined_metadata(
    found: Sequence[tuple[int, ShardedTensorMetadata]], *, recalculates: bool = False
) -> ShardedTensorMetadata:
    """One tensor's metadata from those of its ranks, (rank, metadata); the same on every rank.

    With `recalculates` the shards are taken as rows, in rank order, and offsets and size follow.
    """
    if not any(metadata.shards_metadata for _, metadata in found):
        raise ArgumentValueError(
            "ShardedTensor have no local shards on all ranks!",
            fix="At least one rank passes a shard.",
        )
    properties = [(rank, m.tensor_properties) for rank, m in found if m.shards_metadata]
    _check_same("global_size", [(rank, tuple(m.size)) for rank, m in found])
    _check_same("dtype", [(rank, p.dtype) for rank, p in properties])
    _check_same("requires_grad", [(rank, p.requires_grad) for rank, p in properties])
    _check_same("pin_memory", [(rank, p.pin_memory) for rank, p in properties])
    listed = [shard for _, metadata in found for shard in metadata.shards_metadata]
    size = tuple(found[0][1].size)
    if recalculates:
        listed, size = _as_rows(listed)
    listed = settled_inside(listed, size)
    validate_non_overlapping_shards_metadata(listed)
    check_tensor(listed, size)
    return ShardedTensorMetadata(listed, torch.Size(size), replace(properties[0][1]))


def _check_same(name: str, values: Sequence[tuple[int, Any]]) -> None:
    ranks: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, value in values:
        ranks[value].append(rank)
    if len(ranks) > 1:
        found = ", and ".join(f"{name}={v} on {ranks_text(on)}" for v, on in ranks.items())
        raise AgreementError(
            f"ShardedTensor {name} property does not match from different ranks! Found {found}",
            fix="Pass the same on every rank.",
        )


def _as_rows(shards: Sequence[ShardMetadata]) -> tuple[list[ShardMetadata], tuple[int, ...]]:
    """The shards below each other, in rank order, and the size of the tensor that they make."""
    ranked = sorted(shards, key=lambda shard: rank_of(shard.placement))
    inner = [tuple(shard.shard_sizes[1:]) for shard in ranked]
    if not all(shard.shard_sizes for shard in ranked) or len(set(inner)) > 1:
        raise MetadataError(
            "a size with None: it is recomputed from shards that are rows of one tensor",
            expected="shards that differ in dim 0 only",
            got=", ".join(str(list(shard.shard_sizes)) for shard in ranked[:8]),
        )
    starts = [0, *accumulate(shard.shard_sizes[0] for shard in ranked)]
    zeros = [0] * len(inner[0])
    rows = [
        ShardMetadata([start, *zeros], shard.shard_sizes, shard.placement)
        for start, shard in zip(starts, ranked, strict=False)
    ]
    return rows, (starts[-1], *inner[0])


def settled_inside(shards: Sequence[ShardMetadata], size: Sequence[int]) -> list[ShardMetadata]:
    """The shards, of which those without elements that lie past the tensor's end stand at it.

    That is where the seed's own arithmetic puts the empty chunks of torch.chunk.
    """
    return [_inside(shard, size) for shard in shards]


def _inside(shard: ShardMetadata, size: Sequence[int]) -> ShardMetadata:
    if 0 not in shard.shard_sizes or len(shard.shard_sizes) != len(size):
        return shard
    offsets = [
        min(offset, dim) if length == 0 else offset
        for offset, length, dim in zip(shard.shard_offsets, shard.shard_sizes, size, strict=True)
    ]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


# -- the seed's names ------------------------------------------------------------------------------


def _parse_and_validate_remote_device(
    pg: ProcessGroup | Communicator | None, remote_device: Placement | None
) -> tuple[int | None, torch.device]:
    """Rank and device of a placement; raises if the rank is not in the group.

    The rank is None if the placement names none. A rank outside of `pg` checks nothing.
    """
    group: object = pg
    is_left_out = group == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    )
    return _rank_and_device(remote_device, None if is_left_out else communicator(pg))


def _rank_and_device(
    placement: Placement | None, members: Communicator | None
) -> tuple[int | None, torch.device]:
    is_anywhere = placement is not None and {placement.rank(), placement.worker_name()} == {None}
    rank = None if is_anywhere else rank_of(placement)
    assert placement is not None
    if rank is not None and members is not None:
        members.ranks.check_members([rank], what=f"placement '{placement}'")
    return rank, placement.device()


def _flatten_tensor_size(size: Sequence[Any]) -> torch.Size:
    """The size that the arguments `4, 6` or `(4, 6)` mean."""
    return torch.Size(checked_size(size))


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard],
    global_size: Sequence[int],
    current_rank: int,
    pg: ProcessGroup | Communicator | None,
) -> ShardedTensorMetadata:
    """Metadata of this rank's shards, checked against each other and against `current_rank`."""
    members = communicator(pg)
    shards = listed_shards(local_shards)
    if not shards:
        raise ArgumentValueError("must have local shards!", rank=members.rank)
    if current_rank != members.rank:
        raise ArgumentValueError(
            "current_rank", rank=members.rank, expected=members.rank, got=current_rank
        )
    return local_metadata(shards, checked_size([global_size]), members)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """The metadata of the whole tensor from each rank's own, None from ranks without shards."""
    found = [(rank, m) for rank, m in enumerate(gathered_metadatas) if m is not None]
    return joined_metadata(found, recalculates=recalc_metadata)


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Puts the shards behind each other along a dim, in rank order; offsets and size follow.

    Changes the metadata that it is given: its list gets new shards, in the order that it had.
    """
    metadata = global_sharded_tensor_metadata
    shards = metadata.shards_metadata
    ranked = sorted(range(len(shards)), key=lambda i: rank_of(shards[i].placement))
    if not shards or not all(0 <= sharded_dim < len(shard.shard_sizes) for shard in shards):
        raise ArgumentValueError(
            "sharded_dim of recalc_global_sharded_tensor_metadata",
            expected="shards, and one of their dims",
            got=f"{sharded_dim} of {len(shards)} shards",
        )
    start = 0
    size = list(shards[0].shard_sizes)
    for i in ranked:
        sizes = list(shards[i].shard_sizes)
        offsets = [start if dim == sharded_dim else 0 for dim in range(len(sizes))]
        shards[i] = ShardMetadata(offsets, sizes, shards[i].placement)
        start += sizes[sharded_dim]
    size[sharded_dim] = start
    metadata.size = torch.Size(size)
