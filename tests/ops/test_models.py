"""Models in plain torch give the same values and gradients under every plan, without a fallback."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from tests.ops.models import (
    CONV_PLANS,
    RANKS,
    TRANSFORMER_PLANS,
    ConvNet,
    Plan,
    Transformer,
    shard_by,
)

import shardwise
from shardwise.comm.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def words() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(11, (6, 8), generator=generator) for _ in range(2))


def pictures() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    shown = torch.randn(6, 3, 10, 10, generator=generator, dtype=torch.float64)
    return shown, torch.randint(5, (6,), generator=generator)


def model_of(kind: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind().double()


def check_model(first: torch.nn.Module, given: tuple[torch.Tensor, ...], plan: Plan) -> None:
    """Two steps of training, so that what the first wrote is read; all ranks call it."""
    reference, model = copy.deepcopy(first), copy.deepcopy(first)
    shard_by(model, plan)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (reference, model)]
    for _ in range(2):
        expected = reference(*given)
        with shardwise.implicit_comm("error"), shardwise.plain_inputs("replicated"):
            loss: Any = model(*[_placed(one, plan) for one in given])
            loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for name, parameter in model.named_parameters():
            same = reference.get_parameter(name).grad
            torch.testing.assert_close(_full(parameter.grad), same, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(_full(buffer), reference.get_buffer(name))


def _placed(full: torch.Tensor, plan: Plan) -> Any:
    return shardwise.distribute(full, plan.inputs(full.ndim), src_rank=None)


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor()
    return full


CASES: list[tuple[str, type[torch.nn.Module], Callable[[], tuple[torch.Tensor, ...]], Plan]] = [
    *[(f"transformer, {name}", Transformer, words, one) for name, one in TRANSFORMER_PLANS.items()],
    *[(f"conv net, {name}", ConvNet, pictures, one) for name, one in CONV_PLANS.items()],
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_simulated(number: int) -> None:
    _, kind, given, plan = CASES[number]
    model = model_of(kind)
    simulate(lambda _: check_model(model, given(), plan), len(RANKS))


def _on_rank(rank: int, numbers: Sequence[int]) -> None:
    for number in numbers:
        _, kind, given, plan = CASES[number]
        check_model(model_of(kind), given(), plan)


def test_on_real_ranks() -> None:
    """A third of the plans in brief: all of them are simulated."""
    step = 1 if settings().max_examples > 15 else 3
    shardwise.run_local(_on_rank, len(RANKS), range(0, len(CASES), step))
