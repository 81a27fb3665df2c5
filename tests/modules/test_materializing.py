"""Models on the meta device: sharded first, then given memory and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ShardingPlan
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError
from shardwise.sharded_tensor import ShardedTensor
from shardwise.testing.local_run import run_local
from shardwise.testing.memory import peak_tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


class Model(nn.Module):
    """Modules of torch that draw their values in many ways, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv1d(8, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.rotary = Rotary(8)
        self.head = nn.Linear(8, 9)
        self.head.weight = self.table.weight


class Rotary(nn.Module):
    """Has a buffer that it computes, and assigns."""

    speed: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("speed", torch.empty(width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        half = self.speed.shape[0]
        self.speed = 10.0 ** -torch.arange(half, dtype=torch.float32)


def model_on_meta(make: Callable[[], nn.Module] = Model) -> nn.Module:
    with torch.device("meta"):
        return make()


PLANS: list[dict[str, str]] = [
    {},
    {"table.weight": "chunk(0)", "head.weight": "chunk(0)", "attention.*": "chunk(0)"},
    {
        "table.weight": "chunk(1, sizes={sizes})",
        "head.weight": "chunk(1, sizes={sizes})",
        "conv.weight": "on_rank(0)",
        "conv.bias": "replicate()",
        "norm.*": "replicate()",
        "rotary.speed": "block_cyclic(0, 1)",
    },
]


def plan_of(number: int, world_size: int) -> ShardingPlan:
    sizes = [8] + [0] * (world_size - 1)
    return ShardingPlan({k: v.format(sizes=sizes) for k, v in PLANS[number].items()})


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything in the model, buffers that are not saved too."""
    named: Any = [*model.named_parameters(), *model.named_buffers()]
    return {n: (t.full_tensor() if isinstance(t, ShardedTensor) else t).detach() for n, t in named}


def made(rank: int, number: int, world_size: int) -> dict[str, torch.Tensor]:
    """Sharded on the meta device, then materialized."""
    shardwise.manual_seed(3)
    torch.manual_seed(rank)  # torch's own numbers are not used
    model = model_on_meta()
    parameter = model.get_parameter("table.weight")
    with shardwise.trace(show=False) as t:
        shardwise.shard_module(model, plan_of(number, world_size))
    assert {event.op for event in t.events} <= {"compare arguments"}
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert shardwise.materialize(model) is model
    assert model.get_parameter("table.weight") is parameter
    assert model.get_parameter("head.weight") is parameter
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert isinstance(tensor, ShardedTensor) == (name in _matched(number))
    return values(model)


def _matched(number: int) -> set[str]:
    named = Model().state_dict()
    patterns = PLANS[number]
    return {n for n in named if n in patterns or f"{n.split('.')[0]}.*" in patterns}


def test_values_do_not_depend_on_plan_and_world_size() -> None:
    (expected,) = simulate(made, 1, 0, 1).results
    assert expected["table.weight"][0].eq(0).all()  # padding_idx
    assert expected["table.weight"][1:].std() > 0.5
    assert expected["rotary.speed"].tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    bound = (1 / (8 * 3)) ** 0.5  # of the whole weight's fan
    assert 0.8 * bound < expected["conv.weight"].abs().max() <= bound
    for world_size in (2, 3):
        for number in range(len(PLANS)):
            for found in simulate(made, world_size, number, world_size).results:
                assert found.keys() == expected.keys()
                for name, tensor in found.items():
                    assert torch.equal(tensor, expected[name]), (world_size, number, name)


def _peak(rank: int) -> int:
    shardwise.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    plan = ShardingPlan({"*.weight": "chunk(0)", "*.bias": "replicate()"})

    def run() -> None:
        shardwise.shard_module(model, plan)
        shardwise.materialize(model)

    return peak_tensor_bytes(run)


def test_the_full_model_exists_nowhere() -> None:
    whole = 4 * 256 * 256 * 4
    # The own parts, and what a fill needs on the way; less than a half of the model.
    assert max(run_local(_peak, 4)) < whole / 2


def _by_hand(rank: int) -> None:
    """`to_empty` and `reset_parameters`, as torch has it, do the same."""
    found = []
    for is_by_hand in (True, False):
        shardwise.manual_seed(5)
        model: Any = model_on_meta(lambda: nn.Linear(4, 6))
        shardwise.shard_module(model, ShardingPlan({"*": "chunk(0)"}))
        if is_by_hand:
            model.to_empty(device="cpu").reset_parameters()
        else:
            shardwise.materialize(model, "cpu")
        found.append(values(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def _with_init(rank: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)  # written past autograd, as many do
            nn.init.ones_(module.bias)

    model: Any = model_on_meta(lambda: nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 4)))
    shardwise.shard_module(model, ShardingPlan({"0.weight": "chunk(0)"}))
    shardwise.materialize(model, init=init)
    assert 0.019 < model[0].weight.full_tensor().std() < 0.021
    assert type(model[1].weight) is nn.Parameter
    assert 0.015 < model[1].weight.std() < 0.025
    assert model[1].bias.eq(1).all()


def _keeps_data(rank: int) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), model_on_meta(lambda: nn.Linear(3, 3)))
    before = model[0].weight.detach().clone()
    shardwise.shard_module(model, ShardingPlan({"*.weight": "chunk(0)"}), src_rank=1)
    assert not model[0].weight.is_meta
    assert model[1].weight.is_meta
    shardwise.materialize(model)
    kept, drawn = model[0].weight.full_tensor(), model[1].weight.full_tensor()
    assert rank == 0 or torch.equal(kept, before)
    assert 0 < drawn.abs().max() <= 3**-0.5


class Table(nn.Module):
    """Computes a buffer in `__init__`, of which nothing is left on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))


class HalfTable(Table):
    def reset_parameters(self) -> None:
        """Forgets the mask."""


def _refused(rank: int) -> None:
    for kind, match in [
        (
            Table,
            r"'0.mask' on the meta device: expected modules with a method reset_parameters, "
            r"got Table without\. Write them in.*init=",
        ),
        (HalfTable, r"'0.mask' without values.*neither reset_parameters nor init.*torch.device"),
    ]:
        model = nn.Sequential(model_on_meta(kind))
        # Rank 1 has nothing of the mask, and hears of it.
        spec = shardwise.on_rank(0, device="cpu")
        shardwise.shard_module(model, ShardingPlan({"0.mask": spec}))
        heard = r"failed on other ranks: rank 0: ArgumentValueError.*" + match[:8]
        with pytest.raises(ValueError, match=heard if rank and kind is HalfTable else match):
            shardwise.materialize(model)


def _broken_on_one_rank(rank: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if rank == 1:
                raise KeyError("no such init")
            module.reset_parameters()

    model = nn.Sequential(model_on_meta(lambda: nn.Linear(4, 6)))
    weight = model[0].weight
    if rank == 1:
        with pytest.raises(KeyError, match="no such init"):
            shardwise.materialize(model, init=init)
    else:
        with pytest.raises(AgreementError, match=r"failed on other ranks: rank 1: .*no such init"):
            shardwise.materialize(model, init=init)
    assert model[0].weight is weight  # and no stand-in


@pytest.mark.parametrize(
    "check", [_by_hand, _with_init, _keeps_data, _refused, _broken_on_one_rank]
)
def test_models_get_memory_and_values(check: Any) -> None:
    simulate(check, 2)
