"""Placements that name RPC workers, with a real RPC group on loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardwise.errors import PlacementError
from shardwise.sharding_spec import ChunkShardingSpec
from shardwise.testing.local_run import run_local
from shardwise.testing.rpc_workers import rpc_workers

if TYPE_CHECKING:
    from pathlib import Path


def _owners_by_worker_name(rank: int, rendezvous: str) -> tuple[tuple[int, ...], str]:
    with rpc_workers(rendezvous, rank, 2):
        layout = ChunkShardingSpec(0, ["trainer1/cpu", "trainer0/cpu"]).layout((4,))
        with pytest.raises(PlacementError) as caught:
            ChunkShardingSpec(0, ["ps0/cpu"]).layout((4,))
        return tuple(layout.owners.tolist()), str(caught.value)


def test_a_workers_name_is_its_rank(tmp_path: Path) -> None:
    for owners, message in run_local(_owners_by_worker_name, 2, str(tmp_path / "rpc")):
        assert owners == (1, 0)
        assert "Invalid worker name: ps0: expected one of ['trainer0', 'trainer1']" in message
