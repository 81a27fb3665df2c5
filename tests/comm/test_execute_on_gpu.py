"""Plans carried out on a GPU, as far as one goes. Run where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.comm import Transfer, execute, execute_all
from shardwise.comm.simulate import simulate
from shardwise.geometry import Box, Layout
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

PAIRS = [
    ("chunk(0)", "chunk(1)"),
    ("chunk(1)", "replicate()"),
    ("partial()", "chunk(0)"),
    ("partial('avg')", "replicate()"),
    ("replicate()", "partial('max')"),
    ("block_cyclic(0, 2)", "flat()"),
]


def _layouts(num_ranks: int) -> list[tuple[Layout, Layout]]:
    ranks = range(num_ranks)
    return [
        (
            shardwise.parse_spec(source, ranks=ranks, device="cpu").layout((8, 12)),
            shardwise.parse_spec(target, ranks=ranks, device="cpu").layout((8, 12)),
        )
        for source, target in PAIRS
    ]


def _moved(rank: int, devices: list[str], max_bytes: int | None) -> list[list[torch.Tensor]]:
    """Every pair, from this rank's device to the same one; results on the CPU."""
    found = []
    for source, target in _layouts(len(devices)):
        shards = [shard.to(devices[rank]) for shard in random_shards(source).get(rank, [])]
        plan = plan_reshard(source, target, 4)
        moved = execute(
            plan, shards, dtype=torch.float32, device=devices[rank], max_bytes=max_bytes
        )
        assert {tensor.device.type for tensor in moved} <= {torch.device(devices[rank]).type}
        found.append([tensor.cpu() for tensor in moved])
    return found


def _check(results: list[list[list[torch.Tensor]]]) -> None:
    for k, (source, target) in enumerate(_layouts(len(results))):
        found = assemble(target, {rank: held[k] for rank, held in enumerate(results)})
        torch.testing.assert_close(found, assemble(source, random_shards(source)))


@pytest.mark.parametrize("max_bytes", [None, 64])
def test_gpu_and_cpu_boxes_mix_over_gloo(max_bytes: int | None) -> None:
    """Two processes share the GPU; a third stays on the CPU."""
    devices = ["cuda", "cpu", "cuda"]
    _check(shardwise.run_local(_moved, 3, devices, max_bytes, timeout=180.0))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gpu_and_cpu_boxes_mix_in_the_simulator(backend: str) -> None:
    devices = ["cuda", "cpu", "cuda", "cuda"]
    _check(simulate(_moved, 4, devices, None, backend=backend).results)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_rank_moves_its_boxes_over_nccl(tmp_path: Path, backend: str) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        rows = Layout((8, 12), [Box((0, 0), (3, 12)), Box((3, 0), (8, 12))], [0, 0])
        columns = shardwise.chunk(1, ranks=[0, 0, 0]).layout((8, 12))
        addends = Layout((8, 12), [Box.whole((8, 12))] * 2, [0, 0], terms=[0, 1], pending="sum")
        for source, target in ((rows, columns), (addends, columns)):
            for device in ("cuda", "cpu"):
                shards = [shard.to(device) for shard in random_shards(source)[0]]
                moved = execute(plan_reshard(source, target, 4), shards)
                found = assemble(target, {0: [tensor.cpu() for tensor in moved]})
                torch.testing.assert_close(found, assemble(source, random_shards(source)))
    finally:
        dist.destroy_process_group()


def _many(rank: int) -> bool:
    """Many small tensors of several dtypes on the GPU in one exchange."""
    source, target = _layouts(2)[0]
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool] * 16
    transfers = [
        Transfer(
            plan_reshard(source, target, dtype.itemsize),
            [shard.cuda() for shard in random_shards(source, dtype, seed=k)[rank]],
        )
        for k, dtype in enumerate(dtypes)
    ]
    moved = execute_all(transfers)
    (box,) = target.boxes_of(rank)
    for k, dtype in enumerate(dtypes):
        full = assemble(source, random_shards(source, dtype, seed=k))
        if not torch.equal(moved[k][0].cpu().float(), full[box.slices()].float()):
            return False
    return True


def test_many_tensors_on_the_gpu_share_an_exchange() -> None:
    assert shardwise.run_local(_many, 2, timeout=180.0) == [True, True]
