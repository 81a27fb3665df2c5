"""Functions without a rule: what they write, show and draw is never silently lost or different."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import shardwise
from shardwise import sharded_tensor
from shardwise.errors import AgreementError, ArgumentValueError, OpError

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = torch.arange(12.0).view(4, 3) - 6


def made(spec: Any = None) -> Any:
    return shardwise.distribute(FULL.clone(), spec or shardwise.chunk(0))


SPECS: dict[str, Callable[[], Any]] = {
    "rows": lambda: shardwise.chunk(0),
    "on one rank": lambda: shardwise.on_rank(1),
    "several": lambda: shardwise.block_cyclic(0, 1, ranks=[0, 1]),
    "replicated": shardwise.replicate,
    "pending": shardwise.partial,
}


def _max_into(x: Any) -> None:
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.int64)
    if type(x) is not torch.Tensor:
        spec = shardwise.chunk(0)
        values = sharded_tensor.zeros(spec, 3)
        indices = sharded_tensor.zeros(spec, 3, dtype=torch.int64)
    found = torch.max(x, 0, out=(values, indices))
    assert found[0] is values
    x[0] = values
    x[1] = indices


def _norm(x: Any) -> None:
    mean, variance = x[0].clone(), x[1].clone()
    functional.batch_norm(torch.ones(2, 3) * 5, mean, variance, training=True)
    x[2], x[3] = mean, variance


WRITES: list[Callable[[Any], object]] = [
    lambda x: torch._foreach_add_([x], 1.0),
    lambda x: torch._foreach_mul_([x, x.clone()], [2.0, 3.0]),
    lambda x: functional.relu(x, inplace=True),
    lambda x: torch.nn.Hardtanh(inplace=True)(x),
    lambda x: torch.sin(x.clone(), out=x),
    lambda x: torch.add(x, 1, out=x),
    lambda x: x.__setitem__(slice(1, 3), torch.tensor([1.0, 2.0, 3.0])),
    lambda x: x.__setitem__(0, x[1]),
    lambda x: x.masked_fill_(x > 0, 9.0),
    lambda x: x.clamp_(min=-1).add_(x),
    lambda x: functional.embedding(torch.tensor([0, 3]), x, max_norm=1.0),
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(0),
    _max_into,
    _norm,
]


def _written(_: int) -> None:
    shardwise.implicit_comm("allow")
    for name, spec in SPECS.items():
        for number, write in enumerate(WRITES):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    x, expected = made(spec()), FULL.clone()
                    object_id = id(x)
                    write(x)
                    write(expected)
                    told = f"{name}, write {number}, {mode.__name__}"
                    assert id(x) == object_id
                    torch.testing.assert_close(x.full_tensor(), expected, msg=told)


def test_what_a_function_writes_into_any_argument_arrives() -> None:
    shardwise.run_local(_written, 2)


def _in_place_with_gradient(_: int) -> None:
    shardwise.implicit_comm("allow")
    x, full = made().requires_grad_(), FULL.clone().requires_grad_()
    y, plain = shardwise.reshard(x, shardwise.chunk(1)), full.clone()
    for one in (y, plain):
        functional.hardtanh(one.neg_(), -5, 5, inplace=False)
        one[0] = 7
        one.mul_(torch.arange(3.0))
    y.sum().backward()
    plain.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.mul_(2)


def _statistics_beside_weights_that_require_grad(_: int) -> None:
    shardwise.implicit_comm("allow")
    weight = made()[3].clone().detach().requires_grad_()
    mean, variance = made()[0].clone(), made()[1].clone()
    found = torch.native_batch_norm(made(), weight, None, mean, variance, True, 0.5, 1e-5)
    found[0].square().sum().backward()
    full, plain = FULL[3].clone().requires_grad_(), [FULL[0].clone(), FULL[1].clone()]
    expected = torch.native_batch_norm(FULL, full, None, plain[0], plain[1], True, 0.5, 1e-5)
    expected[0].square().sum().backward()
    torch.testing.assert_close(mean.full_tensor(), plain[0])
    torch.testing.assert_close(variance.full_tensor(), plain[1])
    torch.testing.assert_close(weight.grad.full_tensor(), full.grad)


def test_statistics_are_written_and_weights_beside_them_are_not() -> None:
    shardwise.run_local(_statistics_beside_weights_that_require_grad, 2)


def _sparse_results(_: int) -> None:
    shardwise.implicit_comm("allow")
    for spec in SPECS.values():
        with pytest.raises(OpError, match="pieces are dense"):
            made(spec()).to_sparse()


def test_sparse_results_are_refused() -> None:
    shardwise.run_local(_sparse_results, 2)


def test_in_place_functions_have_gradients() -> None:
    shardwise.run_local(_in_place_with_gradient, 2)


def _gathered(x: Any) -> Any:
    """A view that has no rule."""
    return x.as_strided((2, 3), (3, 1))


VIEWS: list[Callable[[Any], Any]] = [
    _gathered,
    lambda x: x.unfold(0, 2, 1),
    lambda x: _gathered(x)[0],
    lambda x: _gathered(x)[0][1],
    lambda x: _gathered(x)[:, 1:].T,
    lambda x: _gathered(x).view(-1),
    lambda x: _gathered(x).detach(),
    lambda x: _gathered(x).data,
    lambda x: _gathered(x).view_as(_gathered(x)),
    lambda x: _gathered(x).chunk(2)[1],
    lambda x: next(iter(_gathered(x))),
    lambda x: _gathered(x).to(torch.float32),
]


def _views(_: int) -> None:
    shardwise.implicit_comm("allow")
    for number, view in enumerate(VIEWS):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                x = made()
                for write in (
                    lambda v: v.zero_(),
                    lambda v: v.fill_(1),
                    lambda v: v.add_(1),
                    lambda v: v.copy_(torch.zeros(())),
                    lambda v: torch._foreach_add_([v], 1.0),
                ):
                    with pytest.raises(OpError, match="the tensor itself would not change"):
                        write(view(x))
                assert torch.equal(x, FULL), number
        # Nor does the view show what is written later.
        x = made()
        seen = view(x)
        kept = view(x).clone()
        x.add_(1)
        with pytest.raises(OpError, match="written since"):
            torch.sin(seen)
        with pytest.raises(OpError, match="written since"):
            torch.stack([seen])
        assert torch.equal(kept, view(FULL))
    # Where every rank has the whole tensor, a view is a view.
    x, expected = made(shardwise.replicate()), FULL.clone()
    for one in (x, expected):
        seen = one[0]
        seen.fill_(9)
        one.T.mul_(2)
        assert torch.equal(seen, torch.full((3,), 18.0))
    assert torch.equal(x, expected)


def test_views_are_refused_where_they_would_not_be_views() -> None:
    shardwise.run_local(_views, 2)


def _returned(_: int) -> None:
    shardwise.implicit_comm("allow")
    x, plain = made(), torch.zeros(4, 3)
    same = plain
    same += x
    assert same is plain
    assert torch.equal(plain, FULL)
    assert functional.relu(x, inplace=True) is x
    assert torch.nn.Dropout(0.5).eval()(x).shape == x.shape
    assert torch.max(x, 0).values.shape == (3,)
    assert torch.equal(torch.cat([x, FULL]), torch.cat([FULL.relu(), FULL]))
    assert (x > 1).any().item()
    assert torch.equal(x.all(dim=0), FULL.relu().all(dim=0))
    assert torch.equal(torch.all(x, 1, keepdim=True), torch.all(FULL.relu(), 1, keepdim=True))
    assert 5.0 in x


def test_arguments_come_back_as_themselves() -> None:
    shardwise.run_local(_returned, 2)


def _random(rank: int) -> None:
    shardwise.implicit_comm("allow")
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    x = made()
    generator = torch.Generator().manual_seed(rank)
    heads = x[None]
    for draw in (
        lambda: torch.svd_lowrank(x, 2),
        lambda: torch.poisson(x.abs()),
        lambda: torch.poisson(x.abs(), generator=generator),
        lambda: torch.binomial(x.abs(), x.sigmoid()),
    ):
        with pytest.raises(OpError, match="each rank would draw its own numbers"):
            draw()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, FULL)
    assert torch.equal(torch.nn.Dropout(0.5).eval()(x), FULL)
    assert torch.equal(torch.nn.RReLU(0.5, 0.5).eval()(x), torch.nn.RReLU(0.5, 0.5).eval()(FULL))
    attention = functional.scaled_dot_product_attention
    torch.testing.assert_close(
        attention(heads, heads, heads).full_tensor(), attention(FULL[None], FULL[None], FULL[None])
    )


def test_what_draws_numbers_is_refused_and_what_does_not_is_not() -> None:
    shardwise.run_local(_random, 2)


def _groups(rank: int) -> None:
    shardwise.implicit_comm("allow")
    group = dist.new_group([0, 1])
    everybody = made(shardwise.chunk(0))
    if rank < 2:
        few = shardwise.distribute(FULL, shardwise.chunk(0, ranks=[0, 1]), process_group=group)
        for call in (
            lambda: torch.add(everybody, few),
            lambda: torch.stack([few, everybody]),
            lambda: torch.equal(everybody, few),
            lambda: few.copy_(everybody),
            lambda: everybody.copy_(few),
        ):
            with pytest.raises(ArgumentValueError, match=rf"\[rank {rank}\] .*one process group"):
                call()
    dist.barrier()


def test_tensors_of_two_groups_do_not_mix() -> None:
    shardwise.run_local(_groups, 3, timeout=30)


def _debug(rank: int) -> None:
    shardwise.implicit_comm("allow")
    x = made()
    with (
        shardwise.set_check("debug", timeout=5),
        pytest.raises(AgreementError, match=r"torch.*add.*plain tensors"),
    ):
        torch.add(x, torch.full((4, 3), float(rank)))


def test_plain_operands_that_differ_are_found_in_debug_mode() -> None:
    shardwise.run_local(_debug, 2, timeout=30)
