"""Sharding a model of many parameters: ours, torch's ShardedTensor and DTensor, for `train.py`."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import clock, mesh, most_over_ranks
from shardwise import ShardingPlan
from shardwise.testing.memory import peak_growth

if TYPE_CHECKING:
    from benchmarks.report import Options, Report

DTENSOR, SEED = "DTensor", "torch"
NUM_PARAMETERS, WIDTH, HEIGHT, QUICK_HEIGHT = 200, 1024, 1312, 64  # 1 GiB of float32
MAX_BYTES = 1 << 26
PEAK = "peak of other ranks beyond their share, MiB"


class Tensors:
    """The values of a model, from which modules are made without a copy."""

    def __init__(self, height: int, device: str) -> None:
        shape = (height, WIDTH)
        self.values = [torch.full(shape, float(k), device=device) for k in range(NUM_PARAMETERS)]
        self.dims = [k % 2 for k in range(NUM_PARAMETERS)]  # along which each is cut

    def module(self) -> nn.Module:
        layers = nn.ModuleList()
        for value in self.values:
            layer = nn.Linear(1, 1, bias=False, device="meta")
            layer.weight = nn.Parameter(value)
            layers.append(layer)
        return layers


def sharded_by_us(tensors: Tensors, max_bytes: int | None = None) -> nn.Module:
    plan = {f"{k}.weight": f"chunk({dim})" for k, dim in enumerate(tensors.dims)}
    return shardwise.shard_module(tensors.module(), ShardingPlan(plan), max_bytes=max_bytes)


def sharded_by_torch(tensors: Tensors) -> nn.Module:
    api = importlib.import_module("torch.distributed._shard.api")
    plans = importlib.import_module("torch.distributed._shard.sharding_plan")
    specs = importlib.import_module("torch.distributed._shard.sharding_spec")
    places = [f"rank:{k}/cpu" for k in range(dist.get_world_size())]
    cuts = [specs.ChunkShardingSpec(dim, places) for dim in (0, 1)]
    plan = {f"{k}.weight": cuts[dim] for k, dim in enumerate(tensors.dims)}
    module = tensors.module()
    api.shard_module(module, plans.ShardingPlan(plan=plan))
    return module


def sharded_by_dtensor(tensors: Tensors) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        str(k): RowwiseParallel() if dim else ColwiseParallel()
        for k, dim in enumerate(tensors.dims)
    }
    return parallelize_module(tensors.module(), mesh(), plan)


def shard(rank: int, options: Options) -> Result:
    height = QUICK_HEIGHT if options.quick else HEIGHT
    full = Tensors(height, "cpu")
    mine = full if rank == 0 else Tensors(height, "meta")
    systems: dict[str, System] = {
        "ours": lambda: sharded_by_us(mine),
        SEED: lambda: sharded_by_torch(full),
        DTENSOR: lambda: sharded_by_dtensor(full),
    }
    last: Any = sharded_by_us(mine)
    piece = last[-1].weight.local_tensor()
    assert bool((piece == NUM_PARAMETERS - 1).all())
    world_size = dist.get_world_size()
    assert piece.shape == (height, WIDTH // world_size)
    del last, piece
    share = 4 * NUM_PARAMETERS * height * WIDTH // world_size
    grown = peak_growth(lambda: sharded_by_us(mine, MAX_BYTES)) - share
    # Not of the first rank: the source has the model, and what it sends.
    counts = {PEAK: {"ours": most_over_ranks(grown if rank else 0) >> 20}}
    counts[PEAK]["max_bytes"] = MAX_BYTES >> 20
    case = Case(shard_name(height), systems, group=shard_group(world_size), counts=counts)
    return measure(case, repeats=options.repeats, budget_s=2 * options.budget_s, clock=clock())


def shard_name(height: int) -> str:
    return f"{NUM_PARAMETERS} parameters of {height} x {WIDTH}"


def shard_group(world_size: int) -> str:
    return f"shard, {world_size} ranks"


def bars_of_sharding(report: Report) -> None:
    for world_size in (2, 4):
        ratio = partial(
            report.check_ratio, shard_name(HEIGHT), group=shard_group(world_size), limit=1.0
        )
        ratio(system=SEED)
        ratio(system=DTENSOR)
    if not report.options.quick:
        report.check_count(PEAK, system="ours", limit=MAX_BYTES >> 20, unit="MiB")
