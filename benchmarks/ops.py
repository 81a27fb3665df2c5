"""Ops on sharded tensors beside plain tensors, hand-written communication and DTensor.

"eager" is what our Python costs: tiny tensors on one rank, where every system computes the same and
nothing is sent. Ours and DTensor's have the same layouts, rows, or in Linear-GELU-Linear those of a
tensor-parallel one; "DTensor, uncut" has all of it replicated, which is easiest for DTensor. "bare"
is a subclass of torch.Tensor that does nothing but unwrap, call torch and wrap; "in a row" are
samples of 20 ms instead of one, in which caches are warm. "optimizer" is one AdamW step over a
hundred parameters. "MLP" is a tensor-parallel Linear-GELU-Linear, forward and backward with a
gradient of its input, on 2 and 4 local ranks (gloo, loopback): by hand with two all-reduces of
torch.distributed, by DTensor's parallelize_module, and ours, in which the model is plain torch on
sharded parameters and the result is resharded.
"embedding" looks up, on 4 ranks, each rank's own indices in a table that is cut by rows: ours, that
of torch's ShardedTensor, and DTensor's (indices gathered, masked rows reduce-scattered).
"along a cut dim" is a loss over 128k classes that are cut, and layer_norm: see `cut_dims.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from benchmarks.cut_dims import bars_along_cut_dims, functions_along_cut_dims
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import SHORT, clock, measure_on_ranks, mesh, quiet_peers
from benchmarks.report import Options, Report, parse_options
from benchmarks.tensor_parallel import Enter, Leave

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN, BARE, HAND = "plain", "bare", "by hand"
DTENSOR, UNCUT = "DTensor", "DTensor, uncut"
TENSOR_PARALLEL = ("rows", "rows", "columns", "whole")  # weights and biases of two layers
EAGER, OPTIMIZER = "eager, 1 rank", "optimizer, 1 rank, 100 parameters"
BLOCK, ADD, ADD_FUNCTION = "Linear-GELU-Linear, both ways", "x + y", "torch.add(x, y)"
WARM_BLOCK, WARM_S = f"{BLOCK}, in a row", 0.02
SIZES = ((64, 256, 4), (256, 1024, 8), (1024, 4096, 64))  # width, hidden width, batch
KINDS = ("foreach", "fused")
SEED, TABLE, EMBEDDING = "torch", (1_000_000, 64), "embedding by rows, 4 ranks, 1M x 64"
NUM_IDS = (1024, 16384)  # of each rank


def block(x: Any, weights: Sequence[Any]) -> Any:
    w1, b1, w2, b2 = weights
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def weights_of(width: int, hidden: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((hidden, width), (hidden,), (width, hidden), (width,))
    return [torch.randn(shape, generator=generator) / 16 for shape in shapes]


# -- what Python costs -----------------------------------------------------------------------------


class Bare(torch.Tensor):
    """A subclass which holds another tensor, and does nothing else: no checks, no layouts."""

    held: torch.Tensor

    @staticmethod
    def of(held: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        made = make(  # by position, which is quickest
            Bare,
            held.shape,
            None,
            None,
            None,
            held.dtype,
            torch.strided,
            held.device,
            False,
            held.requires_grad,
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Bare.of(func(*[arg.held for arg in args]))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} went past __torch_function__")

    def backward(self) -> None:  # type: ignore[override]  # all that is needed here
        self.held.backward()


Maker = Callable[[torch.Tensor, str], Any]  # of a tensor, and how it is cut


def makers() -> dict[str, Maker]:
    """A system's own tensors; a cut is "rows", "columns" or, for none, "whole"."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = mesh()
    specs = {
        "rows": shardwise.chunk(0, device="cpu"),
        "columns": shardwise.chunk(1, device="cpu"),
        "whole": shardwise.replicate(device="cpu"),
    }
    placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    return {
        "ours": lambda t, cut: shardwise.distribute(t, specs[cut]),
        PLAIN: lambda t, _: t,
        BARE: lambda t, _: Bare.of(t),
        DTENSOR: lambda t, cut: distribute_tensor(t, devices, [placements[cut]]),
        UNCUT: lambda t, _: distribute_tensor(t, devices, [Replicate()]),
    }


def eager(options: Options) -> list[Result]:
    x, y = torch.randn(4, 8), torch.randn(4, 8)

    def both_ways(who: str, make: Maker) -> System:
        values = weights_of(8, 16)
        if who == BARE:  # which knows nothing of parameters
            values = [torch.nn.Parameter(value) for value in values]
        weights = [make(value, cut) for value, cut in zip(values, TENSOR_PARALLEL, strict=True)]
        if who != BARE:
            weights = [torch.nn.Parameter(weight) for weight in weights]
        given = make(x, "whole")
        return lambda: block(given, weights).sum().backward()

    def plus(_: str, make: Maker) -> System:
        a, b = make(x, "rows"), make(y, "rows")
        return lambda: a + b

    def add(_: str, make: Maker) -> System:
        a, b = make(x, "rows"), make(y, "rows")
        return lambda: torch.add(a, b)

    runs = {BLOCK: both_ways, WARM_BLOCK: both_ways, ADD: plus, ADD_FUNCTION: add}
    cases = [
        Case(name, {who: run(who, make) for who, make in makers().items()}, group=EAGER)
        for name, run in runs.items()
    ]
    return [
        measure(
            replace(case, sample_s=WARM_S) if case.name == WARM_BLOCK else case,
            repeats=options.repeats * 5,  # of samples of milliseconds
            budget_s=options.budget_s,
            clock=clock(),
        )
        for case in cases
    ]


# -- optimizers ------------------------------------------------------------------------------------


def optimizers(options: Options) -> list[Result]:
    rows = shardwise.chunk(0, device="cpu")
    made_by: dict[str, Callable[[torch.Tensor], Any]] = {
        "ours": lambda t: shardwise.distribute(t.clone(), rows),
        PLAIN: torch.clone,
    }

    def steps(size: int, kind: str) -> dict[str, System | str | None]:
        """Parameters are made in turns, so that none lie better in memory than those beside."""
        parameters: dict[str, list[torch.nn.Parameter]] = {who: [] for who in made_by}
        for _ in range(100):
            value = torch.randn(size, size)
            for who, make in made_by.items():
                parameters[who].append(torch.nn.Parameter(make(value)))
                parameters[who][-1].grad = make(value)
        return {
            who: torch.optim.AdamW(made, **{kind: True}).step  # type: ignore[arg-type]  # a flag
            for who, made in parameters.items()
        }

    return [
        measure(
            Case(f"AdamW {kind}, {size} x {size}", steps(size, kind), group=OPTIMIZER),
            repeats=options.repeats * 5,
            budget_s=options.budget_s,
            clock=clock(),
        )
        for size in (256, 64)
        for kind in KINDS
    ]


# -- a tensor-parallel MLP -------------------------------------------------------------------------


def by_hand(x: torch.Tensor, weights: Sequence[torch.Tensor], rank: int) -> Callable[[], Any]:
    w1, b1, w2, b2 = weights
    size = dist.get_world_size()
    parts = [w1.chunk(size)[rank], b1.chunk(size)[rank], w2.chunk(size, 1)[rank], b2]
    w1, b1, w2, b2 = (torch.nn.Parameter(part.contiguous()) for part in parts)
    given = x.clone().requires_grad_()

    def run() -> Any:
        hidden = F.gelu(F.linear(Enter.apply(given), w1, b1))  # type: ignore[no-untyped-call]  # torch's
        y = Leave.apply(F.linear(hidden, w2)) + b2  # type: ignore[no-untyped-call]  # torch's
        y.sum().backward()
        return y

    return run


def by_dtensor(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Callable[[], Any]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    hidden, width = weights[0].shape
    model = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width)
    )
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh(), plan)
    given = x.clone().requires_grad_()

    def run() -> Any:
        y = model(given)
        y.sum().backward()
        return y

    return run


def by_us(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Callable[[], Any]:
    rows, columns, everywhere = shardwise.chunk(0), shardwise.chunk(1), shardwise.replicate()
    specs = (rows, rows, columns, everywhere)
    sharded = [
        torch.nn.Parameter(shardwise.distribute(weight, spec))
        for weight, spec in zip(weights, specs, strict=True)
    ]
    given = shardwise.as_replicated(x.clone()).requires_grad_()

    def run() -> Any:
        y: Any = shardwise.reshard(block(given, sharded), everywhere)
        y.sum().backward()
        return y

    return run


def mlp(width: int, hidden: int, batch: int, rank: int, options: Options) -> Result:
    weights = weights_of(width, hidden)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(3))
    systems: dict[str, Any] = {
        "ours": by_us(x, weights),
        HAND: by_hand(x, weights, rank),
        DTENSOR: by_dtensor(x, weights),
    }
    expected = block(x, weights)
    for name, run in systems.items():
        found = run().detach()
        plain = found.full_tensor() if name == "ours" else found
        torch.testing.assert_close(plain, expected, atol=1e-4, rtol=1e-4, msg=name)
    case = Case(mlp_name(width, hidden, batch), systems, group=mlp_group(dist.get_world_size()))
    return measure(case, repeats=options.repeats * SHORT, budget_s=options.budget_s, clock=clock())


def mlp_name(width: int, hidden: int, batch: int) -> str:
    return f"{width} to {hidden}, batch {batch}"


def mlp_group(world_size: int) -> str:
    return f"MLP, {world_size} ranks"


# -- embedding -------------------------------------------------------------------------------------


def table_rows(start: int, stop: int) -> torch.Tensor:
    """Rows of the table, which every rank can make."""
    row, column = torch.arange(start, stop).view(-1, 1), torch.arange(TABLE[1])
    return ((row * 31 + column * 17) % 1009) / 1009


def embedding_by_us(ids: torch.Tensor) -> tuple[Callable[[], Any], Any]:
    weight = shardwise.from_callback(
        shardwise.chunk(0), TABLE, lambda index: table_rows(index[0].start, index[0].stop)
    )
    parameter = torch.nn.Parameter(weight)
    return lambda: F.embedding(ids, parameter), parameter


def embedding_by_seed(ids: torch.Tensor, mine: torch.Tensor) -> tuple[Callable[[], Any], Any]:
    from torch.distributed._shard.sharded_tensor import empty
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    places: Any = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    weight = empty(ChunkShardingSpec(0, places), *TABLE)
    weight.local_shards()[0].tensor.copy_(mine)
    local = weight.local_shards()[0].tensor.requires_grad_()
    return lambda: F.embedding(ids, weight), local


def embedding_by_dtensor(ids: torch.Tensor, mine: torch.Tensor) -> tuple[Callable[[], Any], Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    devices = mesh()
    weight = torch.nn.Parameter(DTensor.from_local(mine.clone(), devices, [Shard(0)]))

    def run() -> Any:
        every = DTensor.from_local(ids, devices, [Shard(0)]).redistribute(devices, [Replicate()])
        found: Any = F.embedding(every, weight)
        return found.redistribute(devices, [Shard(0)]).to_local()

    return run, weight


def embedding(count: int, rank: int, options: Options) -> list[Result]:
    ids = torch.randint(TABLE[0], (count,), generator=torch.Generator().manual_seed(rank))
    height = TABLE[0] // dist.get_world_size()
    mine = table_rows(rank * height, (rank + 1) * height)
    expected = ((ids.view(-1, 1) * 31 + torch.arange(TABLE[1]) * 17) % 1009) / 1009
    runs = {
        "ours": embedding_by_us(ids),
        SEED: embedding_by_seed(ids, mine),
        DTENSOR: embedding_by_dtensor(ids, mine),
    }
    for name, (run, _) in runs.items():
        torch.testing.assert_close(run().detach(), expected, msg=name)

    def forward(run: Callable[[], Any], weight: Any) -> System:
        def once() -> Any:
            with torch.no_grad():
                return run()

        return once

    def both_ways(run: Callable[[], Any], weight: Any) -> System:
        def once() -> None:
            weight.grad = None
            run().sum().backward()

        return once

    ways = {"forward": forward, "both ways": both_ways}
    return [
        measure(
            Case(
                embedding_name(count, name),
                {who: way(*run) for who, run in runs.items()},
                group=EMBEDDING,
            ),
            repeats=options.repeats * 3,
            budget_s=options.budget_s,
            clock=clock(),
        )
        for name, way in ways.items()
    ]


def embedding_name(count: int, way: str) -> str:
    return f"{count} ids per rank, {way}"


# -- all of it -------------------------------------------------------------------------------------


def on_one(_: int, options: Options) -> list[Result]:
    quiet_peers()
    torch.set_num_threads(1)
    return eager(options) + optimizers(options)


def on_rank(rank: int, options: Options) -> list[Result]:
    quiet_peers()
    torch.set_num_threads(1)
    shardwise.implicit_comm("error")
    found = [mlp(*size, rank, options) for size in (SIZES[:1] if options.quick else SIZES)]
    if dist.get_world_size() == 4:
        for count in NUM_IDS[:1] if options.quick else NUM_IDS:
            found += embedding(count, rank, options)
        found += functions_along_cut_dims(rank, options)
    return found


def add_bars(report: Report) -> None:
    ratio = partial(report.check_ratio, group=EAGER)
    ratio(BLOCK, system=PLAIN, limit=1.35)
    ratio(BLOCK, system=DTENSOR, limit=1 / 3)
    ratio(ADD, system=PLAIN, limit=4.0)
    ratio(ADD, system=DTENSOR, limit=1.0)
    for kind in KINDS:
        for size, limit in ((256, 1.2), (64, 2.0)):
            name = f"AdamW {kind}, {size} x {size}"
            report.check_ratio(name, group=OPTIMIZER, system=PLAIN, limit=limit)
    for world_size in (2, 4):
        for sizes in SIZES:
            ratio = partial(report.check_ratio, mlp_name(*sizes), group=mlp_group(world_size))
            ratio(system=HAND, limit=1.1)
            ratio(system=DTENSOR, limit=1.0)
    for count in NUM_IDS:
        for way in ("forward", "both ways"):
            ratio = partial(report.check_ratio, embedding_name(count, way), group=EMBEDDING)
            ratio(system=SEED, limit=1.0)
            ratio(system=DTENSOR, limit=1.0)
    bars_along_cut_dims(report)


def main() -> None:
    options = parse_options(__doc__ or "")
    if not options.quick:
        options = replace(options, budget_s=6.0)
    report = Report("ops", options)
    report.results += shardwise.run_local(on_one, 1, options, timeout=3000)[0]
    measure_on_ranks(report, on_rank, options)
    add_bars(report)
    report.finish()


if __name__ == "__main__":
    main()
