"""What goes into modules and what comes out: `input_plan`, `output_plan`, `return_local_tensor`."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import ShardingPlan
from shardwise.api import _collect_local_shard, _reshard_output
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.simulate import simulate
from shardwise.modules.nested import map_tensors, tensors_in
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.plain_inputs import are_rows
from shardwise.testing.local_run import run_local

Pair = namedtuple("Pair", ["left", "right"])  # as users have them


@dataclass
class Result:
    logits: torch.Tensor
    extra: Any = None
    made: int = field(init=False, default=3)


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor


class Record(OrderedDict[str, Any]):
    """A dict with more to it."""


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, dtype=torch.float64)


# -- nested values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        ones(2),
        (ones(2), None, "text"),
        [ones(2), {"a": (ones(3),)}],
        Pair(ones(2), 7),
        Result(ones(2), [ones(3)]),
        Frozen(ones(2)),
        Record(a=ones(2), b=Frozen(ones(1))),
        MappingProxyType({"a": ones(2)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_changed_wherever_they_are(value: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert type(doubled) is type(value)
    assert [t.tolist() for t in tensors_in(doubled)] == [[2.0] * len(t) for t in tensors_in(value)]
    assert all(t.eq(1).all() for t in tensors_in(value))  # which is not changed itself
    assert map_tensors(lambda tensor: tensor, value) is value


# -- outputs ---------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns what it is told to, of its weight."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.make = make

    def forward(self) -> Any:
        return self.make(self.weight)


def _outputs(rank: int) -> None:
    rows, columns = (shardwise.parse_spec(f"chunk({dim})", ranks=[0, 1]) for dim in (0, 1))
    for make in (
        lambda w: w,
        lambda w: (w, None),
        lambda w: {"a": [w, w * 2]},
        lambda w: Result(w, extra=torch.zeros(1)),
        lambda w: Pair(w, w),
    ):
        module = Returns(make)
        plan = ShardingPlan({"weight": rows}, output_plan={"": columns})
        shardwise.shard_module(module, plan)
        for _ in range(2):
            output = module()
            assert type(output) is type(make(module.weight))
            sharded: list[Any] = [t for t in tensors_in(output) if isinstance(t, ShardedTensor)]
            assert {t.shard_layout for t in sharded} == {columns.layout((4, 3))}
            weight: Any = module.weight  # which is not moved, though the module returns it
            assert weight.shard_layout == rows.layout((4, 3))
        weight.grad = None
        sharded[0].sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 3))
    plain = _reshard_output(nn.Linear(3, 3), rows)
    with pytest.raises(RuntimeError, match=r"output_plan of 'Linear'.*got Tensor.*input_plan"):
        plain(torch.ones(2, 3))


def _locals(rank: int) -> None:
    cut = shardwise.parse_spec("chunk(0)", ranks=[0, 1])
    for spec, shape in [
        (cut, (2, 3)),
        (shardwise.parse_spec("chunk(-1, sizes=[1, 2])", ranks=[0, 1]), [(4,), (4, 2)][rank]),
        (shardwise.parse_spec("replicate()", ranks=[0, 1]), (4, 3)),
    ]:
        module = Returns(lambda w: (w, 3))
        plan = ShardingPlan({"weight": cut}, {"": spec}, return_local_tensor=[""])
        shardwise.shard_module(module, plan)
        local, three = module()
        assert (type(local), local.shape, three) == (torch.Tensor, shape, 3)
        local.sum().backward()
        weight: Any = module.weight
        assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 3))
    module = Returns(lambda w: w)
    shardwise.shard_parameter(module, "weight", shardwise.on_rank(0, device="cpu"))
    assert _collect_local_shard(module) is module
    # On all ranks, also on the one that has a piece.
    with pytest.raises(RuntimeError, match=r"'Returns'.*of which rank 1 has 0.*output_plan"):
        module()


def test_outputs_go_where_the_plan_says() -> None:
    simulate(_outputs, 2)


def test_outputs_become_local_tensors() -> None:
    simulate(_locals, 2)


# -- inputs ----------------------------------------------------------------------------------------


class Asks(nn.Module):
    """Notes what it was called with, and what plain tensors mean inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs, are_rows())
        if kwargs.get("fails"):
            raise KeyError("inside")
        return self.linear(args[0])


def _sharded(meaning: Any, make: Any = Asks) -> Any:
    torch.manual_seed(0)
    here = simulated_rank.get()
    assert here is not None
    ranks = list(here.ranks)
    module = make().double()
    spec = shardwise.parse_spec("chunk(0)", ranks=ranks)
    plan = ShardingPlan({"linear.weight": spec}, input_plan={"": meaning})
    return shardwise.shard_module(module, plan)


def _meanings(rank: int) -> None:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    expected = Asks().double()
    for meaning, given, layout in [
        ("replicated", x, "replicate()"),
        ("chunk(0, sizes=[0, 4, 1])", x, "chunk(0, sizes=[0, 4, 1])"),
        ("local_rows", [x[:2], x[2:2], x[2:]][rank], "chunk(0, sizes=[2, 0, 3])"),
    ]:
        module = _sharded(meaning)
        scalar, sharded = torch.tensor(2.0), shardwise.as_replicated(x)
        leaf = given.clone().requires_grad_()
        with shardwise.trace(show=False) as t, shardwise.implicit_comm("allow"):
            y = module(leaf, sharded, scalar, "text", more={"rows": (given,), "none": None})
            y.sum().backward()
        (first, same, number, text), kwargs, rows = module.seen
        here = shardwise.parse_spec(layout, ranks=[0, 1, 2]).layout((5, 3))
        assert first.shard_layout == kwargs["more"]["rows"][0].shard_layout == here
        assert torch.equal(first.full_tensor(), x)
        assert (same is sharded, number is scalar, text) == (True, True, "text")
        assert not rows
        assert are_rows()  # again, outside
        expected.linear.weight.data = module.linear.weight.detach().full_tensor()
        expected.linear.bias.data = module.linear.bias.detach()
        torch.testing.assert_close(y.full_tensor(), expected(x))
        plain = x.clone().requires_grad_()
        expected(plain).sum().backward()
        mine = [slice(0, 2), slice(2, 2), slice(2, 5)][rank] if "rows" in meaning else slice(None)
        assert plain.grad is not None
        torch.testing.assert_close(leaf.grad, plain.grad[mine])
        names = [event.op for event in t.events if event.op == "exchange row counts"]
        assert len(names) == (meaning == "local_rows")  # for both inputs


def _uneven_inputs(rank: int) -> None:
    """Inputs of one rank may have different numbers of rows, on one rank only, too."""
    module = _sharded("local_rows")
    with shardwise.implicit_comm("allow"):
        module(torch.ones(2, 3, dtype=torch.float64), torch.ones(2 + rank))
    assert [tuple(one.shape) for one in module.seen[0]] == [(4, 3), (5,)]


def _ends(rank: int) -> None:
    module = _sharded("replicated")
    with pytest.raises(KeyError, match="inside"):
        module(torch.ones(2, 3), fails=True)
    assert are_rows()
    broken = _sharded("chunk(1)")
    with pytest.raises(ValueError, match="dim") as caught:
        broken(torch.ones(2))
    assert "(the whole module)" in caught.value.__notes__[-1]
    assert are_rows()
    narrow = _sharded("local_rows")
    with pytest.raises(ValueError, match="ranks differ in row, dtype and requires_grad of plain"):
        narrow(torch.ones(2, 3 + rank))
    assert are_rows()


class Outer(nn.Module):
    """Checkpoints a block that has a product of a plain tensor, and one that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.tril(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def mixed(x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.mask, torch.tanh(self.linear(x)))

        found: torch.Tensor = checkpoint(mixed, x, use_reentrant=False).square().mean()
        return found


def _checkpointed(rank: int) -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 12
    model = _sharded("replicated", Outer)
    torch.manual_seed(0)
    plain = Outer().double()
    loss = model(x)
    loss.backward()
    plain(x).backward()
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)


def _copies(rank: int) -> None:
    plan = ShardingPlan(
        {"linear.weight": "chunk(0)"}, {"linear": "replicate()"}, input_plan={"": "chunk(0)"}
    )
    module = shardwise.shard_module(Asks(), plan)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    x = torch.ones(4, 3)
    for made in (copy.deepcopy(module), loaded):
        y: Any = made(x)
        assert torch.equal(y.full_tensor(), module(x).full_tensor())
        assert y.shard_layout == shardwise.replicate().layout((4, 4))
        assert len(list(made.parameters())) == 2


@pytest.mark.parametrize(
    ("check", "world_size"),
    [(_meanings, 3), (_uneven_inputs, 2), (_ends, 2), (_checkpointed, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_plain_inputs_mean_what_the_plan_says(check: Any, world_size: int) -> None:
    simulate(check, world_size)


def test_copies_and_saved_modules_have_the_hooks() -> None:
    run_local(_copies, 2)
