"""State dicts of FSDP2 modules, with and without tensor parallelism, and sharded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from shardwise import ShardingPlan
from shardwise.sharding_spec import MeshShardingSpec
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from pathlib import Path


def _net(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6))


def _fully_sharded(seed: int, *, is_2d: bool) -> Any:
    """FSDP2 over all ranks, or over halves of tensor-parallel modules, which strides the shards."""
    model = _net(seed)
    if not is_2d:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def _converted(rank: int, folder: str) -> None:
    specs = {"0.*": "block_cyclic(0, 3)", "2.weight": "chunk(1)", "2.bias": "on_rank(3)"}
    plan = ShardingPlan(specs)
    wanted = _net(0).state_dict()
    for is_2d in (False, True):
        theirs = _fully_sharded(0, is_2d=is_2d).state_dict()
        state = {name: shardwise.from_dtensor(value) for name, value in theirs.items()}
        ours = shardwise.shard_module(_net(1), plan, src_rank=None)
        ours.load_state_dict(state)
        for name, value in ours.state_dict().items():
            assert torch.equal(value.full_tensor(), wanted[name]), (is_2d, name)

        other = _fully_sharded(1, is_2d=is_2d)
        other.load_state_dict(
            {
                name: _like(value.detach(), ours.state_dict()[name])
                for name, value in other.state_dict().items()
            }
        )
        for name, value in other.state_dict().items():
            found = shardwise.from_dtensor(value).full_tensor()
            assert torch.equal(found, wanted[name]), (is_2d, name)
            back = shardwise.to_dtensor(shardwise.from_dtensor(value), value.device_mesh)
            assert back.placements == value.placements
            assert back.to_local().data_ptr() == value.to_local().data_ptr()

        dcp.save(state, checkpoint_id=f"{folder}/{is_2d}")  # its boxes, strided or not
        again = _fully_sharded(2, is_2d=is_2d)
        loaded = again.state_dict()
        dcp.load(
            {name: shardwise.from_dtensor(value) for name, value in loaded.items()},
            checkpoint_id=f"{folder}/{is_2d}",
        )
        for name, value in again.state_dict().items():  # whose memory it was
            assert torch.equal(shardwise.from_dtensor(value).full_tensor(), wanted[name])


def _like(dtensor: Any, st: shardwise.ShardedTensor) -> torch.Tensor:
    spec = MeshShardingSpec(dtensor.device_mesh, dtensor.placements)
    moved = shardwise.reshard(st.detach(), spec)
    return shardwise.to_dtensor(moved, dtensor.device_mesh, dtensor.placements)


def test_state_dicts_of_fsdp2_modules_go_both_ways(tmp_path: Path) -> None:
    run_local(_converted, 4, str(tmp_path))
