"""Specs as plain values (lists, ints, strings), for files that strangers may write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise._torch_compat import mesh_placement_types, remote_device
from shardwise.errors import ShardwiseError, SpecError
from shardwise.geometry.plain_layouts import layout_from_plain, plain_layout
from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec.block_cyclic import BlockCyclicShardingSpec
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec
from shardwise.sharding_spec.fixed import FixedShardingSpec
from shardwise.sharding_spec.flat import FlatShardingSpec
from shardwise.sharding_spec.fused import FusedShardingSpec
from shardwise.sharding_spec.grid import GridShardingSpec
from shardwise.sharding_spec.mesh import MeshShardingSpec
from shardwise.sharding_spec.replicated import PartialShardingSpec, ReplicatedShardingSpec
from shardwise.words import headline

if TYPE_CHECKING:
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["plain_spec", "spec_from_plain"]

_KINDS: dict[str, Any] = {  # name -> class
    kind.__name__: kind
    for kind in (
        BlockCyclicShardingSpec,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        FixedShardingSpec,
        FlatShardingSpec,
        FusedShardingSpec,
        GridShardingSpec,
        MeshShardingSpec,
        PartialShardingSpec,
        ReplicatedShardingSpec,
    )
}


def plain_spec(spec: ShardingSpec) -> tuple[str, dict[str, Any]] | None:
    """Class name and arguments of a built-in spec as plain values; None of a user's own.

    >>> plain_spec(ChunkShardingSpec(0, ["rank:0/cpu"]))
    ('ChunkShardingSpec', {'dim': 0, 'placements': ['rank:0/cpu'], 'sizes': None})
    """
    name = type(spec).__name__
    if _KINDS.get(name) is not type(spec):
        return None
    if isinstance(spec, FixedShardingSpec):
        return name, {"layout": plain_layout(spec.fixed), "device": spec.device}
    if isinstance(spec, MeshShardingSpec):
        mesh = np.array(spec.ranks).reshape(spec.mesh_shape).tolist()
        placements = [_plain_mesh_placement(placement) for placement in spec.placements]
        return name, {"mesh": mesh, "placements": placements, "device": spec.device}
    return name, {field.name: _plain(getattr(spec, field.name)) for field in fields(_KINDS[name])}


def spec_from_plain(name: str, arguments: object) -> ShardingSpec:
    """The spec of which `plain_spec` gave these; a ShardwiseError says what is wrong with them."""
    if name not in _KINDS:
        raise SpecError("saved spec", expected=f"one of {sorted(_KINDS)}", got=repr(name))
    if not isinstance(arguments, Mapping):
        raise SpecError(f"saved {name}", expected="its arguments by name", got=f"{arguments!r:.60}")
    try:
        return _made(name, dict(arguments))
    except ShardwiseError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SpecError(f"arguments of a saved {name}", got=headline(error)) from error


def _made(name: str, arguments: dict[str, Any]) -> ShardingSpec:
    if name == "FixedShardingSpec":
        arguments["layout"] = layout_from_plain(arguments["layout"])
    elif name == "MeshShardingSpec":
        arguments["placements"] = [_mesh_placement(*words) for words in arguments["placements"]]
    elif name == "EnumerableShardingSpec":
        arguments["shards"] = [ShardMetadata(*shard) for shard in arguments["shards"]]
    spec: ShardingSpec = _KINDS[name](**arguments)
    return spec


def _plain(value: Any) -> Any:
    if isinstance(value, remote_device):
        return str(value)
    if isinstance(value, ShardMetadata):
        return [list(value.shard_offsets), list(value.shard_sizes), _plain(value.placement)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _plain_mesh_placement(placement: Any) -> list[Any]:
    known, kind = mesh_placement_types(), type(placement)
    if kind is known.shard:
        return ["shard", placement.dim]
    if kind is known.strided_shard:
        return ["strided_shard", placement.dim, placement.split_factor]
    if kind is known.partial:
        return ["partial", placement.reduce_op]
    return ["replicate"]


def _mesh_placement(kind: str, *arguments: Any) -> Any:
    known = mesh_placement_types()
    if kind == "strided_shard":
        dim, split_factor = arguments
        return known.strided_shard(dim, split_factor=split_factor)
    if kind not in ("shard", "partial", "replicate"):
        raise SpecError("saved placement of a mesh axis", got=repr(kind))
    return getattr(known, kind)(*arguments)
