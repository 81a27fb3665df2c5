"""torch's own ShardedTensor as ours and back, on the same local tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise._torch_compat import torch_sharded_tensor_types
from shardwise.comm.agreement import heard_by_all
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, LayoutError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.seed_views import local_shards_of, metadata_of
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from shardwise._torch_compat import TorchShardedTensorTypes
    from shardwise.geometry import Layout
    from shardwise.sharded_tensor.state import State

__all__ = ["from_torch_sharded_tensor", "to_torch_sharded_tensor"]


def from_torch_sharded_tensor(st: Any) -> ShardedTensor:
    """torch's ShardedTensor as one of ours, of the same local tensors and process group.

    All ranks of the group call it; nothing is sent or copied. Gradients flow to the local tensors.
    """
    kinds = torch_sharded_tensor_types()
    if not isinstance(st, kinds.sharded_tensor):
        raise ArgumentTypeError(
            "st of from_torch_sharded_tensor",
            expected="a torch.distributed._shard.sharded_tensor.ShardedTensor",
            got=type(st).__name__,
        )
    group: ProcessGroup = st._process_group
    with heard_by_all("from_torch_sharded_tensor", communicator(group)):
        metadata, local = st.metadata(), st.local_shards()
        given = local[0].tensor if local else metadata.tensor_properties
        properties = TensorProperties(
            dtype=given.dtype,
            requires_grad=given.requires_grad,
            pin_memory=local[0].tensor.is_pinned() if local else given.pin_memory,
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(shard.tensor, _ours(shard.metadata)) for shard in local],
            ShardedTensorMetadata(
                [_ours(shard) for shard in metadata.shards_metadata], metadata.size, properties
            ),
            process_group=group,
        )


def _ours(shard: Any) -> ShardMetadata:
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, shard.placement)


def to_torch_sharded_tensor(st: torch.Tensor) -> Any:
    """A sharded tensor as torch's own ShardedTensor of the same local tensors.

    All ranks of the group call it; nothing is sent or copied. torch's class holds every element
    once: replicas and pending sums are refused. Boxes without elements, of which it takes two at
    one place to overlap, are left out. Gradients of the local tensors stay theirs.
    """
    if not isinstance(st, ShardedTensor):
        raise ArgumentTypeError(
            "st of to_torch_sharded_tensor", expected="a ShardedTensor", got=type(st).__name__
        )
    state = live_state(st)
    kinds = torch_sharded_tensor_types()
    with heard_by_all("to_torch_sharded_tensor", state.comm):
        _check_holdable(state)
        local = [
            kinds.shard(shard.tensor, _theirs(shard.metadata, kinds))
            for shard in local_shards_of(state)
            if not shard.metadata.box.is_empty
        ]
        return kinds.sharded_tensor._init_from_local_shards_and_global_metadata(
            local, _metadata(state, kinds), process_group=state.process_group
        )


def _theirs(shard: ShardMetadata, kinds: TorchShardedTensorTypes) -> Any:
    placement = str(shard.placement)
    return kinds.shard_metadata(list(shard.shard_offsets), list(shard.shard_sizes), placement)


def _metadata(state: State, kinds: TorchShardedTensorTypes) -> Any:
    metadata = metadata_of(state)
    found = metadata.tensor_properties
    properties = kinds.properties(
        dtype=found.dtype, requires_grad=found.requires_grad, pin_memory=found.pin_memory
    )
    shards = [shard for shard in metadata.shards_metadata if not shard.box.is_empty]
    return kinds.tensor_metadata(
        [_theirs(shard, kinds) for shard in shards], metadata.size, properties
    )


def _check_holdable(state: State) -> None:
    """Raises, saying why, if torch's class cannot hold the tensor."""
    layout, why = state.layout, None
    if layout.pending is not None:
        why = f"a {layout.pending} is pending"
    elif 0 in layout.shape:
        why = "it has no elements"
    elif _has_replicas(layout):
        why = "it has replicas"
    elif not all(shard.is_contiguous() for shard in state.shards):
        why = "a local tensor is not contiguous"
    elif state.process_group is None:
        why = "it belongs to no process group of torch"
    if why is not None:
        raise LayoutError(
            f"to_torch_sharded_tensor of a ShardedTensor of shape {layout.shape}",
            rank=state.rank,
            expected="what torch's class can hold: elements, each once and in order",
            got=f"{why}: {layout}",
            fix="Reshard replicas and pending sums, shardwise.reshard(st, shardwise.chunk(0)); "
            "make local tensors contiguous by st.contiguous().",
        )


def _has_replicas(layout: Layout) -> bool:
    boxes = [box for box in layout.boxes if not box.is_empty]
    return len(set(boxes)) < len(boxes)
