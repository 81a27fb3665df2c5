"""Every private name of torch that shardwise uses, and nothing else.

Supported: torch 2.11 to 2.13. When a release moves a name, this is the file to change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.remote_device import _remote_device

__all__ = ["MeshPlacementTypes", "mesh_placement_types", "remote_device", "rpc_worker_ranks"]

remote_device = _remote_device


class MeshPlacementTypes(NamedTuple):
    """DTensor's placement classes."""

    shard: type
    strided_shard: type
    replicate: type
    partial: type


def mesh_placement_types() -> MeshPlacementTypes:
    """DTensor's placement classes; imported here because they take a second to import."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    return MeshPlacementTypes(Shard, _StridedShard, Replicate, Partial)


def rpc_worker_ranks() -> dict[str, int] | None:
    """RPC worker names and their ranks, or None where RPC is not running."""
    from torch.distributed import rpc

    if not rpc.is_available():
        return None
    private: Any = rpc
    if not private._is_current_rpc_agent_set():
        return None
    return {w.name: w.id for w in private._get_current_rpc_agent().get_worker_infos()}
