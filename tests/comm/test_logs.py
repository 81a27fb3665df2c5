from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

import shardwise
from shardwise.comm.simulate import simulate

if TYPE_CHECKING:
    import pytest

PLAN = shardwise.ShardingPlan({"weight": "chunk(0)", "bias": "replicate()"})


def _work(rank: int) -> None:
    model = shardwise.shard_module(torch.nn.Linear(4, 6), PLAN)
    shardwise.reshard_module(model, shardwise.ShardingPlan({"weight": "chunk(1)"}))
    weight = model.weight
    assert isinstance(weight, shardwise.ShardedTensor)
    weight.gather(1)
    shardwise.reshard_all([weight.detach()], shardwise.replicate(ranks=[0, 1]))
    shardwise.distribute(torch.ones(4), shardwise.chunk(0, ranks=[0, 1]))


def test_info_tells_of_phases_on_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardwise"):
        simulate(_work, 2)
    begun = [m for m in caplog.messages if " done in " not in m]
    assert begun == [
        "sharding 120 B on 2 ranks",
        "resharding 96 B on 2 ranks",
        "gathering 96 B on 2 ranks",
        "resharding 96 B on 2 ranks",
        "distributing 16 B on 2 ranks",
    ]
    done = [m for m in caplog.messages if " done in " in m]
    sent = [re.findall(r"(\d+) exchanges?, (\d+ B) between ranks, [\d.]+ GB/s", m) for m in done]
    # Half of the weight and the bias; two quarters; half; two halves; half of four floats. Beside
    # what is gathered and what is distributed fly the digests of two ranks.
    moved = [("1", "72 B"), ("1", "48 B"), ("2", "80 B"), ("1", "96 B"), ("2", "40 B")]
    assert sent == [[one] for one in moved]


def test_debug_tells_of_each_exchange_on_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    def move(rank: int) -> None:
        x = shardwise.sharded_tensor.ones(shardwise.chunk(0, ranks=[0, 1]), 4, 4)
        shardwise.reshard(x, shardwise.chunk(1, ranks=[0, 1]))

    with caplog.at_level(logging.DEBUG, logger="shardwise"):
        simulate(move, 2)
    told = sorted(m for m in caplog.messages if "reshard" in m)
    pattern = r"\[rank {}\] reshard at test_logs.py:\d+: sent 16 B, received 16 B of 32 B between 2"
    assert len(told) == 2
    assert all(re.match(pattern.format(rank), told[rank]) for rank in (0, 1))


def test_the_log_is_quiet_until_it_is_asked_for() -> None:
    code = """
import torch, shardwise
shardwise.init_single()
x = shardwise.distribute(torch.ones(4, 4), shardwise.chunk(0))
x.gather(0)
shardwise.reshard_all([x], shardwise.replicate())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""
