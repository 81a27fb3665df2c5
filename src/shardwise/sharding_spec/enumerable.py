"""Every shard named, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import items
from shardwise.errors import ArgumentTypeError, SpecError
from shardwise.frozen_list import FrozenList
from shardwise.metadata import ShardMetadata, shard_boxes
from shardwise.sharding_spec._internals import (
    check_tensor,
    distinct_shards,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharding_spec.spec import BuiltinSpec, Pieces, ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["EnumerableShardingSpec"]


@dataclass(frozen=True)
class EnumerableShardingSpec(BuiltinSpec):
    """Any tiling: the caller lists all shards, which must cover the tensor without overlap.

    Identical boxes are an overlap unless `replicas=True`; then each rank that names a box holds
    a copy of it. Boxes that overlap in part are never allowed.
    """

    shards: list[ShardMetadata]
    replicas: bool = False

    def __init__(self, shards: Iterable[ShardMetadata], replicas: bool = False) -> None:
        given = items(shards, "EnumerableShardingSpec.shards", of="ShardMetadata")
        listed = [_copy(shard, row) for row, shard in enumerate(given)]
        if not listed:
            raise SpecError(
                f"Empty shard list provided: {shards}", expected="at least one ShardMetadata"
            )
        dims = [len(shard.shard_offsets) for shard in listed]
        if odd := next((row for row, n in enumerate(dims) if n != dims[0]), None):
            raise SpecError(
                f"Found inconsistent ranks for shards: {dims[0]} and {dims[odd]}",
                expected="one number of dims",
                got=f"{listed[0]} and {listed[odd]}",
            )
        validate_non_overlapping_shards_metadata(distinct_shards(listed) if replicas else listed)
        object.__setattr__(self, "shards", FrozenList(listed))
        object.__setattr__(self, "replicas", replicas)

    # Not kept per shape: callers assign the placements of `shards` (TorchRec does).
    layout = ShardingSpec.layout
    local_devices = ShardingSpec.local_devices
    _local_placements = ShardingSpec._local_placements

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        check_tensor(distinct_shards(self.shards) if self.replicas else self.shards, shape)
        placements = [shard.placement for shard in self.shards]
        return Pieces(shard_boxes(self.shards), np.arange(len(self.shards)), placements)


def _copy(shard: ShardMetadata, row: int) -> ShardMetadata:
    """The spec's own object: the caller may go on and assign its placement."""
    if not isinstance(shard, ShardMetadata):
        raise ArgumentTypeError(
            f"EnumerableShardingSpec.shards[{row}]",
            expected="a ShardMetadata",
            got=f"{type(shard).__name__}: {shard!r}",
            fix="E.g. ShardMetadata([0, 0], [4, 6], 'rank:0/cpu').",
        )
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, shard.placement)
