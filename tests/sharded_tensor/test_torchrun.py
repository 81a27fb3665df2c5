"""Under torchrun, as users start it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist

import shardwise

dist.init_process_group("gloo")
rank = dist.get_rank()
left = dist.new_group([0])
full = torch.arange(12.0).view(4, 3)
rows = shardwise.chunk(0, ranks=[0])
if rank == 0:
    leaf = shardwise.distribute(full.clone().requires_grad_(), rows, process_group=left)
    x = leaf
else:
    x = shardwise.absent(rows.layout((4, 3)), torch.float32, requires_grad=True)
there = shardwise.reshard(x, shardwise.chunk(1, ranks=[1]), process_group=dist.group.WORLD)
assert bool(there.local_shards()) == (rank == 1)
back = shardwise.reshard(there, rows)
assert bool(back.local_shards()) == (rank == 0)
assert torch.equal(back.full_tensor(), full)
(back.full_tensor() ** 2).sum().backward()
if rank == 0:
    assert torch.equal(leaf.grad.full_tensor(), 2 * full)
print(f"rank {rank} is done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_tensor_goes_to_other_ranks_and_back_with_its_gradient(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2))
