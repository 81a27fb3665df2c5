"""The same cuts and ranks on another device."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise._torch_compat import remote_device
from shardwise.metadata import ShardMetadata
from shardwise.placement import Placement, placement_at, rank_of
from shardwise.sharding_spec.fixed import FixedShardingSpec
from shardwise.sharding_spec.mesh import MeshShardingSpec
from shardwise.sharding_spec.spec import BuiltinSpec, ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["on_device"]


def on_device(spec: ShardingSpec, shape: Sequence[int], device: str | torch.device) -> ShardingSpec:
    """Spec with the layout of `spec` whose shards are on `device`, each on its rank's own GPU.

    Of the same kind as `spec`, unless that is a user's own: then it is fixed to this shape.
    """

    def place(placement: Placement) -> Placement:
        return placement_at(rank_of(placement), device)

    if type(spec) is MeshShardingSpec:
        ranks = np.array(spec.ranks).reshape(spec.mesh_shape)
        return MeshShardingSpec(ranks, spec.placements, str(device))
    if isinstance(spec, BuiltinSpec) and type(spec).__module__.startswith("shardwise."):
        if isinstance(spec, FixedShardingSpec):
            return FixedShardingSpec(spec.fixed, device)
        values = {field.name: _placed(getattr(spec, field.name), place) for field in fields(spec)}  # type: ignore[arg-type]  # all are dataclasses
        return type(spec)(**values)
    return FixedShardingSpec(spec.layout(shape), device)


def _placed(value: Any, place: Callable[[Placement], Placement]) -> Any:
    if isinstance(value, remote_device):
        return place(value)
    if isinstance(value, ShardMetadata):
        placement = None if value.placement is None else place(value.placement)
        return ShardMetadata(value.shard_offsets, value.shard_sizes, placement)
    if isinstance(value, list):
        return [_placed(item, place) for item in value]
    return value
