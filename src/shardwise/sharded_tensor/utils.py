"""Door: the seed's path of checks of shards and their metadata."""

from shardwise.sharded_tensor.metadata_of_shards import (
    _flatten_tensor_size,
    _parse_and_validate_remote_device,
    build_global_metadata,
    build_metadata_from_local_shards,
    recalc_global_sharded_tensor_metadata,
)

__all__ = [
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "recalc_global_sharded_tensor_metadata",
]
