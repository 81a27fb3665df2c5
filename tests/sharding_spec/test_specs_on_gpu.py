"""Specs under NCCL. Run where there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise
from shardwise.sharding_spec import MeshShardingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A default process group of this one process, on NCCL."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_the_default_device_under_nccl_is_the_ranks_own_gpu() -> None:
    spec = shardwise.chunk(0)
    assert [str(placement) for placement in spec.placements] == ["rank:0/cuda:0"]
    assert spec.local_devices((4,), 0) == (torch.device("cuda:0"),)


@pytest.mark.usefixtures("nccl")
def test_a_mesh_of_gpus_places_shards_on_gpus() -> None:
    torch.cuda.set_device(0)  # which DeviceMesh warns of otherwise
    spec = MeshShardingSpec(init_device_mesh("cuda", (1,)), [Shard(0)])
    assert spec.local_devices((4,), 0) == (torch.device("cuda:0"),)
