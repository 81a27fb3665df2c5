"""What stands between gradients and optimizers: clipping, scaling, averaging, vectors, hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.parameters import SHAPES, WORLD_SIZE, Pair, check_same, layouts, pairs, sharded

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

utils: Any = torch.nn.utils
INF = float("inf")


def _with_grads(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Pair]:
    every = pairs(WORLD_SIZE, shapes)
    for pair in every:
        pair.set_grads()
    return every


def _check_grads(every: Sequence[Pair], what: str) -> None:
    for pair in every:
        assert pair.given.grad is not None
        assert pair.full.grad is not None
        check_same(pair.given.grad, pair.full.grad, what)


def _both(every: Sequence[Pair], function: Callable[[list[torch.Tensor]], Any]) -> tuple[Any, Any]:
    return function([pair.given for pair in every]), function([pair.full for pair in every])


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, INF])
def test_clipping_to_a_norm_takes_one_exchange(order: float, foreach: bool | None) -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads()
        with shardwise.implicit_comm("error"):
            found, expected = _both(
                every, lambda p: utils.clip_grad_norm_(p, 0.7, order, foreach=foreach)
            )
        check_same(found, expected, "total norm")
        assert found.item() == pytest.approx(expected.item())
        assert found.shard_layout.is_replicated
        _check_grads(every, "clipped")

    ran = simulate(on_rank, WORLD_SIZE)
    assert set(ran.traffic.messages.values()) == {2}  # of one all-reduce between any two ranks


@pytest.mark.parametrize("order", [2.0, INF])
def test_clipping_one_by_one(order: float) -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads([(5, 4), (6,)])
        with shardwise.implicit_comm("allow"):
            found, expected = _both(
                every, lambda p: utils.clip_grad_norm_(p, 0.7, order, foreach=False)
            )
        check_same(found, expected, "total norm")
        _check_grads(every, "clipped")

    simulate(on_rank, WORLD_SIZE)


def test_total_norms_and_clipping_by_them() -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads()
        with shardwise.implicit_comm("error"):
            found, expected = _both(every, lambda p: utils.get_total_norm([x.grad for x in p]))
            check_same(found, expected, "total norm")
            utils.clip_grads_with_norm_([pair.given for pair in every], 0.3, found)
            utils.clip_grads_with_norm_([pair.full for pair in every], 0.3, expected)
        _check_grads(every, "clipped")

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_values(foreach: bool | None) -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads()
        with shardwise.implicit_comm("error"):
            _both(every, lambda p: utils.clip_grad_value_(p, 0.4, foreach=foreach))
        _check_grads(every, "clipped")

    assert simulate(on_rank, WORLD_SIZE).traffic.total_bytes == 0


@pytest.mark.parametrize("number", [float("nan"), INF])
def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks(number: float) -> None:
    def on_rank(rank: int) -> None:
        for layout in layouts((6,), WORLD_SIZE):
            param = sharded(torch.zeros(6), layout, requires_grad=True)
            param.grad = sharded(torch.tensor([0, 0, number, 0, 0, 0]), layout)
            with pytest.raises(RuntimeError, match="non-finite"):
                utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)

    simulate(on_rank, WORLD_SIZE)


def test_parameters_without_gradient_are_left_out() -> None:
    def on_rank(rank: int) -> None:
        param = sharded(torch.zeros(6), layouts((6,), WORLD_SIZE)[-1], requires_grad=True)
        assert utils.clip_grad_norm_([param], 1.0).item() == 0
        assert param.grad is None

    simulate(on_rank, WORLD_SIZE)


# -- scaled gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_all_ranks_skip_a_step_that_one_cannot_make(options: dict[str, Any]) -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE, [(5, 4), (6,)])
        full, given = [p.full for p in every], [p.given for p in every]
        optimizers = [torch.optim.AdamW(p, **options) for p in (given, full)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
        for step in range(5):
            for pair in every:
                pair.set_grads()
                assert pair.full.grad is not None
                if step in (1, 3) and tuple(pair.full.shape) == (6,):
                    pair.full.grad[4] = INF if step == 1 else float("nan")
                    pair.given.grad = pair.like_given(pair.full.grad)
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.scale(torch.ones(()))  # makes its own tensors at the first call
                if step % 2 and not options.get("fused"):
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            for pair in every:
                pair.check(f"step {step}")
        assert scalers[1].get_scale() < 8

    simulate(on_rank, WORLD_SIZE)


def test_whether_gradients_are_finite_is_one_small_exchange() -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads()
        optimizer = torch.optim.SGD([pair.given for pair in every])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        grads: list[Any] = [pair.given.grad for pair in every]
        versions = [grad._version for grad in grads]
        scaler.unscale_(optimizer)
        for pair, version in zip(every, versions, strict=True):
            assert pair.full.grad is not None
            assert pair.given.grad is not None
            check_same(pair.given.grad, pair.full.grad / 4, "unscaled")
            if pair.layout is not None:
                assert pair.given.grad._version > version

    ran = simulate(on_rank, WORLD_SIZE)
    assert max(ran.traffic.messages.values()) == 2  # of one all-reduce


def test_a_loss_is_scaled() -> None:
    def on_rank(rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for layout in layouts((6,), WORLD_SIZE):
            pair = Pair(0, (6,), layout)
            twice: Any = pair.given * 2
            scaler.scale(twice.full_tensor().sum()).backward()
            assert pair.given.grad is not None
            check_same(pair.given.grad, torch.full((6,), 8.0, dtype=torch.float64), "gradient")

    simulate(on_rank, WORLD_SIZE)


# -- vectors and averages --------------------------------------------------------------------------


def test_parameters_become_a_vector_and_come_back() -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE)
        given, full = [p.given for p in every], [p.full for p in every]
        with shardwise.implicit_comm("allow"):
            found, expected = utils.parameters_to_vector(given), utils.parameters_to_vector(full)
            check_same(found, expected, "vector")
            for vector in (found * 2, (expected * 3).detach()):
                utils.vector_to_parameters(vector, given)
                whole = vector.full_tensor() if isinstance(vector, ShardedTensor) else vector
                utils.vector_to_parameters(whole.detach(), full)
                for pair in every:
                    pair.check("parameter of a vector")
                    if pair.layout is not None:
                        assert isinstance(pair.given, ShardedTensor)
                        assert pair.given.shard_layout == pair.layout
                        assert all(s.tensor.is_contiguous() for s in pair.given.local_shards())

    simulate(on_rank, WORLD_SIZE)


class _Model(torch.nn.Module):
    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList([torch.nn.Parameter(p.detach()) for p in params])


@pytest.mark.parametrize("kind", ["ema", "swa", "multi ema", "multi swa"])
def test_averaged_models(kind: str) -> None:
    from torch.optim import swa_utils

    options: dict[str, Any] = {
        "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        "swa": {},
        "multi ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        "multi swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    }[kind]

    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE)
        models = [_Model([p.given for p in every]), _Model([p.full for p in every])]
        averages = [swa_utils.AveragedModel(model, **options) for model in models]
        for step in range(3):
            with torch.no_grad():
                for model, average in zip(models, averages, strict=True):
                    for param in model.parameters():
                        param.mul_(1.5).add_(step)
                    with shardwise.implicit_comm("error"):
                        average.update_parameters(model)
        for one, reference in zip(*[a.parameters() for a in averages], strict=True):
            check_same(one, reference, kind)

    simulate(on_rank, WORLD_SIZE)


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_an_optimizer_can_run_in_backward(options: dict[str, Any]) -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE, [(5, 4), (6,)])
        calls: list[int] = []
        for side in ("given", "full"):
            for number, pair in enumerate(every):
                _step_in_backward(getattr(pair, side), options, calls, number)
        for _ in range(2):
            for side in ("given", "full"):
                params = [getattr(pair, side) for pair in every]
                squares = [(param * param).sin() for param in params]
                whole = [s.full_tensor() if isinstance(s, ShardedTensor) else s for s in squares]
                loss = sum(one.sum() for one in whole)
                assert isinstance(loss, torch.Tensor)
                loss.backward()
        for number, pair in enumerate(every):
            pair.check("optimizer in backward")
            assert pair.given.grad is None
            assert calls.count(number) == 4  # twice for each of the two

    simulate(on_rank, WORLD_SIZE)


def _step_in_backward(
    param: torch.Tensor, options: dict[str, Any], calls: list[int], number: int
) -> None:
    optimizer = torch.optim.AdamW([param], **options)

    def hook(seen: torch.Tensor) -> None:
        assert seen is param
        assert type(seen.grad) is type(seen)
        calls.append(number)
        optimizer.step()
        optimizer.zero_grad()

    param.register_post_accumulate_grad_hook(hook)


def test_zero_grad() -> None:
    def on_rank(rank: int) -> None:
        every = _with_grads()
        optimizer = torch.optim.SGD([pair.given for pair in every])
        grads = [pair.given.grad for pair in every]
        optimizer.zero_grad(set_to_none=False)
        for pair, grad in zip(every, grads, strict=True):
            assert grad is not None
            assert pair.given.grad is grad
            check_same(grad, torch.zeros_like(pair.full), "zeroed")
        optimizer.zero_grad()
        assert all(pair.given.grad is None for pair in every)

    simulate(on_rank, WORLD_SIZE)


def test_a_gradient_is_one_object_until_another_comes() -> None:
    def on_rank(rank: int) -> None:
        for layout in layouts((6,), WORLD_SIZE):
            param = sharded(torch.ones(6), layout, requires_grad=True)
            given = sharded(torch.ones(6), layout)
            param.grad = given
            assert param.grad is given
            twice: Any = param * 2
            twice.full_tensor().sum().backward()
            check_same(param.grad, torch.full((6,), 3.0), "accumulated")
            assert param.grad is param.grad
            for shard in param.local_shards():
                shard.tensor.grad = None
            if layout.boxes_of(rank):
                assert param.grad is None
            del param.grad
            assert param.grad is None

    simulate(on_rank, WORLD_SIZE)


def _on_real_rank(rank: int) -> None:
    every = _with_grads()
    found, expected = _both(every, lambda p: utils.clip_grad_norm_(p, 0.7))
    check_same(found, expected, "total norm")
    _check_grads(every, "clipped")
    optimizer = torch.optim.SGD([pair.given for pair in every])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if rank == 1:  # a replica on this rank only
        grads = [p.given.grad for p in every]
        shards = [s for g in grads if isinstance(g, ShardedTensor) for s in g.local_shards()]
        next(s.tensor for s in shards if s.tensor.numel()).view(-1)[0] = INF
    before = [pair.full.detach().clone() for pair in every]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for pair, full in zip(every, before, strict=True):
        check_same(pair.given, full, "skipped")


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, WORLD_SIZE)
