"""Whether shards, metadata and a spec fit together, as one rank sees it.

Messages keep the phrases that callers of the seed look for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.errors import ArgumentTypeError, MetadataError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import rank_of
from shardwise.sharded_tensor.metadata_of_shards import check_dense, settled_inside
from shardwise.sharding_spec._internals import (
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharding_spec.infer import _infer_sharding_spec_from_shards_metadata
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box, Layout
    from shardwise.sharded_tensor.shard import Shard

__all__ = ["box_inside", "check_metadata", "check_properties", "described_spec", "matched"]


def check_metadata(metadata: object) -> None:
    """Raises unless it is a ShardedTensorMetadata."""
    if not isinstance(metadata, ShardedTensorMetadata):
        raise ArgumentTypeError(
            "sharded_tensor_metadata",
            expected="a ShardedTensorMetadata",
            got=type(metadata).__name__,
        )


def described_spec(
    metadata: ShardedTensorMetadata, spec: ShardingSpec | None = None
) -> ShardingSpec:
    """A spec that gives the shards of `metadata`: `spec`, which has to, or else one for them.

    Without a spec the shards must cover the tensor, each element once; a spec may have replicas.
    """
    if not metadata.shards_metadata:
        raise MetadataError(
            "shards_metadata must not be empty!", fix="List the shards of all ranks."
        )
    if metadata.tensor_properties.layout != torch.strided:
        raise MetadataError(
            "Only torch.strided layout is currently supported",
            got=metadata.tensor_properties.layout,
        )
    size = tuple(metadata.size)
    shards = settled_inside(metadata.shards_metadata, size)
    if spec is None:
        validate_non_overlapping_shards_metadata(shards)
        check_tensor(shards, size)
        return _infer_sharding_spec_from_shards_metadata(shards)
    if not isinstance(spec, ShardingSpec):
        raise ArgumentTypeError("sharding_spec", expected="a ShardingSpec", got=type(spec).__name__)
    own = spec.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata
    if _entries(settled_inside(own, size)) != _entries(shards):
        raise MetadataError(
            "sharded_tensor_metadata does not match with sharding_spec",
            expected=f"the shards of {spec!s:.200}: {_shown(own)}",
            got=_shown(shards),
        )
    return spec


def _entries(shards: Sequence[ShardMetadata]) -> list[tuple[Box, int]]:
    return sorted((shard.box, rank_of(shard.placement)) for shard in shards)


def _shown(shards: Sequence[ShardMetadata], most: int = 8) -> str:
    shown = ", ".join(f"{shard.box} on rank {rank_of(shard.placement)}" for shard in shards[:most])
    return shown + (f" and {len(shards) - most} more" if len(shards) > most else "")


def check_properties(shard: Shard, properties: TensorProperties, rank: int) -> None:
    """The local tensor is what its own metadata and the tensor's properties say."""
    tensor, placement = shard.tensor, shard.metadata.placement
    device = None if placement is None else placement.device()
    metadata, whole = "local ShardMetadata", "tensor property"
    for name, against, expected, got in (
        ("layout", whole, properties.layout, tensor.layout),
        ("size", metadata, list(shard.metadata.shard_sizes), list(tensor.shape)),
        ("pin_memory", whole, properties.pin_memory, tensor.is_pinned()),
        ("device", metadata, device or tensor.device, tensor.device),
        ("dtype", whole, properties.dtype, tensor.dtype),
        ("requires_grad", whole, properties.requires_grad, tensor.requires_grad),
    ):
        if expected != got:
            raise MetadataError(
                f"Local shards' tensor {name} property is incompatible with {against} on rank "
                f"{rank}",
                rank=rank,
                expected=f"{name}={expected}",
                got=f"{name}={got}",
            )
    check_dense(tensor, rank)


def matched(shards: Sequence[Shard], layout: Layout, rank: int) -> list[torch.Tensor]:
    """The tensors in the order of `layout.boxes_of(rank)`; raises if the boxes are others."""
    placed = sorted(
        ((box_inside(shard.metadata, layout), shard.tensor) for shard in shards), key=lambda p: p[0]
    )
    boxes = tuple(box for box, _ in placed)
    if boxes != layout.boxes_of(rank):
        raise MetadataError(
            "local shards",
            rank=rank,
            expected=f"the boxes of this rank: {', '.join(map(str, layout.boxes_of(rank))) or '-'}",
            got=", ".join(map(str, boxes)) or "none",
        )
    return [tensor for _, tensor in placed]


def box_inside(shard: ShardMetadata, layout: Layout) -> Box:
    """The shard's box; one without elements past the tensor's end stands at it."""
    (settled,) = settled_inside([shard], layout.shape)
    return settled.box
