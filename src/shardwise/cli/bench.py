"""`shardwise bench`: how fast tensors move here, beside DTensor."""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import Json  # noqa: TC001  # typer reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["bench"]

_CASES = {  # name -> our target, DTensor's placements
    "rows to columns": ("chunk(1)", "Shard(1)"),
    "rows to copies on all ranks": ("replicate()", "Replicate()"),
    "rows to rows of other sizes": ("chunk(0, sizes={uneven})", None),
    "rows to ranks in another order": ("chunk(0, ranks={rotated})", None),
}


def bench(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Local processes.")] = 4,
    side: Annotated[int, typer.Option(min=64, help="A square float32 tensor of this side.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 5,
    as_json: Json = False,
) -> None:
    """Move a tensor between layouts on local processes (gloo), beside DTensor.

    Medians of interleaved samples; each lasts as long as its slowest rank.
    The benchmarks of the repository (make bench) have more cases and peers.

    \b
    Examples:
      shardwise bench
      shardwise bench --ranks 2 --side 1024 --repeats 9 --json
    """
    from shardwise.testing.local_run import run_local

    found = run_local(_measure, ranks, side, repeats, timeout=600)[0]
    if as_json:
        print(json.dumps({"ranks": ranks, "side": side, "milliseconds": found}, indent=2))
        return
    print(f"{side} x {side} float32 on {ranks} local ranks, gloo; milliseconds\n")
    print(f"{'':32}{'shardwise':>10}{'DTensor':>10}{'ratio':>8}")
    for name, times in found.items():
        ours, other = times["shardwise"], times.get("DTensor")
        rest = f"{'cannot':>10}" if other is None else f"{other:10.1f}{ours / other:8.2f}"
        print(f"{name:32}{ours:10.1f}{rest}")


def _measure(rank: int, side: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of all cases in milliseconds; on every rank the same."""
    import logging

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import shardwise

    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor says when it gathers instead
    world_size = dist.get_world_size()
    full = torch.arange(float(side * side)).view(side, side)
    mine = shardwise.distribute(full, shardwise.chunk(0), src_rank=None)
    mesh = init_device_mesh("cpu", (world_size,))
    theirs = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    placements = {"Shard(1)": Shard(1), "Replicate()": Replicate()}
    found = {}
    for name, (target, placement) in _CASES.items():
        spec = shardwise.parse_spec(
            target.format(uneven=_uneven(side, world_size), rotated=_rotated(world_size)),
            ranks=range(world_size),
            device="cpu",
        )
        runs: dict[str, Callable[[], Any]] = {"shardwise": partial(shardwise.reshard, mine, spec)}
        if placement is not None:
            runs["DTensor"] = partial(theirs.redistribute, mesh, [placements[placement]])
        assert torch.equal(runs["shardwise"]().local_tensor(), _expected(full, spec, rank))
        found[name] = _interleaved(runs, repeats)
    return found


def _uneven(side: int, world_size: int) -> list[int]:
    """Sizes in the proportions 1, 2, 3, ..., of which the last takes what is left."""
    total = world_size * (world_size + 1) // 2
    sizes = [side * (k + 1) // total for k in range(world_size - 1)]
    return [*sizes, side - sum(sizes)]


def _rotated(world_size: int) -> list[int]:
    return [(k + 1) % world_size for k in range(world_size)]


def _expected(full: torch.Tensor, spec: Any, rank: int) -> torch.Tensor:
    (box,) = spec.layout(tuple(full.shape)).boxes_of(rank)
    return full[box.slices()]


def _interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, the slowest rank's; one run of each is not counted."""
    import torch
    import torch.distributed as dist

    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        for name, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:
                samples[name].append(1e3 * took.item())
    return {name: statistics.median(found) for name, found in samples.items()}
