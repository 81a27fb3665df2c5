"""Training a sharded model, and sharding one, on 2 and 4 local ranks (gloo, loopback).

"step" is a step of AdamW on the GPT of the examples, tensor parallel (plan "mixed"): ours, which is
the plain model after `shard_module`; the same by hand with raw collectives; and under DTensor's
parallelize_module (see `tensor_parallel.py`). All three must have the same losses first.

"shard" cuts a model of 200 parameters, half along dim 0, half along dim 1 (`whole_models.py`):
`shard_module` of ours and of torch's ShardedTensor, and parallelize_module. The peers have the full
model on every rank, ours on the first only. "peak" is what the resident memory of the other ranks
grows by beyond their share.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import clock, measure_on_ranks, quiet_peers
from benchmarks.report import Options, Report, parse_options
from benchmarks.tensor_parallel import by_dtensor, by_hand
from benchmarks.whole_models import bars_of_sharding, shard
from shardwise.demo.gpt import GPT, Config, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HAND, DTENSOR = "by hand", "DTensor"
SIZES = (  # of the model, and the batch
    (Config(vocabulary=64), 16),  # as examples/train_gpt.py
    (Config(vocabulary=4096, length=128, width=512, heads=8, layers=4), 8),
)


# -- a step of training ----------------------------------------------------------------------------


def gpt(config: Config) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def stepping(
    loss_of: Callable[..., Any], parameters: Sequence[nn.Parameter], given: Sequence[torch.Tensor]
) -> System:
    """A step; DTensor's losses have gone backward by themselves."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for one in parameters:  # DTensors do not share a list with plain tensors
        kinds.setdefault(type(one.data), []).append(one)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], fused=True)

    def step() -> float:
        loss = loss_of(*given)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def by_us(model: GPT) -> tuple[Callable[..., Any], list[nn.Parameter]]:
    plan = plan_of("mixed", model.config, dist.get_world_size())
    shardwise.shard_module(model, plan)
    return model, list(model.parameters())


def step(config: Config, batch: int, options: Options) -> Result:
    generator = torch.Generator().manual_seed(1)
    size = (2, batch, config.length)
    given = torch.randint(config.vocabulary, size, generator=generator).unbind()
    makers = {"ours": by_us, HAND: by_hand, DTENSOR: by_dtensor}
    systems = {name: stepping(*make(gpt(config)), given) for name, make in makers.items()}
    losses = {name: [run() for _ in range(3)] for name, run in systems.items()}
    for name, found in losses.items():
        torch.testing.assert_close(found, losses["ours"], atol=1e-4, rtol=1e-4, msg=name)
    case = Case(step_name(config, batch), systems, group=step_group(dist.get_world_size()))
    return measure(case, repeats=options.repeats * 3, budget_s=options.budget_s, clock=clock())


def step_name(config: Config, batch: int) -> str:
    return f"{config.layers} layers of {config.width}, batch {batch} x {config.length}"


def step_group(world_size: int) -> str:
    return f"step, {world_size} ranks"


# -- all of it -------------------------------------------------------------------------------------


def on_rank(rank: int, options: Options) -> list[Result]:
    quiet_peers()
    torch.set_num_threads(1)
    shardwise.implicit_comm("error")
    sizes = SIZES[:1] if options.quick else SIZES
    return [step(*size, options) for size in sizes] + [shard(rank, options)]


def add_bars(report: Report) -> None:
    for world_size in (2, 4):
        for size in SIZES:
            ratio = partial(report.check_ratio, step_name(*size), group=step_group(world_size))
            ratio(system=HAND, limit=1.1)
            ratio(system=DTENSOR, limit=1.0)
    bars_of_sharding(report)


def main() -> None:
    options = parse_options(__doc__ or "")
    if not options.quick:
        options = replace(options, budget_s=10.0)
    report = Report("train", options)
    measure_on_ranks(report, on_rank, options)
    add_bars(report)
    report.finish()


if __name__ == "__main__":
    main()
