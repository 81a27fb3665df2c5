"""From a layout back to a spec that gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.geometry.box import Box
from shardwise.metadata import TensorProperties
from shardwise.placement import placement_at
from shardwise.sharding_spec.fixed import FixedShardingSpec
from shardwise.sharding_spec.infer import _infer_sharding_spec_from_shards_metadata
from shardwise.sharding_spec.replicated import PartialShardingSpec, ReplicatedShardingSpec

if TYPE_CHECKING:
    from shardwise.geometry.layout import Layout
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["spec_of"]


def spec_of(layout: Layout, device: str | torch.device) -> ShardingSpec:
    """The simplest spec whose layout, for a tensor of its shape, is `layout`."""
    placements = [placement_at(rank, device) for rank in layout.ranks]
    fixed = FixedShardingSpec(layout, device)
    found: ShardingSpec = fixed
    if layout.is_replicated:
        found = ReplicatedShardingSpec(placements)
    elif layout.pending is not None and layout.replicas_of(Box.whole(layout.shape)):
        found = PartialShardingSpec(placements, layout.pending)
    elif layout.pending is None and layout.has_every_box_once and len(layout):
        properties = TensorProperties(dtype=torch.float32)  # which no spec looks at
        metadata = fixed.build_metadata(torch.Size(layout.shape), properties)
        found = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
    return found if found.layout(layout.shape) == layout else fixed
