"""Stock optimizers on sharded parameters: step for step what they do to full tensors."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.parameters import SHAPES, WORLD_SIZE, Pair, check_same, layouts, pairs, sharded

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.testing.op_check import layout_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Optimizer = torch.optim.Optimizer
STEPS = 3
KINDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def two_groups(params: Sequence[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], **options}]


def check_steps(
    make: Callable[[Any], Optimizer],
    world_size: int = WORLD_SIZE,
    policy: Any = "error",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    atol: float | None = None,
) -> None:
    """Raises unless the optimizer does the same to sharded parameters and to full ones."""

    def on_rank(rank: int) -> None:
        check_steps_here(make, world_size, policy, shapes, atol)

    simulate(on_rank, world_size)


def check_steps_here(
    make: Callable[[Any], Optimizer],
    world_size: int,
    policy: Any,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    atol: float | None = None,
) -> None:
    every = pairs(world_size, shapes)
    plain = make(two_groups([pair.full for pair in every], lr=0.02))
    optimizer = make(two_groups([pair.given for pair in every], lr=0.02))
    for step in range(STEPS):
        for pair in every:
            pair.set_grads()
        plain.step()
        with shardwise.implicit_comm(policy):
            optimizer.step()
        for pair in every:
            pair.check(f"step {step}", atol)
    check_same_state(optimizer, plain, every)


def check_same_state(optimizer: Optimizer, plain: Optimizer, every: Sequence[Pair]) -> None:
    for pair in every:
        expected, found = plain.state[pair.full], optimizer.state[pair.given]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                is_like_parameter = value.shape == pair.full.shape and name != "step"
                if pair.layout is not None and is_like_parameter and value.dim():
                    assert isinstance(found[name], ShardedTensor), name
                check_same(found[name], value, name)
            else:
                assert found[name] == value, name


optim = torch.optim
POINTWISE: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p, **o: optim.SGD(p, lr=0.1, **o),
    "SGD momentum": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **o),
    "SGD nesterov": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "SGD maximize": lambda p, **o: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, **o
    ),
    "Adam": lambda p, **o: optim.Adam(p, lr=0.1, **o),
    "Adam amsgrad": lambda p, **o: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, **o),
    "Adam maximize": lambda p, **o: optim.Adam(p, lr=0.1, maximize=True, **o),
    "AdamW": lambda p, **o: optim.AdamW(p, lr=0.1, **o),
    "AdamW amsgrad maximize": lambda p, **o: optim.AdamW(
        p, lr=0.1, amsgrad=True, maximize=True, **o
    ),
    "Adagrad": lambda p, **o: optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, **o),
    "Adadelta": lambda p, **o: optim.Adadelta(p, weight_decay=0.1, maximize=True, **o),
    "Adamax": lambda p, **o: optim.Adamax(p, weight_decay=0.1, **o),
    "ASGD": lambda p, **o: optim.ASGD(p, weight_decay=0.1, t0=1, **o),
    "NAdam": lambda p, **o: optim.NAdam(p, weight_decay=0.1, **o),
    "NAdam decoupled": lambda p, **o: optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, maximize=True, **o
    ),
    "RAdam": lambda p, **o: optim.RAdam(p, weight_decay=0.1, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, weight_decay=0.1, **o),
    "RMSprop centered": lambda p, **o: optim.RMSprop(p, centered=True, momentum=0.9, **o),
}
FUSED = [name for name in POINTWISE if name.split()[0] in ("SGD", "Adam", "AdamW", "Adagrad")]


@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_optimizers_work_on_local_pieces(name: str, foreach: bool) -> None:
    check_steps(lambda params: POINTWISE[name](params, foreach=foreach))


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_work_on_local_pieces(name: str) -> None:
    check_steps(lambda params: POINTWISE[name](params, fused=True))


@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.long), True])
def test_rprop(foreach: bool) -> None:
    check_steps(lambda params: optim.Rprop(params, foreach=foreach), policy="allow")


def test_defaults() -> None:
    check_steps(lambda params: optim.AdamW(params))


def test_one_and_two_ranks() -> None:
    check_steps(lambda params: optim.AdamW(params, foreach=True), world_size=1)
    check_steps(lambda params: optim.AdamW(params, fused=True), world_size=2)


def test_a_tensor_as_learning_rate() -> None:
    lr = torch.tensor(0.1)
    check_steps(lambda params: optim.Adam(params, lr=lr, fused=True))
    check_steps(lambda params: optim.SGD(params, lr=lr, fused=True))
    check_steps(lambda params: optim.Adam(params, lr=lr, foreach=False))


@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.long), True])
def test_adafactor(foreach: bool) -> None:
    check_steps(lambda params: optim.Adafactor(params, foreach=foreach), policy="allow")


def test_muon() -> None:
    """It computes in bfloat16, so not to the last digit; of tall matrices it writes into `.T`."""
    if hasattr(optim, "Muon"):
        check_steps(
            lambda params: optim.Muon(params, ns_steps=1),
            policy="allow",
            shapes=[(2, 3), (4, 2)],
            atol=2e-3,
        )


def test_lbfgs_with_a_closure() -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE, [(5, 4), (6,)])
        make = partial(optim.LBFGS, max_iter=5, line_search_fn="strong_wolfe")
        plain, optimizer = make([pair.full for pair in every]), make([pair.given for pair in every])

        def closure(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Callable[[], Any]:
            def run() -> torch.Tensor:
                optimizer.zero_grad()
                full = [p.full_tensor() if isinstance(p, ShardedTensor) else p for p in params]
                loss = sum(((one.sin() - k / 7) ** 2).sum() for k, one in enumerate(full))
                assert isinstance(loss, torch.Tensor)
                loss.backward()
                return loss

            return run

        with shardwise.implicit_comm("allow"):
            for _ in range(2):
                expected = plain.step(closure(plain, [pair.full for pair in every]))
                found = optimizer.step(closure(optimizer, [pair.given for pair in every]))
                torch.testing.assert_close(found.item(), expected.item())
        for pair in every:
            pair.check("LBFGS")

    simulate(on_rank, WORLD_SIZE)


def test_sparse_adam_refuses_dense_gradients() -> None:
    def on_rank(rank: int) -> None:
        pair = Pair(0, (5, 4), layouts((5, 4), 2)[0])
        pair.set_grads()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            optim.SparseAdam([pair.given]).step()

    simulate(on_rank, 2)


def test_state_dicts_and_copies_go_on_where_they_were() -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE)
        plain = optim.Adam([pair.full for pair in every], amsgrad=True)
        first = optim.Adam([pair.given for pair in every], amsgrad=True, foreach=True)
        step(every, plain, first)
        second = optim.Adam([pair.given for pair in every], lr=9.0, amsgrad=True, fused=True)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        step(every, plain, second)
        params = [pair.given for pair in every]
        copied_params, third = copy.deepcopy((params, second))
        for pair, param in zip(every, copied_params, strict=True):
            pair.given = param
        step(every, plain, third)
        check_same_state(third, plain, every)

    def step(every: Sequence[Pair], *optimizers: Optimizer) -> None:
        for pair in every:
            pair.set_grads()
        for optimizer in optimizers:
            optimizer.step()
        for pair in every:
            pair.check("after loading")

    simulate(on_rank, WORLD_SIZE)


def test_state_of_a_parameter_that_was_resharded_follows() -> None:
    def on_rank(rank: int) -> None:
        for options in KINDS:
            pair = Pair(0, (5, 4), layouts((5, 4), WORLD_SIZE)[3])
            plain, found = optim.AdamW([pair.full]), optim.AdamW([pair.given], **options)
            assert isinstance(pair.given, ShardedTensor)
            for text in ("chunk(1)", "chunk(0)", "replicate()"):
                pair.set_grads()
                plain.step()
                with shardwise.implicit_comm("allow"):
                    found.step()
                pair.check(f"{options}")
                spec = shardwise.parse_spec(text, ranks=range(WORLD_SIZE), device="cpu")
                pair.given.reshard(spec)
                pair.layout = pair.given.shard_layout

    simulate(on_rank, WORLD_SIZE)


def test_fused_steps_are_counted_as_writes() -> None:
    def on_rank(rank: int) -> None:
        pair = Pair(0, (5, 4), layouts((5, 4), 2)[0])
        pair.set_grads()
        before = pair.given._version
        optim.AdamW([pair.given], fused=True).step()
        assert pair.given._version > before

    simulate(on_rank, 2)


def test_a_pending_parameter_is_refused() -> None:
    def on_rank(rank: int) -> None:
        pending = layout_kinds((5, 4), world_size=2)["pending"]
        param = sharded(torch.ones(5, 4), pending, requires_grad=True)
        param.grad = sharded(torch.ones(5, 4), pending.bar)
        for options in KINDS:
            strict = shardwise.implicit_comm("error")
            with strict, pytest.raises(OpError, match="pending sum"):
                optim.AdamW([param], **options).step()

    simulate(on_rank, 2)


def _on_real_rank(rank: int) -> None:
    for options in KINDS:
        check_steps_here(partial(optim.AdamW, **options), 3, "error")


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, 3)
