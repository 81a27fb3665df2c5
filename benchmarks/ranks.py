"""What benchmarks on local ranks share: a clock that all ranks obey, and quiet peers."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist

from benchmarks.harness import Clock


def clock() -> Clock:
    """A sample lasts as long as its slowest rank; all ranks start together."""

    def slowest(seconds: float) -> float:
        agreed = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.item()

    return Clock(line_up=dist.barrier, agree=slowest)


def quiet_peers() -> None:
    """torch's ShardedTensor is deprecated, and DTensor says when it gathers instead."""
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)


def group_name(shape: tuple[int, ...], world_size: int) -> str:
    return f"{world_size} ranks, {' x '.join(map(str, shape))}"
