"""Placements that name RPC workers, with a real RPC group on loopback."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import rpc

from shardwise.errors import PlacementError
from shardwise.sharding_spec import ChunkShardingSpec
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from pathlib import Path


def _owners_by_worker_name(rank: int, rendezvous: str) -> tuple[tuple[int, ...], str]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}")
    start: Any = rpc.init_rpc  # not typed
    start(f"trainer{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        layout = ChunkShardingSpec(0, ["trainer1/cpu", "trainer0/cpu"]).layout((4,))
        with pytest.raises(PlacementError) as caught:
            ChunkShardingSpec(0, ["ps0/cpu"]).layout((4,))
        return tuple(layout.owners.tolist()), str(caught.value)
    finally:
        rpc.shutdown()


def test_a_workers_name_is_its_rank(tmp_path: Path) -> None:
    for owners, message in run_local(_owners_by_worker_name, 2, str(tmp_path / "rpc")):
        assert owners == (1, 0)
        assert "Invalid worker name: ps0: expected one of ['trainer0', 'trainer1']" in message
