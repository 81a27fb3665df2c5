"""Distributing and gathering on local ranks (gloo, loopback): ours, torch's ShardedTensor, DTensor.

All systems start from the same full tensor and end with tensors of their own; all ranks take the
same samples, of which each lasts as long as its slowest rank. Checks between ranks are on in ours,
as they are by default and in torch's ShardedTensor; "unchecked" is ours without, as DTensor is.
"one rank to rows" is `distribute`, torch's `_shard_tensor` and DTensor's
`distribute_tensor`; "rows to one rank" is `gather`, into a tensor that is there already; "rows to
all ranks" is `full_tensor`. "what ranks compare" is the check alone: everybody's 16 bytes on every
rank, as ours sends them, by torch's collective, and as objects, as torch's ShardedTensor does it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch
import torch.distributed as dist

import shardwise
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import SHORT, clock, group_name, measure_on_ranks, mesh, quiet_peers
from benchmarks.report import Options, Report, parse_options
from shardwise.comm import communicator
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from shardwise.geometry import Layout

SHAPES = ((8192, 8192), (8192, 512), (512, 512))
QUICK_SHAPES = ((1024, 1024), (64, 64))
SCATTER, ALL, ONE = "one rank to rows", "rows to all ranks", "rows to one rank"
COLUMNS, COMPARE = "one rank to columns", "what ranks compare"
COLLECTIVE, OBJECTS = "all-gather", "all_gather_object"


def full_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that say where they are, so that a wrong result is seen."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape).float()


def torch_systems(
    full: torch.Tensor, rank: int, out: torch.Tensor | None
) -> dict[str, System | str | None]:
    """torch's ShardedTensor."""
    api = importlib.import_module("torch.distributed._shard.api")
    specs = importlib.import_module("torch.distributed._shard.sharding_spec")
    places = [f"rank:{k}/cpu" for k in range(dist.get_world_size())]
    rows, columns = (specs.ChunkShardingSpec(dim, places) for dim in (0, 1))
    held = api._shard_tensor(full, rows)
    return {
        SCATTER: lambda: api._shard_tensor(full, rows).local_tensor(),
        COLUMNS: lambda: api._shard_tensor(full, columns).local_tensor(),
        ONE: lambda: held.gather(0, out) or out,
        ALL: "cannot",
    }


def dtensor_systems(full: torch.Tensor) -> dict[str, System | str | None]:
    from torch.distributed.tensor import Shard, distribute_tensor

    devices = mesh()
    held = distribute_tensor(full, devices, [Shard(0)])
    return {
        SCATTER: lambda: distribute_tensor(full, devices, [Shard(0)]).to_local(),
        COLUMNS: lambda: distribute_tensor(full, devices, [Shard(1)]).to_local(),
        ONE: "cannot",
        ALL: held.full_tensor,
    }


def our_systems(
    full: torch.Tensor, rank: int, out: torch.Tensor | None
) -> dict[str, System | str | None]:
    rows, columns = shardwise.chunk(0), shardwise.chunk(1)
    held = shardwise.distribute(full, rows)
    return {
        SCATTER: lambda: shardwise.distribute(full, rows).local_tensor(),
        COLUMNS: lambda: shardwise.distribute(full, columns).local_tensor(),
        ONE: lambda: held.gather(0, out),
        ALL: held.full_tensor,
    }


def unchecked_systems(full: torch.Tensor) -> dict[str, System | str | None]:
    """Ours without what ranks compare, which gathering does not do anyway."""
    rows, columns = shardwise.chunk(0), shardwise.chunk(1)

    def scatter(spec: shardwise.ShardingSpec) -> torch.Tensor:
        with shardwise.set_check("never"):
            return shardwise.distribute(full, spec).local_tensor()

    return {
        SCATTER: lambda: scatter(rows),
        COLUMNS: lambda: scatter(columns),
        ONE: None,
        ALL: None,
    }


def layouts(name: str, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """(before, after) of a case, for its plan."""
    specs = {
        SCATTER: (shardwise.on_rank(0), shardwise.chunk(0)),
        COLUMNS: (shardwise.on_rank(0), shardwise.chunk(1)),
        ONE: (shardwise.chunk(0), shardwise.on_rank(0)),
        ALL: (shardwise.chunk(0), shardwise.replicate()),
    }
    before, after = specs[name]
    return before.layout(shape), after.layout(shape)


def compare_name(world_size: int) -> str:
    return f"16 bytes of each of {world_size} ranks"


def compare(options: Options) -> Result:
    """What it costs that every rank knows a few bytes of every other."""
    members, world_size, mine = communicator(), dist.get_world_size(), bytes(16)
    sent = torch.zeros(16, dtype=torch.uint8)
    received = torch.zeros(16 * world_size, dtype=torch.uint8)
    objects: list[object] = [None] * world_size
    systems: dict[str, System | str | None] = {
        "ours": lambda: members.compare(mine, timeout=60),
        COLLECTIVE: lambda: dist.all_gather_into_tensor(received, sent),
        OBJECTS: lambda: dist.all_gather_object(objects, mine),
    }
    case = Case(COMPARE, systems, group=compare_name(world_size))
    return measure(case, repeats=options.repeats * SHORT, budget_s=options.budget_s, clock=clock())


def on_rank(rank: int, options: Options) -> list[Result]:
    quiet_peers()
    results = [compare(options)]
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        full = full_tensor(shape)
        out = torch.empty(shape) if rank == 0 else None
        systems = {
            "ours": our_systems(full, rank, out),
            "unchecked": unchecked_systems(full),
            "ShardedTensor": torch_systems(full, rank, out),
            "DTensor": dtensor_systems(full),
        }
        for name in (SCATTER, COLUMNS, ONE, ALL):
            runs = {system: found[name] for system, found in systems.items()}
            found = {system: run() for system, run in runs.items() if callable(run)}
            for system, value in found.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(value, found["ours"], msg=f"{name}: {system}")
            plan = plan_reshard(*layouts(name, shape), itemsize=4)
            counts = {"bytes": {"ours": plan.total_bytes, "lower bound": plan.lower_bound}}
            assert plan.total_bytes == plan.lower_bound
            group = group_name(shape, dist.get_world_size())
            case = Case(name, runs, group=group, counts=counts)
            is_short = full.nbytes < 1 << 25  # all but the largest
            repeats = options.repeats * (SHORT if is_short else 1)
            results.append(measure(case, repeats=repeats, budget_s=options.budget_s, clock=clock()))
    return results


def main() -> None:
    options = parse_options(__doc__ or "")
    if not options.quick:
        options = replace(options, budget_s=6.0)
    report = Report("create", options)
    measure_on_ranks(report, on_rank, options)
    for result in report.results:
        for ours, system in ((None, "ShardedTensor"), (None, "DTensor"), ("unchecked", "DTensor")):
            report.check_ratio(result.name, group=result.group, system=system, limit=1.0, ours=ours)
    for world_size in (2, 4):
        group = compare_name(world_size)
        report.check_ratio(COMPARE, group=group, system=COLLECTIVE, limit=1.0)
    report.finish()


if __name__ == "__main__":
    main()
