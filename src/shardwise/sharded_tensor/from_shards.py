"""Sharded tensors from the local tensors that ranks have already. Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.arguments import is_whole_number
from shardwise.comm.agreement import agree
from shardwise.comm.checks import should_check
from shardwise.comm.differentiable import carriers_of
from shardwise.comm.process_group import communicator
from shardwise.errors import AgreementError, MetadataError, ShardCountError
from shardwise.metadata import ShardedTensorMetadata
from shardwise.placement import rank_of
from shardwise.sharded_tensor.fitting import (
    box_inside,
    check_metadata,
    check_properties,
    described_spec,
    matched,
)
from shardwise.sharded_tensor.metadata_of_shards import (
    joined_metadata,
    listed_shards,
    local_metadata,
)
from shardwise.sharded_tensor.plain_tensors import check_contiguous, check_strided, checked_plain
from shardwise.sharded_tensor.remote_shards import connect
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.sizes_and_specs import checked_size, home_device, layout_by
from shardwise.sharded_tensor.state import LooseState, State, make_state
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharding_spec.infer import _infer_sharding_spec_from_shards_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "gathered_state",
    "init_from_local_shards",
    "local_tensor_state",
    "loose_state",
    "metadata_state",
    "only_piece",
]


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of everybody's shards, in which gradients flow to their tensors.

    All ranks of the group call it; some may pass an empty list. The shards, in any order, cover a
    tensor of `global_size`, each element once; offsets and sizes are exchanged, and what is wrong
    on one rank raises on all. If the size has None in it, the shards are rows in rank order, and
    offsets and size are computed.

    >>> import shardwise
    >>> def rows(rank):
    ...     shard = Shard.from_tensor_and_offsets(torch.ones(2 + rank, 3), [2 * rank, 0], rank)
    ...     return init_from_local_shards([shard], 5, 3).shape
    >>> shardwise.run_local(lambda rank: rows(rank), 2)[0]
    torch.Size([5, 3])
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """What one rank brings, as all ranks get to see it."""

    rank: int
    metadata: ShardedTensorMetadata  # of its own shards; 0 where the size is to be computed
    given: tuple[int | None, ...]  # the size as it was passed
    problem: str | None = None


def gathered_state(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> State:
    """State of the tensor of everybody's shards; see `init_from_local_shards`."""
    members = communicator(process_group)
    record = _Record(members.rank, ShardedTensorMetadata(), ())
    problem: Exception | None = None
    try:
        shards = listed_shards(local_shards)
        record = _record(shards, global_size, members)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
        record = replace(record, problem=f"{type(error).__name__}: {error}")
    if should_check(hot=False):
        agree("init_from_local_shards", {"init_rrefs": init_rrefs}, group=members, problem=problem)
    metadata = _joined(_gathered(record, members), problem)
    spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
    own = [shard for shard in metadata.shards_metadata if rank_of(shard.placement) == members.rank]
    # As many as the shards, in their order: what this rank sent, settled.
    placed = [Shard(s.tensor, m) for s, m in zip(shards, own, strict=True)]
    return _state(placed, metadata, spec, members, init_rrefs=init_rrefs)


def _record(shards: Sequence[Shard], global_size: Sequence[Any], members: Communicator) -> _Record:
    given = _given_size(global_size)
    size = tuple(0 if dim is None else dim for dim in given)
    if shards:
        metadata = local_metadata(shards, size, members)
    else:
        metadata = ShardedTensorMetadata([], torch.Size(size))
    return _Record(members.rank, metadata, given)


def _given_size(global_size: Sequence[Any]) -> tuple[int | None, ...]:
    """`(4, None)` from the arguments `4, None` or `(4, None)`."""
    only = global_size[0] if len(global_size) == 1 else None
    listed = global_size if only is None or is_whole_number(only) else only
    if not isinstance(listed, list | tuple):
        return checked_size([listed])
    dims = checked_size([tuple(0 if dim is None else dim for dim in listed)])
    return tuple(None if a is None else b for a, b in zip(listed, dims, strict=True))


def _gathered(record: _Record, members: Communicator) -> list[_Record]:
    if len(members.ranks) == 1:
        return [record]
    return [found for found in members.gather_objects(record) if isinstance(found, _Record)]


def _joined(records: Sequence[_Record], problem: Exception | None) -> ShardedTensorMetadata:
    """The whole tensor's metadata; raises the same on every rank, save for its own problem."""
    if problem is not None:
        raise problem
    faulty = [f"rank {record.rank}: {record.problem}" for record in records if record.problem]
    if faulty:
        raise AgreementError(
            f"init_from_local_shards failed on other ranks: {'; '.join(faulty)}",
            fix="It was stopped on all ranks before anything was done.",
        )
    given = records[0].given
    recalculates = None in given
    found = joined_metadata([(r.rank, r.metadata) for r in records], recalculates=recalculates)
    fits = len(given) == len(found.size) and all(
        dim in (None, size) for dim, size in zip(given, found.size, strict=True)
    )
    if recalculates and not fits:
        raise MetadataError(
            "global_size of init_from_local_shards",
            expected=f"numbers of {tuple(found.size)}, the size of all shards as rows, or None",
            got=given,
        )
    return found


def metadata_state(
    local_shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    *,
    process_group: ProcessGroup | Communicator | None = None,
    init_rrefs: bool = False,
    spec: ShardingSpec | None = None,
) -> State:
    """State of a tensor whose metadata is known to every rank. Communicates nothing."""
    members = communicator(process_group)
    shards = listed_shards(local_shards)
    check_metadata(metadata)
    ranks = [rank_of(shard.placement) for shard in metadata.shards_metadata]
    members.ranks.check_members(ranks, what="sharded_tensor_metadata's placements")
    if len(shards) != ranks.count(members.rank):
        raise ShardCountError(
            f"Number of local shards ({len(shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({ranks.count(members.rank)}) on rank "
            f"({members.rank})",
            rank=members.rank,
        )
    described = described_spec(metadata, spec)
    for shard in shards:
        check_properties(shard, metadata.tensor_properties, members.rank)
    return _state(shards, metadata, described, members, init_rrefs=init_rrefs)


def loose_state(
    local_shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None = None,
) -> State:
    """State of a tensor of no process group, of which this process holds any of the shards."""
    shards = listed_shards(local_shards)
    check_metadata(metadata)
    described = described_spec(metadata, spec)
    layout = described.layout(metadata.size)
    entries = {(entry.box, entry.rank) for entry in layout}
    placed = sorted(
        ((box_inside(s.metadata, layout), rank_of(s.metadata.placement), s.tensor) for s in shards),
        key=lambda found: found[:2],
    )
    for box, rank, _ in placed:
        if (box, rank) not in entries:
            raise MetadataError(
                f"local shard {box} of rank {rank}",
                expected=f"one of the metadata's shards: {layout.describe()}",
                got="a shard that it does not have",
            )
    properties = metadata.tensor_properties
    carriers = carriers_of(
        [tensor for _, _, tensor in placed],
        dtype=properties.dtype,
        device=home_device(described, layout.shape),
    )
    if not placed:
        carriers[0].requires_grad_(properties.requires_grad)
    held = tuple((rank, box) for box, rank, _ in placed)
    rank = held[0][0] if held else dist.get_rank() if dist.is_initialized() else 0
    made = LooseState(layout, carriers, rank, None, described)
    made.held = held
    return made


def _state(
    shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    members: Communicator,
    *,
    init_rrefs: bool,
) -> State:
    layout = spec.layout(metadata.size)
    tensors = matched(shards, layout, members.rank)
    state = make_state(
        layout,
        tensors,
        group=members,
        spec=spec,
        dtype=metadata.tensor_properties.dtype,
        device=home_device(spec, layout.shape),
        requires_grad=metadata.tensor_properties.requires_grad,
        init_rrefs=init_rrefs,
    )
    return connect(state)


def local_tensor_state(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: ProcessGroup | Communicator | None = None,
    init_rrefs: bool = False,
) -> State:
    """State of a tensor of which each rank has at most one piece, `local_tensor`.

    All ranks call it and compare. On a rank that the spec gives nothing the tensor says the dtype.
    """
    members = communicator(process_group)
    problem: Exception | None = None
    values: dict[str, object] = {"init_rrefs": init_rrefs}
    try:
        size = checked_size(global_size)
        layout = layout_by(sharding_spec, size, members)
        tensors = only_piece(local_tensor, layout, members.rank)
        values |= {"size": size, "sharding_spec": layout}
        values |= {"dtype": local_tensor.dtype, "requires_grad": local_tensor.requires_grad}
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("_init_from_local_tensor", values, group=members, problem=problem)
    state = make_state(
        layout,
        tensors,
        group=members,
        spec=sharding_spec,
        dtype=local_tensor.dtype,
        device=local_tensor.device,
        requires_grad=local_tensor.requires_grad,
        init_rrefs=init_rrefs,
    )
    return connect(state)


def only_piece(local_tensor: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    """The tensor as the only shard that `rank` has, or nothing if it has none."""
    check_strided(checked_plain(local_tensor, "local_tensor", rank), rank)
    check_contiguous(local_tensor, "local_tensor", rank)
    boxes = layout.boxes_of(rank)
    if len(boxes) > 1:
        raise ShardCountError(
            "local_tensor: one tensor for a rank that has several shards",
            rank=rank,
            got=f"{len(boxes)} boxes: {', '.join(map(str, boxes[:8]))}",
            fix="Use init_from_local_shards([Shard(...), ...], size).",
        )
    if boxes and tuple(local_tensor.shape) != boxes[0].shape:
        raise MetadataError(
            "Shard tensor size does not match with metadata.shard_lengths!",
            rank=rank,
            expected=f"{boxes[0].shape}, the shape of {boxes[0]}",
            got=tuple(local_tensor.shape),
        )
    return [local_tensor] if boxes else []
