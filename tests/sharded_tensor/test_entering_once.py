"""A tensor that several functions use for work of the same ranks has its gradient summed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.strategies import layouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.geometry import Layout

WORLD_SIZE = 3
RANKS = tuple(range(WORLD_SIZE))
X = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6)
W = torch.linspace(2, -1, 30, dtype=torch.float64).view(5, 6)  # uneven on three ranks
V = W.flip(0) * 0.5


def distributed(full: torch.Tensor, spec: str) -> Any:
    leaf = full.clone().requires_grad_()
    return shardwise.distribute(leaf, parse_spec(spec, ranks=RANKS, device="cpu"))


def check(loss: Callable[..., Any], *, x: str = "replicate()", w: str = "chunk(0)") -> list[Any]:
    """Compares gradients after `loss` has gone backward; what it returns, of full tensors first."""
    full = [one.clone().requires_grad_() for one in (X, W, V)]
    returned = loss(*full)

    def on_rank(rank: int) -> Any:
        leaves = [distributed(one, spec) for one, spec in zip((X, W, V), (x, w, w), strict=True)]
        with shardwise.implicit_comm("allow"):
            found = loss(*leaves)
        for leaf, one in zip(leaves, full, strict=True):
            assert leaf.grad.shard_layout == leaf.shard_layout
            torch.testing.assert_close(leaf.grad.full_tensor(), one.grad)
        return found

    return [returned, *simulate(on_rank, WORLD_SIZE).results]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor


def squares(*tensors: Any) -> Any:
    return sum((whole(one) ** 2).sum() for one in tensors)


def backward_bytes(loss: Callable[..., torch.Tensor]) -> int:
    """What ranks send each other in backward."""

    def on_rank(_: int) -> int:
        members: Any = communicator()
        found = loss(*[distributed(one, s) for one, s in ((X, "replicate()"), (W, "chunk(0)"))])
        members.all_reduce(torch.zeros(1), "sum")  # all have sent what forward sends
        before = members.traffic.total_bytes
        found.backward()
        members.all_reduce(torch.zeros(1), "sum")
        return int(members.traffic.total_bytes - before)

    return max(simulate(on_rank, WORLD_SIZE).results)


def test_three_products_send_what_one_sends() -> None:
    def loss(number: int) -> Callable[..., torch.Tensor]:
        def run(x: Any, w: Any) -> torch.Tensor:
            x = x * 2
            return sum((F.linear(x, w).sum() for _ in range(number)), x.sum() * 0)

        return run

    nothing = backward_bytes(loss(0))
    assert backward_bytes(loss(3)) == backward_bytes(loss(1)) > nothing


@settings(max_examples=settings().max_examples // 4)
@given(layouts(shape=(4, 3), world_size=4), layouts(shape=(5, 3), world_size=4))
def test_products_of_one_tensor_on_random_layouts(x: Layout, w: Layout) -> None:
    x, w = x.bar, w.bar

    def call(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return F.linear(x, w) * F.linear(x, v) + F.linear(x, w * v)

    check_op(Sample(call, ((4, 3), (5, 3), (5, 3))), [x, w, w])


@pytest.mark.parametrize("x", ["replicate()", "grid([2, 1], ranks=[[0, 1], [2]])", "on_rank(1)"])
def test_parts_of_a_loss_go_backward_one_after_the_other(x: str) -> None:
    def loss(x: Any, w: Any, v: Any) -> None:
        x = x + 1.0  # which saves nothing, so that torch lets both go
        first, second = squares(F.linear(x, w)), squares(F.linear(x, v))
        first.backward()
        second.backward()
        squares(F.linear(x, w * v)).backward()

    check(loss, x=x)


def test_what_is_written_between_two_uses_is_followed() -> None:
    def loss(x: Any, w: Any, v: Any) -> None:
        x = x * 2.0
        first = F.linear(x, w.detach()).sum()
        x.mul_(3.0)
        (whole(first) + squares(F.linear(x, v)) + squares(w)).backward()

    check(loss)


def test_hooks_and_kept_gradients_have_the_whole_sum() -> None:
    def loss(x: Any, w: Any, v: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        y = x * 2.0
        out = F.linear(y, w)
        y.register_hook(lambda grad: seen.append(whole(grad)))
        y.retain_grad()
        squares(out, F.linear(y, v)).backward()
        (alone,) = torch.autograd.grad(whole(F.linear(y, w)).sum(), y)
        return [*seen, whole(y.grad), whole(alone)]

    expected, *found = check(loss)
    assert len(expected) == 4  # the hook sees both
    for one in found:
        torch.testing.assert_close(one, expected)


def test_second_derivatives() -> None:
    def loss(x: Any, w: Any, v: Any) -> None:
        y = x.sin()
        out = squares(F.linear(y, w), F.linear(y, v))
        (grad,) = torch.autograd.grad(out, y, create_graph=True)
        squares(grad, F.linear(y, w)).backward()

    check(loss)
    check(loss, w="chunk(1)")


def test_what_is_checkpointed_saves_the_same_again() -> None:
    def loss(x: Any, w: Any, v: Any) -> None:
        y = x.sin()
        outside = F.linear(y, w)

        def run(y: Any) -> Any:
            return F.linear(y, w) * F.linear(y, v)

        again = checkpoint(run, y, use_reentrant=False)
        squares(outside, again, F.linear(y, v)).backward()

    check(loss)
    check(loss, w="fused(0, [2, 3])")


def test_new_data_are_used() -> None:
    def loss(x: Any, w: Any, v: Any) -> None:
        y = x * 2.0
        first = F.linear(y, w.detach())
        y.data = y.data * 5.0
        squares(first, F.linear(y, v), w).backward()

    check(loss)
