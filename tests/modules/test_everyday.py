"""What people do with models every day, with sharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import shardwise
from shardwise import ShardingPlan
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor import ShardedTensor

PLAN = ShardingPlan(
    {"0.*": "chunk(0)", "3.weight": "chunk(1)"}, {"3": "replicate()"}, input_plan={"": "replicated"}
)


def plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3))


def sharded() -> Any:
    return shardwise.shard_module(plain(), PLAN)


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return whole.detach()


X = torch.linspace(-1, 1, 20).view(4, 5)


def _looking(rank: int) -> None:
    model, other = sharded(), plain()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in other.parameters())
    assert repr(model) == repr(other)
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert names == [(name, tuple(p.shape)) for name, p in other.named_parameters()]
    assert "(7, 5)" in repr(model[0].weight)


def _evaluating(rank: int) -> None:
    model, other = sharded(), plain().eval()
    assert model.train() is model
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), shardwise.implicit_comm("error"):
            found = model(X)
            torch.testing.assert_close(full(found), other(X))
            assert not found.requires_grad


def _dropping(rank: int) -> None:
    """One mask for all ranks in training."""
    model = sharded()
    shardwise.manual_seed(1)
    first = full(model(X))
    shardwise.manual_seed(1)
    assert torch.equal(full(model(X)), first)
    assert not torch.equal(full(model(X)), first)


def _converting(rank: int) -> None:
    model, other = sharded().eval(), plain().eval()
    parameters = list(model.parameters())
    for dtype, atol in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        assert model.to(dtype) is model
        assert {p.dtype for p in model.parameters()} == {dtype}
        expected = other.to(dtype)(X.to(dtype)).detach()
        torch.testing.assert_close(full(model(X.to(dtype))), expected, atol=atol, rtol=0)
    model.half()
    assert model[0].weight.local_tensor().dtype == torch.float16
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def _clearing(rank: int) -> None:
    model = sharded()
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(False)
    assert not model(X).requires_grad


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized(rank: int) -> None:
    """Registered before or after the model is sharded."""
    torch.manual_seed(0)
    linear: Any = nn.Linear(4, 4)
    found = []
    for is_first in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4))
        name = "0.parametrizations.weight.original" if is_first else "0.weight"
        if is_first:
            parametrize.register_parametrization(model[0], "weight", Symmetric())
            with pytest.raises(ValueError, match=r"Linear.weight, which a parametrization.*origin"):
                shardwise.shard_parameter(model[0], "weight", shardwise.on_rank(0))
        plan = ShardingPlan({name: "chunk(0)"}, input_plan={"": "replicated"})
        with shardwise.implicit_comm("allow"):
            shardwise.shard_module(model, plan)
            if not is_first:
                parametrize.register_parametrization(model[0], "weight", Symmetric())
            y = model(torch.ones(2, 4))
            y.square().sum().backward()
        original = model[0].parametrizations.weight.original
        assert isinstance(original, ShardedTensor)
        found.append((full(y), full(original.grad)))
    parametrize.register_parametrization(linear, "weight", Symmetric())
    y = linear(torch.ones(2, 4))
    y.square().sum().backward()
    expected = linear.parametrizations.weight.original.grad
    for output, grad in found:
        torch.testing.assert_close(output, y.detach())
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    "check", [_looking, _evaluating, _dropping, _converting, _clearing, _parametrized]
)
def test_sharded_models_are_models(check: Any) -> None:
    simulate(check, 3)
