"""Resharding on local ranks (gloo, loopback): ours, a hand-written exchange, torch, DTensor.

All systems start from the same local tensors and give new ones; all ranks take the same samples,
of which each lasts as long as its slowest rank. "ours" includes looking the plan up. "by hand" is
what an expert would write for the one case: exact boxes, one message per peer, receives first.
Peak memory is the growth of the largest rank's resident memory over one run, in units of the
largest rank's output.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch
import torch.distributed as dist

import shardwise
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import (
    SHORT,
    clock,
    group_name,
    measure_on_ranks,
    most_over_ranks,
    quiet_peers,
)
from benchmarks.report import Options, Report, parse_options
from shardwise.comm import Transfer, execute, execute_all
from shardwise.testing.memory import peak_growth
from shardwise.transfer import TransferPlan, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.geometry import Layout

SHAPES = LARGE, UNEVEN, SMALL = (8192, 8192), (8191, 4097), (512, 512)
QUICK_SHAPES = (1024, 1024), (1023, 511), (64, 64)
HAND = "by hand"
PEAK, BEYOND = "peak, % of output", "peak beyond output, KiB"
CAPS = {f"{cap >> 20} MiB": cap for cap in (32 << 20, 8 << 20, 1 << 20)}
LARGE_PAGE = 2 << 20  # bytes, by which a process may grow for one more
LEAST_OUTPUT = 8 << 20  # bytes: below it, the peak is mostly sockets and rounding
CANNOT, SINGLE = "cannot", ", single calls"
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One reshard, as each system has to be told of it."""

    name: str
    shape: tuple[int, ...]
    source: str  # specs, as `shardwise.parse_spec` reads them
    target: str
    torch_specs: tuple[Any, Any] | None = None  # (dim, rank order) before and after
    mesh: tuple[Any, Any] | None = None  # DTensor's placements before and after, as text

    def layouts(self, world_size: int) -> tuple[Layout, Layout]:
        specs = (self.source, self.target)
        found = [shardwise.parse_spec(s, ranks=range(world_size), device="cpu") for s in specs]
        return found[0].layout(self.shape), found[1].layout(self.shape)


def tasks(shape: tuple[int, ...], world_size: int) -> list[Task]:
    """The cases for one shape."""
    order = list(range(world_size))
    back, turned = order[::-1], order[1:] + order[:1]
    listed = [
        Task(
            "rows to columns", shape, "chunk(0)", "chunk(1)", ((0, order), (1, order)), ("S0", "S1")
        ),
        Task(
            "ranks reversed", shape, "chunk(0)", f"chunk(0, ranks={back})", ((0, order), (0, back))
        ),
        Task("ranks rotated", shape, "chunk(0)", f"chunk(0, ranks={turned})"),
        Task("rows to all ranks", shape, "chunk(0)", "replicate()", None, ("S0", "R")),
        Task("rows to rank 0", shape, "chunk(0)", "on_rank(0)"),
        Task("sum to all ranks", shape, "partial()", "replicate()", None, ("P", "R")),
        Task("sum to rows", shape, "partial()", "chunk(0)", None, ("P", "S0")),
    ]
    if world_size == 4:
        listed.insert(
            5, Task("rows to 2 x 2", shape, "chunk(0)", "grid([2, 2])", None, ("S0", "2x2"))
        )
    return listed


# -- systems -----------------------------------------------------------------------------------


def ours(plan: TransferPlan, shards: list[torch.Tensor]) -> System:
    source, target = plan.source, plan.target
    return lambda: execute(plan_reshard(source, target, 4), shards, dtype=torch.float32)


def by_hand(plan: TransferPlan, shards: list[torch.Tensor], rank: int) -> System:
    """Indices are worked out here, untimed, as constants in the expert's code would be."""
    (mine,), sends, receives, local = shards or [torch.empty(0)], [], [], None
    nothing = shardwise.Box((0, 0), (0, 0))
    (here,) = plan.source.boxes_of(rank) or (nothing,)
    (there,) = plan.target.boxes_of(rank) or (nothing,)
    moves = plan.moves_of(rank)
    for k in range(len(moves)):
        box = shardwise.Box(tuple(moves.starts[k]), tuple(moves.stops[k]))
        src, dst = int(moves.src[k]), int(moves.dst[k])
        if src == rank == dst:
            local = box.relative_to(here).slices(), box.relative_to(there).slices()
        elif src == rank:
            sends.append((dst, box.relative_to(here).slices()))
        else:
            receives.append((src, box.relative_to(there).slices()))
    size = dist.get_world_size()
    sends.sort(key=lambda send: (send[0] - rank) % size)
    receives.sort(key=lambda receive: (rank - receive[0]) % size)
    shape = None if there is nothing else there.shape

    def run() -> torch.Tensor | None:
        out = None if shape is None else torch.empty(shape)
        waits, unpacks = [], []
        for peer, index in receives:
            assert out is not None
            view = out[index]
            buffer = view if view.is_contiguous() else torch.empty(view.shape)
            waits.append(dist.irecv(buffer, peer))
            if buffer is not view:
                unpacks.append((view, buffer))
        for peer, index in sends:
            waits.append(dist.isend(mine[index].contiguous(), peer))
        if local is not None:
            assert out is not None
            out[local[1]].copy_(mine[local[0]])
        for wait in waits:
            if wait is not None:
                wait.wait()
        for view, buffer in unpacks:
            view.copy_(buffer)
        return out

    return run


def sum_by_hand(task: Task, shards: list[torch.Tensor]) -> System:
    """torch's own collectives, which is what an expert would use for a sum."""
    (mine,) = shards
    if task.target == "replicate()":

        def all_reduce() -> torch.Tensor:
            out = mine.clone()
            dist.all_reduce(out)
            return out

        return all_reduce
    size = dist.get_world_size()

    def reduce_scatter() -> torch.Tensor:
        parts = list(mine.chunk(size))
        out = torch.empty_like(parts[dist.get_rank()])
        dist.reduce_scatter(out, parts)
        return out

    return reduce_scatter


def torch_sharded_tensor(
    task: Task, shards: list[torch.Tensor]
) -> tuple[Callable[[], dict[str, Any]], System]:
    """(prepare, run) of `ShardedTensor.reshard`, which changes the tensor in place."""
    package = importlib.import_module("torch.distributed._shard.sharded_tensor")
    specs = importlib.import_module("torch.distributed._shard.sharding_spec")
    assert task.torch_specs is not None
    before, after = (
        specs.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])
        for dim, ranks in task.torch_specs
    )
    state: dict[str, Any] = {}

    def prepare() -> dict[str, Any]:
        make = package.ShardedTensor._init_from_local_tensor
        state["tensor"] = make(shards[0], before, task.shape)
        return state

    return prepare, lambda: state["tensor"].reshard(after).local_shards()[0].tensor


def torch_gather(task: Task, shards: list[torch.Tensor], rank: int) -> tuple[System, System]:
    """(prepare, run) of `ShardedTensor.gather` to rank 0."""
    order = list(range(dist.get_world_size()))
    make, _ = torch_sharded_tensor(replace(task, torch_specs=((0, order), (0, order))), shards)
    state = make()

    def run() -> torch.Tensor | None:
        out = torch.empty(task.shape) if rank == 0 else None
        state["tensor"].gather(0, out)
        return out

    return make, run


def dtensor(task: Task, shards: list[torch.Tensor], world_size: int) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    known = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
    assert task.mesh is not None
    before, after = ([known[name]] if name in known else None for name in task.mesh)
    mesh = init_device_mesh("cpu", (world_size,))
    if after is None:  # a 2 x 2 grid needs a mesh of two axes
        mesh = init_device_mesh("cpu", (2, 2))
        before, after = [Shard(0), Shard(0)], [Shard(0), Shard(1)]
    stride = (task.shape[1], 1)
    tensor = DTensor.from_local(
        shards[0], mesh, before, run_check=False, shape=torch.Size(task.shape), stride=stride
    )
    return lambda: tensor.redistribute(mesh, after).to_local()


# -- on every rank -----------------------------------------------------------------------------


def local_shards(layout: Layout, rank: int) -> list[torch.Tensor]:
    """Numbers that say where they are, so that a wrong result is seen."""
    columns = layout.shape[-1]
    found = []
    for box in layout.boxes_of(rank):
        rows, cols = (torch.arange(a, b) for a, b in zip(box.start, box.stop, strict=True))
        found.append(((rows[:, None] * columns + cols) % 4093).float())
    return found


def check_equal(task: Task, results: Mapping[str, Any]) -> None:
    """All systems that give one tensor give the same."""
    expected = results["ours"]  # a list, of one tensor or none
    for name, found in results.items():
        if isinstance(found, torch.Tensor) and expected:
            torch.testing.assert_close(found, expected[0], msg=f"{task.name}: {name} differs")


def run_task(task: Task, rank: int, world_size: int, options: Options) -> list[Result]:
    """One row; of a small tensor two, if a system has to be prepared for every call of it."""
    source, target = task.layouts(world_size)
    plan = plan_reshard(source, target, 4)
    shards = local_shards(source, rank)
    is_sum = source.pending is not None
    systems: dict[str, System | str | None] = {
        "ours": ours(plan, shards),
        HAND: sum_by_hand(task, shards) if is_sum else by_hand(plan, shards, rank),
    }
    prepare: System | None = None
    if is_sum and task.target == "chunk(0)" and task.shape[0] % world_size:
        systems[HAND] = "uneven"
    systems["ShardedTensor"] = CANNOT
    if task.torch_specs is not None and not any(n % world_size for n in task.shape):
        prepare, systems["ShardedTensor"] = torch_sharded_tensor(task, shards)
    elif task.name == "rows to rank 0":
        prepare, systems["ShardedTensor"] = torch_gather(task, shards, rank)
    elif task.torch_specs is not None or (task.name == "ranks rotated" and world_size > 2):
        systems["ShardedTensor"] = "aborts"
    systems["DTensor"] = "wrong result" if "ranks" in task.name and task.mesh is None else CANNOT
    if task.mesh is not None:
        systems["DTensor"] = dtensor(task, shards, world_size)
    if prepare is not None:
        prepare()
    check_equal(task, {name: run() for name, run in systems.items() if callable(run)})
    if plan.total_bytes != plan.lower_bound:
        raise AssertionError(f"{task.name}: {plan.total_bytes} bytes, bound {plan.lower_bound}")
    counts = {"bytes": {"ours": plan.total_bytes, "lower bound": plan.lower_bound}}
    output = max(plan.output_bytes.values())
    is_large = output > LEAST_OUTPUT
    if is_large:
        found = peaks(systems, prepare)
        counts[PEAK] = {name: round(100 * peak / output) for name, peak in found.items()}
    case = Case(task.name, systems, group=group_name(task.shape, world_size), counts=counts)
    cases = [replace(case, prepare=prepare)]
    if prepare is not None and not is_large:
        alone = {name: systems[name] for name in ("ours", "ShardedTensor")}
        cases = [
            replace(case, systems=systems | {"ShardedTensor": "see below"}),
            replace(case, name=f"{task.name}{SINGLE}", systems=alone, prepare=prepare),
        ]
    repeats = options.repeats * (1 if is_large else SHORT)
    return [
        measure(case, repeats=repeats, budget_s=options.budget_s, clock=clock()) for case in cases
    ]


def peaks(
    systems: Mapping[str, System | str | None], prepare: System | None = None
) -> dict[str, int]:
    """Bytes by which the largest rank grows at its peak."""
    found = {}
    for name, run in systems.items():
        if callable(run):
            if prepare is not None:
                prepare()
            dist.barrier()
            found[name] = most_over_ranks(peak_growth(run))
    return found


def capped(task: Task, rank: int, world_size: int, options: Options) -> Result:
    """A task under caps: what a bound on memory costs."""
    source, target = task.layouts(world_size)
    plan, shards = plan_reshard(source, target, 4), local_shards(source, rank)
    systems: dict[str, System | str | None] = {"no cap": lambda: execute(plan, shards)}
    for name, cap in CAPS.items():
        systems[name] = functools.partial(execute, plan, shards, max_bytes=cap)
    for run in systems.values():
        assert callable(run)
        run()  # plans its rounds, which are kept
    output = max(plan.output_bytes.values())
    counts = {
        BEYOND: {name: (peak - output) >> 10 for name, peak in peaks(systems).items()},
        "rounds": {name: len(plan.schedule(CAPS.get(name)).rounds) for name in systems},
    }
    group = f"ours with max_bytes, {world_size} ranks"
    case = Case(task.name, systems, group=group, counts=counts)
    return measure(case, repeats=options.repeats, budget_s=options.budget_s, clock=clock())


def capped_tasks(shape: tuple[int, ...]) -> tuple[Task, ...]:
    """One whose messages leave as they lie, and one whose messages land so."""
    return (
        Task("columns to rows", shape, "chunk(1)", "chunk(0)"),
        Task("rows to columns", shape, "chunk(0)", "chunk(1)"),
    )


def many(num_tensors: int, rank: int, world_size: int, options: Options) -> Result:
    """Many small tensors: in one exchange, as `reshard_all` does it too, and one by one."""
    shape, rows, columns = (64, 64), "chunk(0)", "chunk(1)"
    source, target = Task("", shape, rows, columns).layouts(world_size)
    plan = plan_reshard(source, target, 4)
    shards = [local_shards(source, rank) for _ in range(num_tensors)]
    hand = [by_hand(plan, held, rank) for held in shards]
    one = shardwise.distribute(torch.randn(shape), shardwise.parse_spec(rows, device="cpu"))
    tensors, to = [one.clone() for _ in shards], shardwise.parse_spec(columns, device="cpu")

    systems: dict[str, System | str | None] = {  # each gives all results
        "one exchange": lambda: execute_all([Transfer(plan, held) for held in shards]),
        "reshard_all": lambda: shardwise.reshard_all(tensors, to),
        "one exchange each": lambda: [execute(plan, held) for held in shards],
        "by hand, one each": lambda: [run() for run in hand],
    }
    name = f"{num_tensors} tensors of 64 x 64"
    case = Case(name, systems, group=f"many tensors, {world_size} ranks")
    return measure(case, repeats=options.repeats, budget_s=options.budget_s, clock=clock())


def on_rank(rank: int, options: Options) -> list[Result]:
    quiet_peers()
    world_size = dist.get_world_size()
    large, uneven, small = QUICK_SHAPES if options.quick else SHAPES
    results = []
    for shape in (large, uneven, small):
        for task in tasks(shape, world_size):
            if shape == large or not task.name.startswith(("ranks", "rows to rank", "rows to 2")):
                results += run_task(task, rank, world_size, options)
    for task in capped_tasks(large):
        results.append(capped(task, rank, world_size, options))
    results.append(many(256 if options.quick else 4096, rank, world_size, options))
    return results


def add_bars(report: Report) -> None:
    """What this benchmark is to show; a quick run has none."""
    for world_size in (2, 4):
        for shape in SHAPES:
            for task in tasks(shape, world_size):
                group = group_name(shape, world_size)
                if "sum" not in task.name:  # there "by hand" is a collective, which adds
                    report.check_ratio(task.name, group=group, system=HAND, limit=1.15)
                for name in (task.name, task.name + SINGLE):
                    report.check_ratio(name, group=group, system="ShardedTensor", limit=1.0)
        name, group = "4096 tensors of 64 x 64", f"many tensors, {world_size} ranks"
        report.check_ratio(name, group=group, system="one exchange each", limit=0.1)
    report.check_ratio("rows to columns", group=group_name(LARGE, 4), system="DTensor", limit=0.4)
    report.check_count(PEAK, system="ours", limit=200, unit="%")
    for name, cap in CAPS.items():
        report.check_count(BEYOND, system=name, limit=(cap + LARGE_PAGE) >> 10, unit="KiB")


def main() -> None:
    options = parse_options(__doc__ or "")
    if not options.quick:
        options = replace(options, budget_s=6.0)
    report = Report("reshard", options)
    measure_on_ranks(report, on_rank, options)
    add_bars(report)
    report.finish()


if __name__ == "__main__":
    main()
