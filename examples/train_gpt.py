"""Trains a small GPT whose parameters are cut over ranks, beside the same model on one process.

    torchrun --nproc-per-node 4 examples/train_gpt.py

The model (`shardwise.demo.gpt`) is plain torch, and so is a step of training
(`shardwise.demo.training`). A plan says which parameter is cut how, and shard_module carries it
out. Half-way the model changes to another plan, optimizer state and all, and the loss goes on as
if nothing had happened: on rank 0 the same model is trained without sharding, and the two losses
stand side by side. At the end the model writes some text.

    torchrun --nproc-per-node 4 examples/train_gpt.py --save checkpoint
    torchrun --nproc-per-node 2 examples/train_gpt.py --resume checkpoint

goes on where the first run ended, on other ranks and under any plan, with the same losses.

Without torchrun it runs on one process, with the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import nn

import shardwise
from shardwise.demo.gpt import GPT, PLANS, Config, plan_of
from shardwise.demo.training import Text, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = ("float32", "float64", "bfloat16")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    kinds = argparse.RawDescriptionHelpFormatter
    plans = "\n".join(f"  {name:10}{plan.__doc__}" for name, plan in PLANS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"plans:\n{plans}", formatter_class=kinds
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of training (200)")
    parser.add_argument("--plan", choices=PLANS, default="mixed", help="how it begins (mixed)")
    parser.add_argument("--then", choices=PLANS, default="grid", help="how it goes on (grid)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="float32; bfloat16 is autocast"
    )
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step (16)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (0)")
    parser.add_argument("--sample", type=int, default=120, help="letters to write at the end (120)")
    parser.add_argument("--save", metavar="PATH", help="save a checkpoint at the end")
    parser.add_argument("--resume", metavar="PATH", help="go on from a checkpoint")
    parser.add_argument("--alone", action="store_true", help="train no second model to compare")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    if "RANK" in os.environ:  # torchrun has started us
        dist.init_process_group("gloo")
    else:
        shardwise.init_single()
    torch.set_num_threads(1)
    try:
        with shardwise.implicit_comm("error"):  # nothing is sent that the plan does not say
            train(options)
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    width = None if sys.stdout.isatty() else 100
    console = Console(quiet=rank != 0, highlight=False, width=width)
    text = Text()
    config = Config(vocabulary=len(text.letters))

    # Only rank 0 ever has the whole model; the others know its shapes.
    torch.manual_seed(options.seed)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = GPT(config).to(torch.float64 if options.dtype == "float64" else torch.float32)
    beside = None
    if rank == 0 and not options.alone:
        beside = Trainer(copy.deepcopy(model), options.dtype)

    plan = plan_of(options.plan, config, world_size)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"\n[bold]A GPT with {count:,} parameters on {world_size} ranks, plan {options.plan}[/]"
    )
    console.print(plan.explain(model))
    shardwise.shard_module(model, plan)
    trainer = Trainer(model, options.dtype)

    console.print("\n  step      loss  one process  difference")
    generator = torch.Generator().manual_seed(options.seed)
    first = 0
    if options.resume:
        first = resume(trainer, generator, options.resume)
        only_rank_0 = dist.new_group([0])
        if beside is not None:  # the same checkpoint into plain tensors
            resume(beside, generator, options.resume, only_rank_0)
        console.print(f"  goes on from {options.resume!r} at step {first}")
    largest = 0.0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(first, first + options.steps):
            if step == first + options.steps // 2:
                change_plan(trainer, plan_of(options.then, config, world_size))
                console.print(f"  now the plan is {options.then}, optimizer state and all")
            batch = text.batch(options.batch, config.length, generator)
            loss = trainer.step(*batch)
            other = None if beside is None else beside.step(*batch)
            largest = max(largest, abs(loss - other)) if other is not None else largest
            done = step + 1 - first
            if (done - 1) % max(1, options.steps // 12) == 0 or done == options.steps:
                console.print(line(step, loss, other))
            progress.advance(task)
    if beside is not None:
        console.print(f"  the largest difference of all {options.steps} steps is {largest:.1e}")
    if options.save:
        state = trainer.state(first + options.steps, generator)
        shardwise.checkpoint.save(state, options.save)
        console.print(f"  saved to {options.save!r}")
    written = write(model, text, options.sample, config.length, options.seed)
    console.print(f"\n[bold]What it writes[/] (after {config.length} letters of the text)")
    console.print(written, markup=False)
    console.print()


def change_plan(trainer: Trainer, plan: shardwise.ShardingPlan) -> None:
    """The same parameters, elsewhere: the optimizer keeps them and its state follows."""
    shardwise.reshard_module(trainer.model, plan, trainer.optimizer)


def resume(
    trainer: Trainer,
    generator: torch.Generator,
    path: str,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Loads a checkpoint of any number of ranks and any plan; the step at which to go on."""
    state = trainer.state(0, generator)
    shardwise.checkpoint.load(state, path, process_group=process_group)
    generator.set_state(state["generator"])
    return int(state["step"])


def line(step: int, loss: float, other: float | None) -> str:
    beside = "" if other is None else f"  {other:11.6f}  {abs(loss - other):10.1e}"
    return f"{step:6}  {loss:8.6f}{beside}"


@torch.no_grad()
def write(model: nn.Module, text: Text, count: int, length: int, seed: int) -> str:
    """Letters drawn one by one; all ranks draw the same, since all have the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    ids = text.ids[:length].tolist()
    device = next(model.parameters()).device
    model.eval()
    for _ in range(count):
        logits: Any = model(torch.tensor([ids[-length:]], device=device))
        chances = (logits[0, -1].full_tensor() / 0.7).softmax(0).cpu()
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    return text.words(ids[length:])


if __name__ == "__main__":
    main()
