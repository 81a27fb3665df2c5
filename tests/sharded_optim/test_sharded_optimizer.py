"""The seed's optimizer, and the names of what it works on."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ShardwiseError
from shardwise.sharded_optim import ShardedOptimizer, named_params_with_sharded_tensor
from shardwise.sharded_optim.api import ShardedOptimizer as AtSubPath
from shardwise.sharded_tensor import ShardedTensor

WORLD_SIZE = 3
SPECS = ["chunk(0)", "chunk(0, sizes=[0, 6, 1])", "block_cyclic(0, 1)", "on_rank(1)", "replicate()"]


def spec_of(text: str) -> Any:
    return shardwise.parse_spec(text, ranks=range(WORLD_SIZE), device="cpu")


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).double()


def sharded_model(text: str = "chunk(0)") -> Any:
    """The weight of one layer is sharded, and so is a table that is no parameter."""
    model: Any = plain_model()
    weight = shardwise.distribute(model[0].weight.detach(), spec_of(text), src_rank=None)
    model[0].weight = nn.Parameter(weight)
    model[1].table = shardwise.distribute(
        torch.arange(14.0).double().view(7, 2), spec_of(text), src_rank=None
    ).requires_grad_()
    return model


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(named_params_with_sharded_tensor(model))


def reference_params() -> list[torch.Tensor]:
    """What the sharded model has, plain, in the order in which it is named."""
    model = plain_model()
    table = torch.arange(14.0).double().view(7, 2).requires_grad_()
    return [table, *model.parameters()]


def set_grads(params: Any) -> None:
    """Gradients that do not depend on the layout."""
    for number, param in enumerate(params):
        full = torch.linspace(-1, number + 1.0, param.numel()).double().view(param.shape)
        if isinstance(param, ShardedTensor):
            param.grad = shardwise.distribute(full, param.sharding_spec(), src_rank=None)
        else:
            param.grad = full


def check_same(params: Any, expected: Any) -> None:
    for one, other in zip(params, expected, strict=True):
        full = one.full_tensor() if isinstance(one, ShardedTensor) else one
        torch.testing.assert_close(full.detach(), other.detach())


def test_names_come_with_prefix_and_recurse() -> None:
    def on_rank(rank: int) -> None:
        model = sharded_model()
        every = ["1.table", "0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(named(model)) == every
        with_prefix = named_params_with_sharded_tensor(model, prefix="net")
        assert [name for name, _ in with_prefix] == [f"net.{name}" for name in every]
        alone = named_params_with_sharded_tensor(model[1], recurse=False)
        assert [name for name, _ in alone] == ["table", "weight", "bias"]
        assert list(named_params_with_sharded_tensor(model, recurse=False)) == []
        model[0].again = model[1].table
        assert [name for name in named(model) if "table" in name or "again" in name] == ["0.again"]

    simulate(on_rank, WORLD_SIZE)


CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {}),  # has state before the first step
]


@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_it_does_what_the_optimizer_does_on_full_tensors(number: int) -> None:
    kind, options = CLASSES[number]
    make: Any = kind

    def on_rank(rank: int) -> None:
        for first, second in zip(SPECS, [*SPECS[1:], SPECS[0]], strict=True):
            expected = reference_params()
            plain = make(expected, 0.1, **options)
            params = named(sharded_model(first))
            optimizer = ShardedOptimizer(params, kind, 0.1, **options)
            for _ in range(2):
                step(plain, expected)
                step(optimizer, params.values())
            check_same(params.values(), expected)
            # Into one of other layouts, and in another order.
            other = named(sharded_model(second))
            for name, param in other.items():
                param.detach().copy_(params[name].detach())
            turned = dict(reversed(other.items()))
            loaded = ShardedOptimizer(turned, kind, 9.0, **options)
            with shardwise.implicit_comm("error"):
                found = loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                assert found == ([], [])
                step(plain, expected)
                step(loaded, other.values())
            check_same(other.values(), expected)
            assert loaded.param_groups[0]["lr"] == 0.1
            for param, state in loaded.state.items():
                for value in state.values():
                    if isinstance(param, ShardedTensor) and value.shape == param.shape:
                        assert value.shard_layout == param.shard_layout

    def step(optimizer: torch.optim.Optimizer, params: Any) -> None:
        set_grads(params)
        optimizer.step()

    simulate(on_rank, WORLD_SIZE)


def test_state_dicts_of_torchs_own_optimizers_are_loaded_in_their_order() -> None:
    def on_rank(rank: int) -> None:
        expected = reference_params()
        plain = torch.optim.AdamW(expected, lr=0.1)
        set_grads(expected)
        plain.step()
        params = named(sharded_model("chunk(0, sizes=[5, 0, 2])"))
        for param, full in zip(params.values(), expected, strict=True):
            param.detach().copy_(full.detach())
        optimizer = ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for one, tensors in ((plain, expected), (optimizer, params.values())):
            set_grads(tensors)
            with shardwise.implicit_comm("error"):
                one.step()
        check_same(params.values(), expected)

    simulate(on_rank, WORLD_SIZE)


def test_it_is_an_optimizer_like_others() -> None:
    def on_rank(rank: int) -> None:
        params = named(sharded_model())
        optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        set_grads(params.values())
        assert optimizer.step(lambda: 3.5) == 3.5
        assert calls == ["before", "after"]
        optimizer.zero_grad()
        assert all(param.grad is None for param in params.values())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        set_grads(params.values())
        optimizer.step()
        scheduler.step()
        assert optimizer._optim.param_groups[0]["lr"] == 0.05
        copied = copy.deepcopy(optimizer)
        assert copied.param_groups is copied._optim.param_groups
        assert copied.state is copied._optim.state
        for name, param in copied.named_params.items():
            assert param is not params[name]
            assert any(param is one for one in copied.param_groups[0]["params"])
        before = [param.detach().clone() for param in params.values()]
        set_grads(copied.named_params.values())
        copied.step()
        check_same(params.values(), [_full(one) for one in before])  # the original stays

    simulate(on_rank, WORLD_SIZE)


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def test_groups_can_be_added() -> None:
    def on_rank(rank: int) -> None:
        params = named(sharded_model())
        table = params.pop("1.table")
        optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
        optimizer.add_param_group({"params": {"table": table}, "lr": 0.7})
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
        optimizer.add_param_group({"params": [("last", torch.ones(2, requires_grad=True))]})
        groups = optimizer.state_dict()["param_groups"]
        assert [group["params"] for group in groups[1:]] == [
            ["table"],
            ["param_groups.2.0"],
            ["last"],
        ]
        assert [group["lr"] for group in groups] == [0.1, 0.7, 0.1, 0.1]
        with pytest.raises(ShardwiseError, match=r"add_param_group.*table"):
            optimizer.add_param_group({"params": {"table": torch.ones(2)}})
        with pytest.raises(ShardwiseError, match="each once, got twice"):
            optimizer.add_param_group({"params": [("twice", torch.ones(2))] * 2})
        optimizer.load_state_dict(optimizer.state_dict())
        assert [len(group["params"]) for group in optimizer.param_groups] == [4, 1, 1, 1]

    simulate(on_rank, WORLD_SIZE)


def test_state_that_is_not_there_yet_is_reported() -> None:
    def on_rank(rank: int) -> None:
        params = named(sharded_model())
        optimizer = ShardedOptimizer(params, torch.optim.Adam, lr=0.1)
        set_grads(params.values())
        params["0.bias"].grad = None
        optimizer.step()
        state = optimizer.state_dict()
        assert "0.bias" not in state["state"]
        assert optimizer.load_state_dict(state) == (["0.bias"], [])
        fewer = {name: param for name, param in params.items() if name != "1.table"}
        part = ShardedOptimizer(fewer, torch.optim.Adam, lr=0.3)
        with pytest.raises(ShardwiseError, match=r"1\.table.*strict=False"):
            part.load_state_dict(state)
        assert part.load_state_dict(state, strict=False) == (["0.bias"], ["1.table"])
        assert part.param_groups[0]["lr"] == 0.1
        with pytest.raises(ShardwiseError, match=r"1\.table"):
            optimizer.load_state_dict(part.state_dict())

    simulate(on_rank, WORLD_SIZE)


def test_wrong_calls() -> None:
    params: Any = [torch.ones(2, requires_grad=True)]
    with pytest.raises(ShardwiseError, match="named_params_with_sharded_tensor"):
        ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        ShardedOptimizer({}, torch.optim.SGD, lr=0.1)
    assert AtSubPath is ShardedOptimizer


def _on_real_rank(rank: int) -> None:
    params = named(sharded_model("chunk(0, sizes=[1, 5, 1])"))
    optimizer = ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    set_grads(params.values())
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = named(sharded_model("replicate()"))
    loaded = ShardedOptimizer(other, torch.optim.AdamW, lr=0.1)
    assert loaded.load_state_dict(torch.load(file)) == ([], [])
    for name, param in other.items():
        mine, theirs = loaded.state[param]["exp_avg"], optimizer.state[params[name]]["exp_avg"]
        assert torch.equal(_full(mine), _full(theirs))


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, WORLD_SIZE)
