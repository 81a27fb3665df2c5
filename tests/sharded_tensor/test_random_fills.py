"""Random numbers that no layout and no world size can change."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.sharded_tensor import seeds
from shardwise.testing.strategies import examples, specs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharding_spec import ShardingSpec

SHAPE = (5, 7)
INITS: dict[str, dict[str, Any]] = {
    "uniform_": {"a": -2, "b": 3},
    "normal_": {"mean": 1.0, "std": 0.5},
    "trunc_normal_": {"std": 2.0, "a": -1.0, "b": 0.5},
    "constant_": {"val": 4.0},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "xavier_uniform_": {"gain": 2.0},
    "xavier_normal_": {},
    "kaiming_uniform_": {"a": 5**0.5},
    "kaiming_normal_": {"mode": "fan_out", "nonlinearity": "relu"},
    "orthogonal_": {"gain": 1.5},
}


def _numbers(spec: ShardingSpec) -> list[torch.Tensor]:
    """One of each kind, in full."""
    shardwise.manual_seed(11)
    made: list[Any] = [
        sharded_tensor.rand(spec, SHAPE),
        sharded_tensor.randn(spec, SHAPE, dtype=torch.float64),
        sharded_tensor.randn(spec, SHAPE, dtype=torch.bfloat16),
    ]
    made += [torch.rand_like(made[0]), torch.randn_like(made[0]), torch.randint_like(made[0], 9)]
    for name, options in INITS.items():
        weight: Any = torch.nn.Parameter(sharded_tensor.empty(spec, SHAPE))
        assert getattr(torch.nn.init, name)(weight, **options) is weight
        assert weight.requires_grad
        made.append(weight.detach())
    made.append(made[0].clone().bernoulli_(0.3))
    made.append(sharded_tensor.empty(spec, SHAPE, dtype=torch.int16).random_(5, 90))
    return [tensor.full_tensor() for tensor in made]


def _all_numbers(_: int, listed: list[ShardingSpec]) -> list[list[torch.Tensor]]:
    with shardwise.implicit_comm("allow"):
        return [_numbers(spec) for spec in listed]


def _is_settled(spec: ShardingSpec) -> bool:
    return spec.layout(SHAPE).pending in (None, "sum")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_spec_and_world_size_gives_the_same_numbers(world_size: int) -> None:
    listed = examples(specs(SHAPE, world_size=world_size).filter(_is_settled), 12)
    alone: list[ShardingSpec] = [shardwise.replicate([0])]
    (expected,) = shardwise.run_local(_all_numbers, 1, alone)[0]
    for held in shardwise.run_local(_all_numbers, world_size, listed):
        for spec, numbers in zip(listed, held, strict=True):
            for kind, (found, wanted) in enumerate(zip(numbers, expected, strict=True)):
                assert torch.equal(found, wanted), (kind, spec)


FILLS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(),
    "nn.init.normal_": torch.nn.init.normal_,
    "nn.init.kaiming_uniform_": torch.nn.init.kaiming_uniform_,
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_what_autograd_saved_may_not_be_filled_on_any_rank(fill: Callable[[Any], Any]) -> None:
    def run(_: int) -> list[int]:
        grown = []
        for spec in (shardwise.chunk(0), shardwise.chunk(0, sizes=[1, 0, 4]), shardwise.on_rank(1)):
            weight, x = sharded_tensor.ones(spec, SHAPE), sharded_tensor.zeros(spec, SHAPE)
            y = (weight.requires_grad_() * x).sum()
            before = x._version
            fill(x)
            grown.append(x._version - before)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        return grown

    assert simulate(run, 3).results == [[1] * 3] * 3


def test_fans_are_those_of_the_whole_weight() -> None:
    def run(_: int) -> tuple[float, float]:
        weight: Any = sharded_tensor.empty(shardwise.chunk(1), 400, 900)
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5)
        full = weight.full_tensor()
        return float(full.abs().max()), float(full.std())

    for largest, std in shardwise.run_local(run, 3):
        assert largest == pytest.approx(1 / 30, rel=1e-3)
        assert std == pytest.approx(1 / 30 / 3**0.5, rel=1e-2)


def _streams(rank: int) -> None:
    spec, shape = shardwise.replicate(), (6,)
    shardwise.manual_seed(3)
    first = [sharded_tensor.rand(spec, shape).full_tensor() for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    pair = dist.new_group([0, 2])
    shardwise.manual_seed(3)
    again = [sharded_tensor.rand(spec, shape).full_tensor()]
    if rank != 1:  # a call on a subgroup does not part the streams
        few = shardwise.chunk(0, ranks=[0, 2])
        inner = sharded_tensor.rand(few, shape, process_group=pair)
        assert torch.equal(inner.full_tensor(), first[0])
    again += [sharded_tensor.rand(spec, shape).full_tensor() for _ in range(2)]
    assert all(map(torch.equal, first, again))
    if rank != 1:  # of which one can have a seed of its own
        shardwise.manual_seed(4, process_group=pair)
        inner = sharded_tensor.rand(few, shape, process_group=pair)
        assert not any(torch.equal(inner.full_tensor(), other) for other in first)
    dist.barrier()
    # a generator: one draw on the first rank, so the others' may differ
    drawn = [
        torch.nn.init.normal_(
            sharded_tensor.empty(spec, shape), generator=torch.Generator().manual_seed(seed + rank)
        ).full_tensor()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(OpError, match=r"torch.no_grad\(\) or torch.nn.init"):
        sharded_tensor.empty(spec, shape, requires_grad=True).normal_()
    with pytest.raises(ValueError, match="64 bits"):
        shardwise.manual_seed(2**64)


def test_groups_count_their_calls_apart() -> None:
    shardwise.run_local(_streams, 3)


def test_without_a_seed_torch_decides_on_the_first_rank() -> None:
    def run(rank: int, seed: int) -> torch.Tensor:
        seeds._CHOSEN.change((0, None))  # ranks are lent to other tests, which may choose one
        seeds._streams.clear()
        torch.manual_seed(seed + rank)
        return sharded_tensor.randn(shardwise.chunk(0), 8).full_tensor()

    first, again, other = (shardwise.run_local(run, 2, seed) for seed in (20, 20, 21))
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_simulated_ranks_draw_the_same_numbers() -> None:
    def run(_: int) -> torch.Tensor:
        shardwise.manual_seed(9)
        spec = shardwise.chunk(0, ranks=range(5))
        sharded_tensor.rand(spec, 3, 3)
        return sharded_tensor.rand(spec, 3, 3).full_tensor()

    results = simulate(run, 5).results
    assert all(torch.equal(found, results[0]) for found in results)


def test_orthogonal_weights_of_any_shape_are_the_same_in_every_layout() -> None:
    def run(_: int) -> None:
        shardwise.implicit_comm("allow")
        found = []
        for spec in (shardwise.chunk(0), shardwise.chunk(1), shardwise.replicate()):
            for shape in ((4, 2, 3), (8, 2, 2), (5, 3)):
                shardwise.manual_seed(3)
                weight: Any = torch.nn.init.orthogonal_(sharded_tensor.empty(spec, *shape), gain=2)
                assert weight.shard_layout == spec.layout(shape)
                flat = weight.full_tensor().flatten(1)
                small = min(flat.shape)
                product = flat @ flat.T if small == len(flat) else flat.T @ flat
                torch.testing.assert_close(product, 4 * torch.eye(small))
                found.append(flat)
        assert all(torch.equal(found[k], found[k % 3]) for k in range(9))

    shardwise.run_local(run, 2)


def test_writing_into_a_gathered_view_is_refused() -> None:
    def run(_: int) -> None:
        weight: Any = sharded_tensor.empty(shardwise.chunk(0), 4, 2, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat = weight.as_strided((24,), (1,))
            for write in (flat.zero_, flat.normal_, lambda: flat.add_(1), lambda: flat.fill_(1)):
                with pytest.raises(OpError, match="would not change"):
                    write()
            assert not flat.clone()._state.view_of

    shardwise.run_local(run, 2)
