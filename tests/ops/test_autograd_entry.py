"""The ways into autograd: each gives for sharded tensors what it gives for full ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.parameters import WORLD_SIZE, Pair, check_same, layouts
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPE = (5, 4)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def _function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Not linear in either, and both meet."""
    return (x * y.exp()).sin() + x * x


def _cases(world_size: int) -> list[tuple[Pair, Pair]]:
    """Operands of every layout, alike and not alike."""
    kinds = layouts(SHAPE, world_size)
    alike = [(Pair(k, SHAPE, one), Pair(k + 50, SHAPE, one)) for k, one in enumerate(kinds)]
    turned = [
        (Pair(k, SHAPE, one), Pair(k + 50, SHAPE, kinds[(k + 1) % len(kinds)]))
        for k, one in enumerate(kinds)
    ]
    plain = [(Pair(7, SHAPE, kinds[-1]), Pair(57, SHAPE, None))]
    return alike + turned + plain


def _check_grads(case: Sequence[Pair], what: str) -> None:
    for pair in case:
        assert pair.given.grad is not None, what
        assert pair.full.grad is not None, what
        check_same(pair.given.grad, pair.full.grad, what)


def _each(case: Sequence[Pair]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The operands as they are given, and full."""
    return [(case[0].given, case[1].given), (case[0].full, case[1].full)]


def _backward_of_a_plain_scalar(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        _whole(_function(x, y)).square().sum().backward()
    _check_grads(case, "plain scalar")


def _backward_of_a_sharded_scalar(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        _function(x, y).square().sum().backward()
    _check_grads(case, "sharded scalar")


def _backward_with_a_gradient(case: Sequence[Pair]) -> None:
    weights = torch.arange(20.0, dtype=torch.float64).reshape(SHAPE)
    for x, y in _each(case):
        _function(x, y).backward(weights, retain_graph=False)
    _check_grads(case, "gradient=")


def _backward_twice(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        loss = _whole(_function(x, y)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    _check_grads(case, "accumulated")


def _only_inputs(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        _whole(_function(x, y)).sum().backward(inputs=[x])
    _check_grads(case[:1], "inputs=")
    assert case[1].given.grad is None


def _autograd_grad(case: Sequence[Pair]) -> None:
    found, expected = [
        torch.autograd.grad(_whole(_function(x, y)).sum(), [x, y]) for x, y in _each(case)
    ]
    for one, reference in zip(found, expected, strict=True):
        check_same(one, reference, "autograd.grad")


def _unused(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        found: Any = torch.autograd.grad(_whole(x * 2).sum(), [x, y], allow_unused=True)
        assert found[1] is None
        assert type(found[0]) is type(x)
    for x, y in _each(case):
        with pytest.raises((OpError, RuntimeError), match="not have been used"):
            torch.autograd.grad(_whole(x * 2).sum(), [x, y])
        _, second = torch.autograd.grad(_whole(x * 2).sum(), [x, y], materialize_grads=True)
        check_same(second, torch.zeros(SHAPE, dtype=torch.float64), "materialized")


def _double_backward(case: Sequence[Pair]) -> None:
    seconds = []
    for x, y in _each(case):
        grads = torch.autograd.grad(_whole(_function(x, y)).sum(), [x, y], create_graph=True)
        penalty = sum(_whole(grad).square().sum() for grad in grads)
        assert isinstance(penalty, torch.Tensor)
        seconds.append(torch.autograd.grad(penalty, [x, y], retain_graph=True))
        penalty.backward()
    for one, reference in zip(*seconds, strict=True):
        check_same(one, reference, "second derivative")
    _check_grads(case, "second derivative")


def _retained(case: Sequence[Pair]) -> None:
    kept = []
    for x, y in _each(case):
        middle = _function(x, y)
        middle.retain_grad()
        _whole(middle.tanh()).sum().backward()
        kept.append(middle)
    found, expected = kept
    assert found.retains_grad
    assert found.grad is not None
    assert expected.grad is not None
    check_same(found.grad, expected.grad, "retained")


def _checkpointed(case: Sequence[Pair]) -> None:
    for x, y in _each(case):
        first = checkpoint(_function, x, y, use_reentrant=False)
        second = checkpoint(_function, first.tanh(), y, use_reentrant=False)
        (_whole(second).sum() + _whole(_function(x, y)).sum()).backward()
    _check_grads(case, "checkpointed")


def _without_grad(case: Sequence[Pair]) -> None:
    (x, y), (full_x, full_y) = _each(case)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found, expected = _function(x, y), _function(full_x, full_y)
        check_same(found, expected, "without gradient")
        assert not found.requires_grad
        assert found.is_inference() == expected.is_inference()
    with torch.no_grad(), torch.enable_grad():
        assert _function(x, y).requires_grad
    assert not _function(x.detach(), y.detach()).requires_grad


def _autocast(case: Sequence[Pair]) -> None:
    """Pointwise functions have no dtype of their own there, and promote as ever."""
    (x, y), (full_x, full_y) = _each(case)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _function(x, y), _function(full_x, full_y)
        product, full_product = (torch.mm(a.float(), b.float().t()) for a, b in _each(case))
        assert product.dtype == full_product.dtype == torch.bfloat16
    check_same(found, expected, "autocast")
    for one in (found, expected):
        _whole(one).sum().backward()
    _check_grads(case, "autocast")


ENTRIES: dict[str, Callable[[Sequence[Pair]], None]] = {
    "a plain scalar": _backward_of_a_plain_scalar,
    "a sharded scalar": _backward_of_a_sharded_scalar,
    "a gradient": _backward_with_a_gradient,
    "twice": _backward_twice,
    "inputs": _only_inputs,
    "autograd.grad": _autograd_grad,
    "unused": _unused,
    "double backward": _double_backward,
    "retain_grad": _retained,
    "checkpoint": _checkpointed,
    "no_grad": _without_grad,
    "autocast": _autocast,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_simulated(name: str) -> None:
    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"):
            for case in _cases(WORLD_SIZE):
                ENTRIES[name](case)

    simulate(on_rank, WORLD_SIZE)


def _on_real_rank(rank: int) -> None:
    with shardwise.implicit_comm("allow"):
        for name, entry in ENTRIES.items():
            for number, case in enumerate(_cases(3)):
                try:
                    entry(case)
                except AssertionError as error:
                    raise AssertionError(f"{name}, case {number}") from error


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, 3)


def test_materialized_gradients_of_a_constant_require_grad_nowhere() -> None:
    def on_rank(rank: int) -> tuple[bool, bool]:
        pieces = shardwise.chunk(0, ranks=[0, 1, 1, 1])
        x, unused = (
            shardwise.distribute(torch.ones(4), pieces, src_rank=None).requires_grad_()
            for _ in range(2)
        )
        used = _whole(x[:2]).sum() * 2
        first, second = torch.autograd.grad(
            used, [x, unused], create_graph=True, materialize_grads=True
        )
        assert torch.equal(_whole(first).detach(), torch.tensor([2.0, 2.0, 0.0, 0.0]))
        assert not _whole(second).any()
        return first.requires_grad, second.requires_grad

    assert simulate(on_rank, 2).results == [(False, True)] * 2  # of what is unused as in torch


def test_backward_needs_one_element_or_a_gradient() -> None:
    def on_rank(rank: int) -> None:
        pair = Pair(0, SHAPE, layouts(SHAPE, 2)[-1])
        with pytest.raises(OpError, match="only for scalar outputs"):
            (pair.given * 2).backward()

    simulate(on_rank, 2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_of_a_scalar_says_what_torch_says_and_shows_itself_to_modes() -> None:
    """It calls torch's engine past `torch.autograd.backward`, which users may not notice."""

    class Seeing(TorchFunctionMode):
        seen: list[Any]

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func)
            return func(*args, **kwargs or {})

    def on_rank(rank: int) -> None:
        layout = layouts(SHAPE, 2)[-1]
        pair = Pair(0, SHAPE, layout)
        wrong = (pair.given.detach().sum(), (pair.given * 1j).sum())
        full = (pair.full.detach().sum(), (pair.full * 1j).sum())
        for one, other in zip(wrong, full, strict=True):
            with pytest.raises(RuntimeError) as expected:
                other.backward()
            with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
                one.backward()
        loss = pair.given.square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        loss = pair.given.square().sum()
        loss.backward(create_graph=True)  # which retains the graph
        loss.backward()
        pair.full.square().sum().mul(3).backward()
        _check_grads([pair], "three times")
        mode = Seeing()
        mode.seen = []
        loss = pair.given.square().sum()
        with mode:
            loss.backward()
        assert torch.autograd.backward in mode.seen

    simulate(on_rank, 2)


def test_hooks_are_called_once_per_rank_with_one_gradient() -> None:
    """With several shards on a rank and with none."""
    rows = [Box((k, 0), (k + 1, 4)) for k in range(5)]
    layout = Layout(SHAPE, rows, [0, 0, 2, 2, 0])

    def on_rank(rank: int) -> None:
        pair = Pair(0, SHAPE, layout)
        seen: list[Any] = []
        pair.given.register_hook(lambda grad: seen.append(grad.shard_layout))
        pair.given.register_post_accumulate_grad_hook(
            lambda param: seen.append(param.grad.shard_layout)
        )
        for count in (1, 2):
            _whole(_function(pair.given, pair.given)).sum().backward()
            assert seen == [layout] * (2 * count)

    simulate(on_rank, 3)
