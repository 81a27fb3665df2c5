"""`shard_module` and `shard_parameter`: a sharded model is the plain one, for every layout."""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise
from shardwise import Sharder, ShardingPlan
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, RankFailure
from shardwise.modules import sharding
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.scattering import scatter
from shardwise.testing.local_run import run_local
from shardwise.testing.memory import peak_tensor_bytes
from shardwise.testing.strategies import specs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharding_spec import ShardingSpec


class Tagger(nn.Module):
    """Words to a loss: a tied table, a linear layer that is frozen, a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mixed = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.table.weight
        self.mixed.bias.requires_grad_(False)
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.mixed(self.table(words)))) + self.shift
        return F.cross_entropy(self.head(x), target)


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 3, 6, 3, 1]), torch.tensor([1, 2, 0, 6, 5])


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return whole.detach()


NAMES = {
    "table.weight": (7, 6),
    "mixed.weight": (6, 6),
    "mixed.bias": (6,),
    "norm.weight": (6,),
    "norm.running_mean": (6,),
    "shift": (6,),
    "head.bias": (7,),
}


def _is_settled(shape: tuple[int, ...], spec: ShardingSpec) -> bool:
    return spec.layout(shape).pending is None


@st.composite
def plans(draw: st.DrawFn, world_size: int) -> ShardingPlan:
    chosen = draw(st.lists(st.sampled_from(sorted(NAMES)), unique=True, min_size=1))
    plan: dict[str, Any] = {}
    for name in chosen:
        shape = NAMES[name]
        fitting = specs(shape, world_size=world_size).filter(functools.partial(_is_settled, shape))
        plan[name] = draw(fitting)
    if "table.weight" in plan:
        plan["head.weight"] = plan["table.weight"]
    meaning = draw(st.sampled_from(["replicated", "local_rows", "chunk(0)"]))
    return ShardingPlan(plan, input_plan={"": meaning})


def check_plan(rank: int, plan: ShardingPlan, world_size: int) -> None:
    reference, model = tagger(), tagger()
    source = world_size - 1
    if rank != source:
        with torch.no_grad():
            for name in plan.plan:  # what other ranks have does not count
                operator.attrgetter(name)(model).zero_()
    assert shardwise.shard_module(model, plan, src_rank=source) is model
    for name, tensor in model.state_dict(keep_vars=True).items():
        torch.testing.assert_close(full(tensor), reference.state_dict()[name])
        assert isinstance(tensor, ShardedTensor) == (name in plan.plan)
    assert model.get_buffer("shift") is not None
    given = batch()
    if plan.input_plan == {"": "local_rows"}:
        cut = shardwise.chunk(0, ranks=range(world_size), device="cpu").layout((5,))
        (box,) = cut.boxes_of(rank)
        given = (given[0][box.slices()], given[1][box.slices()])
    with shardwise.implicit_comm("allow"):
        loss = model(*given)
        loss.backward()
        expected = reference(*batch())
        expected.backward()
        torch.testing.assert_close(full(loss), expected.detach())
        for name, parameter in model.named_parameters():
            same = reference.get_parameter(name)
            assert parameter.requires_grad == same.requires_grad
            assert isinstance(parameter, nn.Parameter)
            if same.grad is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(full(parameter.grad), same.grad, msg=name)
    assert model.get_parameter("head.weight") is model.get_parameter("table.weight")
    mean = full(model.get_buffer("norm.running_mean"))
    torch.testing.assert_close(mean, reference.get_buffer("norm.running_mean"))


@settings(max_examples=12)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), plans(n))))
def test_a_model_gives_what_the_plain_one_gives(case: tuple[int, ShardingPlan]) -> None:
    world_size, plan = case
    simulate(check_plan, world_size, plan, world_size)


ROWS_AND_COLUMNS = ShardingPlan({"0.*": "chunk(0)", "2.weight": "chunk(1)"})


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))


def _one_exchange(rank: int, src_rank: int | None) -> list[tuple[str, int]]:
    model = mlp()
    if src_rank not in (rank, None):
        model = model.to("meta")
    with shardwise.trace(show=False) as t:
        shardwise.shard_module(model, ROWS_AND_COLUMNS, src_rank)
    for mine, other in zip(model.parameters(), mlp().parameters(), strict=True):
        if not mine.is_meta:  # what the plan does not name is left alone
            assert torch.equal(full(mine), other)
    return [(event.op, event.total) for event in t.events if rank in event.ranks]


def test_ranks_agree_once_and_all_tensors_go_in_one_exchange() -> None:
    sent = 4 * (8 * 6 + 6 + 6 * 8) * 2 // 3  # two of three thirds leave the source
    (events,) = {tuple(events) for events in run_local(_one_exchange, 3, 1)}
    assert events == (("compare arguments", 16 * 3 * 2), ("reshard", sent))
    (events,) = {tuple(events) for events in run_local(_one_exchange, 3, None)}
    assert [name for name, _ in events] == ["compare arguments"]


def _peak(rank: int) -> int:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers) if rank == 0 else nn.Sequential(*layers).to("meta")
    plan = ShardingPlan({"*": "chunk(0)"})
    return peak_tensor_bytes(lambda: shardwise.shard_module(model, plan, max_bytes=1 << 16))


def test_memory_is_the_own_part_and_the_cap() -> None:
    share = 8 * 256 * 256 * 4 // 2
    assert max(run_local(_peak, 2)) <= share + (1 << 16)


def test_what_has_gone_is_given_up_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_LEAST_STEP", 1)
    alive: list[int] = []  # of the full tensors of rank 0, at each step

    def run(rank: int) -> None:
        model: Any = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
        storages = [weakref.ref(layer.weight.untyped_storage()) for layer in model]

        def noted(*args: Any, **options: Any) -> Any:
            if rank == 0:
                alive.append(sum(storage() is not None for storage in storages))
            return scatter(*args, **options)

        monkeypatch.setattr(sharding, "scatter", noted)
        shardwise.shard_module(model, ShardingPlan({"*": "chunk(0)"}))

    simulate(run, 1)
    assert alive == [4, 3, 2, 1]


def _parameters_stay(rank: int) -> None:
    model = mlp()
    calls: list[bool] = []
    weight: Any = model[0].weight
    weight.tag = ["kept"]
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p is weight))
    weight.register_hook(lambda grad: calls.append(isinstance(grad, ShardedTensor)))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shardwise.shard_module(model, ShardingPlan({"0.weight": "chunk(0)"}))
    assert model[0].weight is weight
    assert weight.shard_layout.shape == (6, 8)
    assert vars(weight)["tag"] == ["kept"]
    assert weight.grad is None
    before = full(weight).clone()
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(full(weight), before - 1)
    assert calls == [True, True]


def _someone_needs_the_plain_one(rank: int) -> None:
    """A graph that is alive keeps its parameters, and the module gets others."""
    model = mlp()
    weight, bias = model[0].weight, model[0].bias
    out = model(torch.ones(1, 8))
    shardwise.shard_module(model, ShardingPlan({"0.*": "chunk(0)"}))
    out.sum().backward()
    watched = mlp()
    seen = weakref.ref(watched[0].weight)
    shardwise.shard_module(watched, ShardingPlan({"0.weight": "chunk(0)"}))
    assert seen() is None  # nobody else held it
    for old, new in [(weight, model[0].weight), (bias, model[0].bias)]:
        assert old.grad is not None
        assert torch.equal(full(new), old)
    assert type(watched[0].weight) is ShardedTensor


def _one_by_one(rank: int) -> None:
    group = dist.new_group([2, 0])
    norm = nn.BatchNorm1d(5)
    norm.running_mean = torch.arange(5.0) * (rank + 1)
    norm.weight.requires_grad_(False)
    shardwise.shard_parameter(norm, "weight", shardwise.chunk(0))
    shardwise.shard_parameter(norm, "running_var", shardwise.on_rank(1), src_rank=None)
    assert not norm.weight.requires_grad
    assert list(dict(norm.named_buffers())) == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    if rank != 1:  # src_rank is a position in the group
        spec = shardwise.chunk(0, sizes=[5, 0], ranks=[2, 0])
        shardwise.shard_parameter(norm, "running_mean", spec, 1, group)
        mean: Any = norm.running_mean
        ranks = dist.get_process_group_ranks(group)
        assert torch.equal(mean.full_tensor(), torch.arange(5.0) * (ranks[1] + 1))


def _on_real_ranks(rank: int) -> None:
    _parameters_stay(rank)
    _someone_needs_the_plain_one(rank)
    _one_by_one(rank)


def test_parameters_stay_the_objects_that_they_are() -> None:
    run_local(_on_real_ranks, 3)


class Doubled(Sharder):
    """Replaces a linear layer by one that is sharded and says so."""

    def shard(self, module: nn.Module) -> nn.Module:
        shardwise.shard_parameter(module, "weight", shardwise.parse_spec("chunk(0)", ranks=[0, 1]))
        return nn.Sequential(module, nn.Identity())


class Broken(Sharder):
    def shard(self, module: nn.Module) -> Any:
        return "a module"


def _sharders(rank: int) -> None:
    model = mlp()
    shardwise.shard_module(model, ShardingPlan({"0": Doubled(), "2.weight": "chunk(1)"}))
    assert isinstance(model[0], nn.Sequential)
    assert not hasattr(model, "mod_name")
    assert isinstance(model[0][0].weight, ShardedTensor)
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, nn.GELU(), shared)
    shardwise.shard_module(twice, ShardingPlan({"[02]": Doubled()}))
    assert twice[0] is twice[2]
    plain = mlp()
    with pytest.raises(TypeError, match=r"Broken\.shard returned for '0'.*Module.*got str"):
        shardwise.shard_module(plain, ShardingPlan({"0": Broken(), "2.weight": "chunk(1)"}))
    assert type(plain[2].weight) is nn.Parameter


def test_a_sharder_replaces_its_submodule() -> None:
    simulate(_sharders, 2)


# -- wrong calls -----------------------------------------------------------------------------------


def _refused(
    kind: type[Exception], match: str, call: Callable[[Any], object], changes: Any = None
) -> None:
    """All ranks raise, and nothing has changed."""
    model = mlp()
    if changes is not None:
        changes(model)
    with pytest.raises(kind, match=match):
        call(model)
    assert not any(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def _wrong(rank: int) -> None:
    def by(plan: Any, **options: Any) -> Callable[[Any], object]:
        return lambda model: shardwise.shard_module(model, plan, **options)

    def one(name: str, spec: Any, *args: Any) -> Callable[[Any], object]:
        return lambda model: shardwise.shard_parameter(model[0], name, spec, *args)

    def other(model: Any) -> None:
        del model[0].bias
        model[0].bias = "none"

    rows = shardwise.parse_spec("chunk(0)", ranks=[0, 1])
    plan = ShardingPlan({"0.weight": rows})
    known = "Linear has no attribute 'wait' to shard: expected one of weight, bias"
    _refused(AttributeError, known, one("wait", rows))
    found = "Expected Linear.bias to be a Tensor, but found str"
    _refused(ValueError, found, one("bias", rows), other)
    _refused(ValueError, "does not match with src_rank", one("bias", rows, rank))
    differing = shardwise.parse_spec(f"chunk({rank})", ranks=[0, 1])
    _refused(ValueError, "does not match with sharding_spec", one("weight", differing))
    _refused(TypeError, "expected a ShardingPlan, got dict", by({"0.weight": rows}))
    meaning = 'input_plan: expected "local_rows", "replicated" or a spec, got'
    _refused(ValueError, meaning, by(ShardingPlan({"0.weight": rows}, input_plan={"": "colums"})))
    _refused(ValueError, "max_bytes", by(plan, max_bytes=2))
    _refused(ValueError, "group rank: expected 0 to 1, got 7", by(plan, src_rank=7))
    far = ShardingPlan({"0.weight": shardwise.parse_spec("chunk(0)", ranks=[0, 5])})
    _refused(ValueError, "Global rank 5 does not exist", by(far))
    strided = r"'0.weight' is not a contiguous Tensor|failed on other ranks: rank 0"
    _refused(ValueError, strided, by(plan), _transposed)
    without = (
        r"'0.weight' on the source rank: expected data, since rank 1 has some, got a tensor on the "
        r"meta device\. Pass src_rank=1"
    )
    _refused(ValueError, without, by(plan), lambda m: m[0].to("meta") if rank == 0 else None)
    with shardwise.set_check("debug"):

        def shifted(model: Any) -> None:
            with torch.no_grad():
                model[2].bias.add_(rank)

        _refused(ValueError, "ranks differ in data of '2.bias'", by(plan), shifted)
    # Wrong on one rank alone.
    names = ShardingPlan({"0.weight": rows, f"{2 * rank}.bias": rows})
    _refused(AgreementError, "ranks differ in tensors", by(names))


def _transposed(model: Any) -> None:
    model[0].weight.data = torch.zeros(8, 6).t()


def test_wrong_calls_raise_on_all_ranks_and_change_nothing() -> None:
    simulate(_wrong, 2)


def _twice(rank: int) -> None:
    model = mlp()
    shardwise.shard_module(model, ROWS_AND_COLUMNS)
    with pytest.raises(ValueError, match=r"'0.weight' to shard: .* sharded already.*reshard"):
        shardwise.shard_module(model, ROWS_AND_COLUMNS)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"Linear.weight to shard.*Call the lazy module once"):
        shardwise.shard_parameter(lazy[0], "weight", shardwise.replicate(ranks=[0, 1]))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_sharded_says_what_to_do() -> None:
    simulate(_twice, 2)


def test_a_rank_that_does_not_come_is_named() -> None:
    def absent(rank: int) -> None:
        if rank:
            shardwise.shard_module(mlp(), ROWS_AND_COLUMNS)

    with pytest.raises(RankFailure, match="rank 0 did not come"):
        simulate(absent, 2)


def _half(rank: int) -> float:
    model = copy.deepcopy(mlp())
    shardwise.shard_module(model, ROWS_AND_COLUMNS, max_bytes=64)
    return math.fsum(full(parameter).sum().item() for parameter in model.parameters())


def test_a_cap_does_not_show_in_the_values() -> None:
    expected = math.fsum(parameter.sum().item() for parameter in mlp().parameters())
    assert simulate(_half, 4).results == [expected] * 4
