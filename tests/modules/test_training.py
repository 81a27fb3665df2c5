"""Loss curves of a GPT over 50 steps are those of one process, for every plan and world size."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.demo.gpt import GPT, PLANS, Config, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS = 50
TINY = Config(vocabulary=13, length=8, width=24, heads=6, layers=1)


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    dtype: torch.dtype
    is_autocast: bool = False  # to bfloat16
    num_micro_batches: int = 1
    is_checkpointed: bool = False

    def config(self) -> Config:
        return replace(TINY, checkpointed=self.is_checkpointed)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.config()).to(self.dtype)

    def precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.is_autocast else nullcontext()


RECIPES = {
    "float64": Recipe(torch.float64, num_micro_batches=2, is_checkpointed=True),
    "float32": Recipe(torch.float32),
    "bfloat16": Recipe(torch.float32, is_autocast=True),
}
# Every plan on four ranks, and three of them on fewer.
WORLDS = [(name, 4) for name in PLANS] + [
    (name, size) for name in ("mixed", "uneven", "grid") for size in (1, 2, 3)
]


@lru_cache
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A few sentences with a rule to learn, over and over."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(TINY.vocabulary, (3, 4, TINY.length + 1), generator=generator)
    words[:, :, 1::2] = (words[:, :, :-1:2] * 5 + 3) % TINY.vocabulary
    return [(one[:, :-1], one[:, 1:]) for one in words]


def losses(
    model: nn.Module,
    recipe: Recipe,
    steps: int,
    before: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> list[float]:
    """The mean loss of every step of training; `before` is called before each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, foreach=True)
    found = []
    for step in range(steps):
        before(step, optimizer)
        total = 0.0
        ids, targets = batches()[step % len(batches())]
        parts = recipe.num_micro_batches
        for part in zip(ids.chunk(parts), targets.chunk(parts), strict=True):
            with recipe.precision():
                loss = model(*part) / parts
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


@lru_cache
def expected(kind: str) -> Sequence[float]:
    """Those of one process, without sharding."""
    recipe = RECIPES[kind]
    return losses(recipe.model(), recipe, STEPS)


def sharded_losses(rank: int, name: str, kind: str, world_size: int, steps: int) -> list[float]:
    recipe = RECIPES[kind]
    model = recipe.model()
    shardwise.shard_module(model, plan_of(name, recipe.config(), world_size))
    with shardwise.implicit_comm("error"):
        return losses(model, recipe, steps)


def check_curve(found: Sequence[float], kind: str) -> None:
    assert expected(kind)[-1] < 0.8 * expected(kind)[0], "nothing is learned: it says little"
    wanted = torch.tensor(expected(kind)[: len(found)], dtype=torch.float64)
    given = torch.tensor(found, dtype=torch.float64)
    if kind == "bfloat16":
        torch.testing.assert_close(given[0], wanted[0], rtol=1e-2, atol=0)
        torch.testing.assert_close(given[-1], wanted[-1], rtol=0.05, atol=0)
    else:
        most = 1e-9 if kind == "float64" else 1e-4
        torch.testing.assert_close(given, wanted, rtol=0, atol=most)


# The rest is left to a long run; the change of plans below goes through all of them.
IN_BRIEF = [(("mixed", 1), "float64"), (("grid", 2), "float64"), (("uneven", 3), "float64")]
IN_BRIEF += [(("mixed", 4), "float64"), (("mixed", 4), "bfloat16")]
CASES = [
    pytest.param(*world, kind, marks=() if is_brief else pytest.mark.long)
    for world in WORLDS
    for kind in RECIPES
    for is_brief in [(world, kind) in IN_BRIEF]
]


def num_steps(world_size: int) -> int:
    """The whole curve on few ranks and in a long run, else its beginning."""
    return STEPS if world_size < 3 else min(STEPS, settings().max_examples * 4 // 5)


@pytest.mark.parametrize(("name", "world_size", "kind"), CASES)
def test_simulated(name: str, world_size: int, kind: str) -> None:
    steps = num_steps(world_size)
    results = simulate(sharded_losses, world_size, name, kind, world_size, steps).results
    assert all(result == results[0] for result in results)
    check_curve(results[0], kind)


def test_on_real_ranks() -> None:
    for result in shardwise.run_local(sharded_losses, 4, "uneven", "float32", 4, num_steps(4)):
        check_curve(result, "float32")


def changing_losses(
    rank: int, names: Sequence[str], kind: str, world_size: int, steps: int
) -> list[float]:
    """The model goes from plan to plan while it is trained."""
    recipe = RECIPES[kind]
    plans = [plan_of(name, recipe.config(), world_size) for name in names]
    model = recipe.model()
    shardwise.shard_module(model, plans[0])

    def change(step: int, optimizer: torch.optim.Optimizer) -> None:
        part, is_start = divmod(step * len(plans), steps)
        if step and is_start < len(plans):
            shardwise.reshard_module(model, plans[part], optimizer)

    with shardwise.implicit_comm("error"):
        return losses(model, recipe, steps, before=change)


def test_a_change_of_plan_leaves_no_trace_in_the_curve() -> None:
    names = ["one-rank", "mixed", "row", "grid", "uneven", "column"]
    results = simulate(changing_losses, 4, names, "float64", 4, num_steps(4)).results
    check_curve(results[0], "float64")
