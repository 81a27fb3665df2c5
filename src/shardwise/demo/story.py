"""What the demo shows, in two acts: one for all ranks, one for half of them.

The acts run on local ranks that `run_local` starts, or under torchrun, on one host or on many; then
the folder of the checkpoint has to be one that all hosts see.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

import shardwise
from shardwise.comm.alone import ALONE
from shardwise.demo.gpt import GPT, Config, plan_of
from shardwise.demo.training import Text, Trainer
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.transfer.units import format_bytes
from shardwise.viz import draw_layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardwise.geometry import Layout

__all__ = ["Shown", "check_converted", "finish", "first_act", "run", "second_act"]

_BATCH = 16
_STEPS_SHOWN = 6  # of each part
_DRAWN = ("blocks.0.attention.qkv.weight", "blocks.0.mlp.down.weight")


@dataclass(frozen=True)
class Shown:
    """What an act has found out, for the summary."""

    largest_difference: float  # of the losses, sharded and on one process
    moved: int = 0  # bytes, by the change of plan
    lower_bound: int = 0
    gathered: int = 0  # what gathering each tensor that moves would have moved


def run(folder: Path, steps: int, world_size: int) -> None:
    """The whole demo: on local ranks, or as one rank of torchrun's."""
    if "RANK" in os.environ:
        _under_torchrun(folder, steps)
        return
    half = max(world_size // 2, 1)
    first = shardwise.run_local(first_act, world_size, folder, steps, timeout=600)[0]
    second = shardwise.run_local(second_act, half, folder, steps, timeout=600)[0]
    finish(folder, world_size, half, first, second)


def _under_torchrun(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")  # needs no GPU
    try:
        world_size = dist.get_world_size()
        first = first_act(dist.get_rank(), folder, steps)
        half = list(range(max(world_size // 2, 1)))
        group = dist.new_group(half)
        if dist.get_rank() in half:
            second = second_act(dist.get_rank(), folder, steps, group)
        if dist.get_rank() == 0:
            finish(folder, world_size, len(half), first, second)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _console(rank: int) -> Console:
    """On the first rank only; as wide as a terminal is, also where there is none."""
    return Console(quiet=rank != 0, highlight=False, width=None if os.isatty(1) else 80)


# -- the first act ---------------------------------------------------------------------------------


def first_act(rank: int, folder: Path, steps: int) -> Shown:
    """Shards, trains, reshards and saves, on all ranks."""
    console, text = _console(rank), Text()
    config, world_size = Config(vocabulary=len(text.letters)), dist.get_world_size()
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):  # only rank 0 ever has the whole model
        model = GPT(config)
    beside = Trainer(copy.deepcopy(model), "float32") if rank == 0 else None

    console.rule(f"[bold]1. A plan for a small GPT on {world_size} ranks")
    plan = plan_of("mixed", config, world_size)
    console.print(plan.explain(model))
    shardwise.shard_module(model, plan)
    for name in _DRAWN:
        _draw(console, name, model.get_parameter(name))

    console.rule("[bold]2. Training, beside the same model on one process")
    trainer, generator = Trainer(model, "float32"), torch.Generator().manual_seed(0)
    lesson = _Lesson(trainer, beside, text, generator, console)
    half = max(steps // 2, 1)
    with shardwise.implicit_comm("error"):  # nothing is sent that the plan does not say
        lesson.train(0, half)

        console.rule("[bold]3. Another plan, while it is trained")
        shown = _change_plan(trainer, plan_of("grid", config, world_size), console)
        _draw(console, _DRAWN[0], model.get_parameter(_DRAWN[0]))
        lesson.train(half, steps)

    console.rule("[bold]4. A checkpoint")
    saved = shardwise.checkpoint.save(trainer.state(steps, generator), folder / "checkpoint")
    console.print(
        f"{saved.num_tensors} tensors, {format_bytes(saved.nbytes)}: parameters, AdamW's state and "
        "the generator.\nEach rank wrote its own part; the step and settings are in the index.\n"
    )
    return Shown(lesson.largest, *shown)


def _draw(console: Console, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, ShardedTensor):
        world_size = dist.get_world_size()
        console.print(f"\n{name}")
        console.print(draw_layout(tensor.shard_layout, itemsize=4, world_size=world_size, height=6))
        console.print()


class _Lesson:
    """Training, with the losses of both models side by side."""

    def __init__(
        self,
        trainer: Trainer,
        beside: Trainer | None,
        text: Text,
        generator: torch.Generator,
        console: Console,
    ) -> None:
        self._trainer, self._beside = trainer, beside
        self._text, self._generator, self._console = text, generator, console
        self.largest = 0.0

    def train(self, first: int, last: int) -> None:
        self._console.print("  step      loss  one process  difference")
        length = Config().length
        for step in range(first, last):
            batch = self._text.batch(_BATCH, length, self._generator)
            loss = self._trainer.step(*batch)
            other = loss if self._beside is None else self._beside.step(*batch)
            self.largest = max(self.largest, abs(loss - other))
            if (step - first) % max(1, (last - first) // _STEPS_SHOWN) == 0 or step == last - 1:
                line = f"{step:6}  {loss:8.6f}  {other:11.6f}  {abs(loss - other):10.1e}"
                self._console.print(line)
        self._console.print()


def _change_plan(
    trainer: Trainer, plan: shardwise.ShardingPlan, console: Console
) -> tuple[int, int, int]:
    """Reshards model and optimizer; bytes moved, the fewest possible, and those of gathering."""
    before = {name: tensor.shard_layout for name, tensor in _tensors(trainer)}
    with shardwise.trace(show=False) as trace:
        shardwise.reshard_module(trainer.model, plan, trainer.optimizer)
    after = dict(_tensors(trainer))
    moved = sum(event.total for event in trace.events if event.op not in _TALK)
    fewest = gathered = 0
    for name, layout in before.items():
        to, itemsize = after[name].shard_layout, after[name].dtype.itemsize
        fewest += shardwise.plan_reshard(layout, to, itemsize).lower_bound
        gathered += 0 if layout == to else _gathering(layout, itemsize)
    console.print(
        f"The batch is now cut over pairs of ranks, and the model within a pair.\n{len(before)} "
        f"tensors, AdamW's state among them, moved {moved:,} bytes between ranks;\nthe fewest "
        f"possible are {fewest:,}. Gathering each to cut it anew, as DTensor\ndoes on CPUs, "
        f"would have moved {gathered:,}."
    )
    return moved, fewest, gathered


_TALK = ("compare arguments", "compare results")  # exchanges of a few bytes that carry no data


def _tensors(trainer: Trainer) -> Iterator[tuple[str, ShardedTensor]]:
    """The sharded parameters and the state that the optimizer has for them."""
    for name, parameter in trainer.model.named_parameters():
        kept: Any = trainer.optimizer.state.get(parameter, {})
        for key, tensor in [("", parameter), *kept.items()]:
            if isinstance(tensor, ShardedTensor):
                yield f"{name} {key}", tensor


def _gathering(layout: Layout, itemsize: int) -> int:
    """Bytes that an all-gather of the tensor moves: all ranks get what they do not hold."""
    everywhere = layout.replicated(layout.shape, range(dist.get_world_size()))
    return shardwise.plan_reshard(layout, everywhere, itemsize).lower_bound


# -- the second act --------------------------------------------------------------------------------


def second_act(
    rank: int, folder: Path, steps: int, process_group: ProcessGroup | None = None
) -> Shown:
    """Resumes on half of the ranks, under a plan of uneven parts."""
    console, text = _console(rank), Text()
    config, count = Config(vocabulary=len(text.letters)), dist.get_world_size(process_group)
    console.rule(f"[bold]5. The run goes on, on {count} ranks, under a plan of uneven parts")
    torch.manual_seed(1)  # other numbers, which the checkpoint replaces
    with torch.device("cpu" if rank == 0 else "meta"):
        model = GPT(config)
    beside = Trainer(copy.deepcopy(model), "float32") if rank == 0 else None
    shardwise.shard_module(model, plan_of("uneven", config, count), process_group=process_group)
    trainer, generator = Trainer(model, "float32"), torch.Generator()
    state = trainer.state(0, generator)
    shardwise.checkpoint.load(state, folder / "checkpoint", process_group=process_group)
    generator.set_state(state["generator"])
    if beside is not None:  # the same checkpoint into plain tensors, by one process
        path = folder / "checkpoint"
        shardwise.checkpoint.load(beside.state(0, generator), path, process_group=ALONE)
    lesson = _Lesson(trainer, beside, text, generator, console)
    with shardwise.implicit_comm("error"):
        lesson.train(state["step"], state["step"] + max(steps // 4, 1))
    return Shown(lesson.largest)


# -- at the end ------------------------------------------------------------------------------------


def finish(folder: Path, world_size: int, half: int, first: Shown, second: Shown) -> None:
    """Converts the checkpoint, compares, and says what was shown; on one process."""
    console = _console(0)
    console.rule("[bold]6. A Hugging Face folder")
    converted = shardwise.checkpoint.convert(
        folder / "checkpoint", folder / "huggingface", only="model", progress=False
    )
    file = folder / "huggingface" / "model.safetensors"
    console.print(
        f"{file.name}: {len(converted.tensors)} tensors, {format_bytes(converted.nbytes)}, each in "
        "one piece, for everything that reads safetensors.\n"
    )
    check_converted(folder)
    console.rule("[bold]What was shown")
    for line in _summary(folder, world_size, half, first, second):
        console.print(line)


def check_converted(folder: Path) -> None:
    """Raises unless safetensors itself reads from the folder what the checkpoint holds."""
    from safetensors.torch import load_file

    model = GPT(Config(vocabulary=len(Text().letters)))
    path = folder / "checkpoint"
    shardwise.checkpoint.load({"model": model}, path, strict=False, process_group=ALONE)
    found, expected = load_file(folder / "huggingface" / "model.safetensors"), model.state_dict()
    wrong = found.keys() ^ expected.keys()
    wrong |= {name for name in found.keys() - wrong if not torch.equal(found[name], expected[name])}
    if wrong:
        raise AssertionError(f"converted wrongly: {', '.join(sorted(wrong))}")


def _summary(
    folder: Path, world_size: int, half: int, first: Shown, second: Shown
) -> Iterator[str]:
    largest = max(first.largest_difference, second.largest_difference)
    yield f"- A model in plain torch, sharded over {world_size} ranks by a plan of a dozen lines."
    yield f"- The losses of one process, to {largest:.0e}, under three plans."
    if first.moved:
        fewest = f"{first.lower_bound:,}"
        yield f"- A plan changed live: {first.moved:,} bytes moved, of {fewest} at least."
        yield f"  DTensor, which gathers on CPUs, would have moved {first.gathered:,}."
    yield f"- Saved on {world_size} ranks, resumed on {half}; nothing pickled, all with checksums."
    yield "- Converted to a Hugging Face folder, in bounded memory."
    yield f"\nThe files are in {folder}. Look at them:"
    yield f"  shardwise inspect {folder / 'checkpoint'}"
    yield f"  shardwise verify {folder / 'checkpoint'}\n"
