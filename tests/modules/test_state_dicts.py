"""State dicts and copies of models and stock optimizers, sharded as they are: nothing is gathered.

`tests/sharded_tensor/test_state_dict.py` has single modules; here are whole models in training.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharding_plan import ShardingPlan

WORLD_SIZE = 3
PLANS: list[dict[str, Any]] = [
    {"0.weight": "chunk(0)", "1.*": "replicate()"},
    {"0.weight": "chunk(1, sizes=[0, 4, 1])", "0.bias": "on_rank(2)", "1.weight": "flat()"},
    {"0.*": "block_cyclic(0, 1)"},
]


def plain_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).double()


def model_of(plan: dict[str, Any]) -> Any:
    model = plain_model()
    shardwise.reshard_module(model, ShardingPlan(plan))
    return model


def full(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return plain.detach().clone()


def step(model: Any, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    """Steps with gradients that do not depend on the layout."""
    for _ in range(times):
        for number, parameter in enumerate(model.parameters()):
            grad = torch.linspace(-1, number + 1.0, parameter.numel()).double()
            grad = grad.view(parameter.shape)
            if isinstance(parameter, ShardedTensor):
                grad = shardwise.distribute(grad, parameter.sharding_spec(), src_rank=None)
            parameter.grad = grad
        optimizer.step()


def check_same(model: Any, reference: Any) -> None:
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).detach()
        torch.testing.assert_close(full(parameter), expected, msg=name)


def data_sent(trace: Any) -> int:
    """Bytes between ranks, but for arguments that are compared."""
    return sum(event.total for event in trace.events if not event.op.startswith("compare"))


OPTIMIZERS: dict[str, Any] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stock_optimizers_go_on_from_their_state_dicts(name: str) -> None:
    make = OPTIMIZERS[name]
    policy: Any = "allow" if name == "Adafactor" else "error"

    def on_rank(rank: int) -> None:
        reference = plain_model()
        plain = make(reference.parameters())
        step(reference, plain, 3)
        for plan in PLANS:
            model = model_of(plan)
            first = make(model.parameters())
            with shardwise.implicit_comm(policy):
                step(model, first, 2)
            with shardwise.trace(show=False) as trace, shardwise.implicit_comm("error"):
                state = saved(first.state_dict())
                second = make(model.parameters())
                second.load_state_dict(state)
            assert data_sent(trace) == 0
            with shardwise.implicit_comm(policy):
                step(model, second)
            check_same(model, reference)

    def saved(state: Any) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file)

    simulate(on_rank, WORLD_SIZE)


def test_averages_of_models_are_copies_that_follow() -> None:
    def on_rank(rank: int) -> None:
        for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
            reference = plain_model()
            expected: Any = AveragedModel(reference, **options)
            plain = OPTIMIZERS["SGD"](reference.parameters())
            for _ in range(3):
                step(reference, plain)
                expected.update_parameters(reference)
            for plan in PLANS:
                model = model_of(plan)
                optimizer = OPTIMIZERS["SGD"](model.parameters())
                with shardwise.trace(show=False) as trace, shardwise.implicit_comm("error"):
                    average: Any = AveragedModel(model, **options)
                    for _ in range(3):
                        step(model, optimizer)
                        average.update_parameters(model)
                assert data_sent(trace) == 0
                check_same(average.module, expected.module)
                check_same(model, reference)
                layouts = [getattr(p, "shard_layout", None) for p in model.parameters()]
                found = [getattr(p, "shard_layout", None) for p in average.module.parameters()]
                assert found == layouts

    simulate(on_rank, WORLD_SIZE)


def test_states_of_models_go_into_any_other_layout() -> None:
    def on_rank(rank: int) -> None:
        for source in PLANS:
            for target in PLANS:
                model, other = model_of(source), model_of(target)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
                layouts = [getattr(p, "shard_layout", None) for p in other.parameters()]
                state = sharded_state(model, like=other)
                with shardwise.implicit_comm("error"):
                    found = other.load_state_dict(state)
                assert found == ([], [])
                check_same(other, shifted())
                assert [getattr(p, "shard_layout", None) for p in other.parameters()] == layouts

    def sharded_state(model: Any, like: Any) -> dict[str, Any]:
        """Of tensors that are plain in the other model, full ones."""
        return {
            name: value if isinstance(like.get_parameter(name), ShardedTensor) else full(value)
            for name, value in model.state_dict().items()
        }

    simulate(on_rank, WORLD_SIZE)


def shifted() -> Any:
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def test_loading_is_strict_or_not_and_can_assign() -> None:
    def on_rank(rank: int) -> None:
        model = model_of(PLANS[0])
        state = copy.deepcopy(model.state_dict())
        bias = state.pop("1.bias")
        state["2.bias"] = bias
        with pytest.raises(RuntimeError, match=r"Missing key.*1\.bias(.|\n)*Unexpected.*2\.bias"):
            model.load_state_dict(state)
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["1.bias"], ["2.bias"])
        other = model_of(PLANS[1])
        layout = model.state_dict()["0.weight"].shard_layout
        state = copy.deepcopy(model.state_dict())
        state["0.weight"].add_(3)
        other.load_state_dict(state, assign=True)
        weight: Any = other[0].weight
        assert weight.requires_grad
        assert "0.weight" in dict(other.named_parameters())
        assert weight.shard_layout == layout  # the tensor itself, where it is
        torch.testing.assert_close(full(weight), full(model[0].weight) + 3)

    simulate(on_rank, WORLD_SIZE)


def test_shapes_are_compared_with_names() -> None:
    def on_rank(rank: int) -> None:
        model = model_of(PLANS[0])
        for wrong in (torch.ones(7, 6), model_of(PLANS[0])[1].weight.detach()):
            with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
                model.load_state_dict({**plain_model().state_dict(), "0.weight": wrong})
        with pytest.raises(RuntimeError, match=r'named "0\.bias".*full_tensor'):
            model.load_state_dict({**plain_model().state_dict(), "0.bias": sharded_bias()})

    def sharded_bias() -> Any:
        return model_of({"0.bias": "chunk(0)"})[0].bias.detach()

    simulate(on_rank, WORLD_SIZE)
