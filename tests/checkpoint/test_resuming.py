"""A training run that ends on four ranks goes on on fewer, with the losses of one that did not."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from examples.gpt import GPT, Config, plan_of

import shardwise
from shardwise.comm.simulate import simulate

if TYPE_CHECKING:
    from pathlib import Path

TINY = Config(vocabulary=13, length=8, width=24, heads=6, layers=1)
BEFORE, AFTER = 6, 6  # steps


@lru_cache
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = (BEFORE + AFTER, 4, TINY.length + 1)
    words = torch.randint(TINY.vocabulary, size, generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in words]


class Run:
    """A GPT and its optimizer, in double precision: sums in other orders differ by little."""

    def __init__(self, plan: str | None, world_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT(TINY).double()
        if plan is not None:
            shardwise.shard_module(self.model, plan_of(plan, TINY, world_size))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)
        self.step = 0

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return {**parts, "step": self.step}

    def resume(self, path: Path) -> list[float]:
        state = self.state()
        shardwise.checkpoint.load(state, path)
        self.step = state["step"]
        return self.train(AFTER)

    def train(self, steps: int) -> list[float]:
        found = []
        for ids, targets in batches()[self.step : self.step + steps]:
            loss = self.model(ids, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            found.append(loss.item())
        self.step += steps
        return found


@lru_cache
def uninterrupted() -> list[float]:
    return Run(None, 1, seed=0).train(BEFORE + AFTER)


def begin(rank: int, plan: str, path: Path) -> list[float]:
    run = Run(plan, 4, seed=0)
    losses = run.train(BEFORE)
    shardwise.checkpoint.save(run.state(), path)
    return losses


def go_on(rank: int, plan: str, world_size: int, path: Path) -> list[float]:
    return Run(plan, world_size, seed=7).resume(path)  # other numbers, which are replaced


def check_rest(losses: list[float]) -> None:
    torch.testing.assert_close(losses, uninterrupted()[BEFORE:], rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resuming") / "checkpoint"
    losses = simulate(begin, 4, "mixed", path).results[0]
    torch.testing.assert_close(losses, uninterrupted()[:BEFORE], rtol=0, atol=1e-9)
    return path


@pytest.mark.parametrize(("plan", "world_size"), [("grid", 3), ("uneven", 2), ("mixed", 1)])
def test_fewer_ranks(saved: Path, plan: str, world_size: int) -> None:
    for losses in simulate(go_on, world_size, plan, world_size, saved).results:
        check_rest(losses)


def test_one_process_without_sharding(saved: Path) -> None:
    check_rest(Run(None, 1, seed=7).resume(saved))


def test_real_ranks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shardwise.run_local(begin, 4, "mixed", path)
    for losses in shardwise.run_local(go_on, 3, "row", 3, path):
        check_rest(losses)
