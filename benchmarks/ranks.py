"""What benchmarks on local ranks share: a clock that all ranks obey, quiet peers, peaks, names."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import shardwise
from benchmarks.harness import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from benchmarks.harness import Result
    from benchmarks.report import Options, Report


SHORT = 40  # times as many samples of short exchanges, which scatter, and cost little to repeat


def clock() -> Clock:
    """A sample lasts as long as its slowest rank; all ranks start together."""

    def slowest(seconds: float) -> float:
        agreed = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.item()

    return Clock(line_up=dist.barrier, agree=slowest)


def mesh() -> DeviceMesh:
    """DTensor's mesh of one axis, all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def most_over_ranks(number: int) -> int:
    """The largest number that a rank has."""
    found = torch.tensor([number])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def quiet_peers() -> None:
    """torch's ShardedTensor is deprecated, and DTensor says when it gathers instead."""
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)


def measure_on_ranks(
    report: Report, on_rank: Callable[[int, Options], list[Result]], options: Options
) -> None:
    """Adds what `on_rank` measures on 2 and on 4 local ranks, as rank 0 saw it."""
    for world_size in (2, 4):
        print(f"{world_size} ranks ...", file=sys.stderr)
        report.results += shardwise.run_local(on_rank, world_size, options, timeout=3000)[0]


def group_name(shape: tuple[int, ...], world_size: int) -> str:
    """The table of cases of one shape."""
    return f"{world_size} ranks, {' x '.join(map(str, shape))}"
