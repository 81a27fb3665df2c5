"""State dicts in one piece: what the plain model has, gathered to one rank, given out from one."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ShardwiseError
from shardwise.sharded_optim import ShardedOptimizer
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharding_plan import ShardingPlan


class Counted(nn.Linear):
    """Has state that is no parameter and no buffer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = {"times": 0, "where": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def made(seed: int) -> Any:
    """Tied weights, buffers of several dtypes, extra state; `seed` decides all of the values."""
    torch.manual_seed(seed)
    model: Any = nn.ModuleDict(
        {
            "first": Counted(5, 7),
            "norm": nn.BatchNorm1d(7),
            "second": nn.Linear(5, 7, bias=False),
            "scale": nn.ParameterList([torch.randn(()), torch.randn(3).to(torch.bfloat16)]),
        }
    )
    model["second"].weight = model["first"].weight
    model["first"].seen = {"times": seed, "where": torch.tensor([seed, 1.0])}
    model["norm"].num_batches_tracked += seed
    model["norm"].running_mean += seed
    return model


def plans(world_size: int) -> list[dict[str, Any]]:
    last = world_size - 1
    return [
        {"first.weight": "chunk(0)", "norm.weight": f"on_rank({last})"},
        {
            "first.weight": f"chunk(1, sizes={[0] * last + [5]})",
            "first.bias": "block_cyclic(0, 2)",
            "norm.running_*": "chunk(0)",
            "norm.num_batches_tracked": f"on_rank({last})",
            "scale.*": "replicate()",
        },
        {"*": "replicate()"},
        {"first.weight": f"grid([1, {world_size}])", "scale.1": "flat()"},
    ]


def sharded(seed: int, plan: dict[str, Any]) -> Any:
    model = made(seed)
    shardwise.reshard_module(model, ShardingPlan(plan))
    return model


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that do not depend on the layout; some parameters get none."""
    for number, parameter in enumerate(model.parameters()):
        if number == 2:
            continue
        full = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).to(parameter.dtype)
        if isinstance(parameter, ShardedTensor):
            full = shardwise.distribute(full, parameter.sharding_spec(), src_rank=None)
        parameter.grad = full
    optimizer.step()


def check_equal(found: Any, expected: Any, name: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected.detach(), msg=name)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), name
        for key, value in expected.items():
            check_equal(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for number, value in enumerate(expected):
            check_equal(found[number], value, f"{name}.{number}")
    else:
        assert found == expected, name


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def check_there_and_back(world_size: int, max_bytes: int | None) -> None:
    reference = made(3)
    plain = adam(reference)
    train(reference, plain)
    for plan, other in zip(plans(world_size), plans(world_size)[::-1], strict=True):
        model = sharded(3, plan)
        optimizer = adam(model)
        train(model, optimizer)
        with shardwise.implicit_comm("error"):
            found = shardwise.full_state_dict(model, optimizer, max_bytes=max_bytes)
        if rank_here():
            assert found == {}
        else:
            check_found(found, reference, plain)
        target = sharded(4, other)
        layouts = [getattr(one, "shard_layout", None) for one in target.state_dict().values()]
        ids = list(map(id, target.parameters()))
        into = adam(target)
        keys = shardwise.load_full_state_dict(
            target, found or None, optimizer=into, max_bytes=max_bytes
        )
        assert keys.missing_keys == ["optimizer.state.norm.weight"]
        assert keys.unexpected_keys == []
        after = [getattr(one, "shard_layout", None) for one in target.state_dict().values()]
        assert after == layouts
        assert list(map(id, target.parameters())) == ids
        assert target["second"].weight is target["first"].weight
        again = shardwise.full_state_dict(target, into, rank0_only=False)
        check_equal(again["model"], dict(reference.state_dict()))
        check_equal(again["optimizer"], plain.state_dict())
        for parameter in target.parameters():
            for key, value in into.state[parameter].items():
                if key != "step" and isinstance(parameter, ShardedTensor):
                    assert value.shard_layout == parameter.shard_layout


def rank_here() -> int:
    from shardwise.comm.process_group import communicator

    return communicator().rank


def check_found(found: dict[str, Any], reference: Any, plain: torch.optim.Optimizer) -> None:
    """It is what one process has, and one process can load it."""
    check_equal(found["model"], dict(reference.state_dict()))
    check_equal(found["optimizer"], plain.state_dict())
    assert found["model"]["second.weight"] is found["model"]["first.weight"]
    alone = made(5)
    alone.load_state_dict(found["model"])
    optimizer = adam(alone)
    optimizer.load_state_dict(found["optimizer"])
    check_equal(alone.state_dict(), reference.state_dict())
    metadata = found["model"]._metadata
    assert metadata == reference.state_dict()._metadata


@pytest.mark.parametrize(("world_size", "max_bytes"), [(1, None), (2, None), (3, 64), (4, None)])
def test_there_and_back(world_size: int, max_bytes: int | None) -> None:
    simulate(lambda _: check_there_and_back(world_size, max_bytes), world_size)


def _on_real_rank(rank: int) -> None:
    check_there_and_back(3, None)
    # Of a group of some of the ranks; the source is the second of it.
    group = dist.new_group([1, 2])
    if rank:
        spec = shardwise.chunk(0, sizes=[2, 5], ranks=[2, 1])
        model: Any = nn.Linear(5, 7)
        full = torch.arange(35.0).view(7, 5)
        st = shardwise.sharded_tensor.zeros(spec, 7, 5, process_group=group)
        model.weight = nn.Parameter(st)
        given = {"weight": full, "bias": torch.ones(7)} if rank == 2 else None
        shardwise.load_full_state_dict(model, given, src_rank=1)
        assert torch.equal(model.weight.detach().full_tensor(), full)
        assert torch.equal(model.bias, torch.ones(7))
        found = shardwise.full_state_dict(model)
        assert (found == {}) == (rank == 2)
        file = io.BytesIO()
        torch.save(found, file)


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, 3)


class Plain(nn.Linear):
    """Its state dict is a dict and no more."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return dict(super().state_dict(*args, **options))


def test_full_tensors_have_nothing_of_the_sharded_ones() -> None:
    def on_rank(rank: int) -> None:
        for kind in (nn.Linear, Plain):
            model = kind(5, 7)
            shardwise.shard_module(model, ShardingPlan({"weight": "chunk(0)"}))
            for tensor in shardwise.full_state_dict(model, rank0_only=False).values():
                assert (type(tensor), vars(tensor)) == (torch.Tensor, {})

    simulate(on_rank, 2)


def test_dtypes_are_those_of_the_model() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(1, plans(2)[0])
        double = {
            key: value.double() if isinstance(value, torch.Tensor) else value
            for key, value in made(2).state_dict().items()
        }
        version = model["first"].weight._version
        shardwise.load_full_state_dict(model, double if rank == 1 else None, src_rank=1)
        assert model["first"].weight._version > version
        found = shardwise.full_state_dict(model, rank0_only=False)
        check_equal(found, dict(made(2).state_dict()))

    simulate(on_rank, 2)


def test_a_sharded_optimizer_has_names() -> None:
    def on_rank(rank: int) -> None:
        model, other = sharded(1, plans(2)[0]), sharded(2, plans(2)[1])
        first = ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, 0.1, momentum=0.9)
        turned = dict(reversed(list(other.named_parameters())))
        second = ShardedOptimizer(turned, torch.optim.SGD, 0.1, momentum=0.9)
        train(model, first)
        found = shardwise.full_state_dict(model, first)
        shardwise.load_full_state_dict(other, found or None, optimizer=second)
        for name, parameter in model.named_parameters():
            mine: Any = first.state.get(parameter, {}).get("momentum_buffer")
            theirs: Any = second.state.get(other.get_parameter(name), {}).get("momentum_buffer")
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                assert torch.equal(_full(mine), _full(theirs)), name

    simulate(on_rank, 2)


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def test_optimizers_that_keep_sums_over_dims() -> None:
    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"):
            reference, model = made(1), sharded(1, plans(2)[0])
            plain, optimizer = (torch.optim.Adafactor(m.parameters()) for m in (reference, model))
            train(reference, plain)
            train(model, optimizer)
            found = shardwise.full_state_dict(model, optimizer, rank0_only=False)
            check_equal(found["optimizer"], plain.state_dict())
            other = sharded(2, plans(2)[3])
            into = torch.optim.Adafactor(other.parameters())
            shardwise.load_full_state_dict(other, found, optimizer=into)
            train(reference, plain)
            train(other, into)
            after = shardwise.full_state_dict(other, into, rank0_only=False)
            check_equal(after["optimizer"], plain.state_dict())

    simulate(on_rank, 2)


def test_keys_are_compared_as_torch_does() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(1, plans(2)[0])
        state = made(2).state_dict()
        del state["norm.bias"]
        state["more"] = torch.ones(2)
        given = state if rank == 0 else None
        before = shardwise.full_state_dict(model, rank0_only=False)
        message = r"Missing key\(s\).*norm.bias.*Unexpected key\(s\).*more.*strict=False"
        with pytest.raises(ShardwiseError, match=message):
            shardwise.load_full_state_dict(model, given)
        check_equal(shardwise.full_state_dict(model, rank0_only=False), before)
        found = shardwise.load_full_state_dict(model, given, strict=False)
        assert found == (["norm.bias"], ["more"])
        after = shardwise.full_state_dict(model, rank0_only=False)
        check_equal(after["norm.bias"], before["norm.bias"])
        check_equal(after["first.weight"], state["first.weight"])

    simulate(on_rank, 2)


def test_what_hooks_add_to_a_state_dict_is_unexpected_as_in_torch() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(1, plans(2)[0])
        model._register_state_dict_hook(lambda module, state, *_: state.update(version=3))
        found = shardwise.full_state_dict(model)
        with pytest.raises(ShardwiseError, match=r"Unexpected key\(s\) in state_dict: version\."):
            shardwise.load_full_state_dict(model, found or None)
        keys = shardwise.load_full_state_dict(model, found or None, strict=False)
        assert keys == ([], ["version"])

    simulate(on_rank, 2)


def test_wrong_calls_raise_on_all_ranks_and_change_nothing() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(1, plans(2)[0])
        optimizer = adam(model)
        before = shardwise.full_state_dict(model, rank0_only=False)
        state = made(2).state_dict()
        wide = {**state, "first.weight": torch.ones(7, 6)}
        fewer = torch.optim.Adam([torch.ones(2, requires_grad=True)]).state_dict()
        bad: list[tuple[Any, dict[str, Any], str]] = [
            (wide, {}, r"size mismatch for first.weight.*\(7, 5\).*\(7, 6\)"),
            (None, {}, r"state_dict.*NoneType"),
            (model.state_dict(), {}, r"first.weight.*plain tensor.*ShardedTensor"),
            (state, {"optimizer": optimizer}, r'"model".*first.weight'),
            ({"model": state, "optimizer": fewer}, {"optimizer": optimizer}, "param_groups"),
            (state, {"src_rank": 5}, "5"),
            (state, {"strict": bool(rank)}, "ranks differ in strict"),
        ]
        for given, options, message in bad:
            with pytest.raises(ShardwiseError, match=message):
                shardwise.load_full_state_dict(model, given if rank == 0 else None, **options)
            check_equal(shardwise.full_state_dict(model, rank0_only=False), before)
        shardwise.reshard_module(model, ShardingPlan({"first.weight": "chunk(0, device='meta')"}))
        with pytest.raises(ShardwiseError, match=r"first.weight.*meta.*to_empty"):
            shardwise.load_full_state_dict(model, copy.deepcopy(state))

    simulate(on_rank, 2)
