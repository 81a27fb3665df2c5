"""Functions of lists of tensors: those that optimizers are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.parameters import SHAPES, WORLD_SIZE, Pair, check_same, layouts, pairs, sharded

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.ops.foreach import FOREACH
from shardwise.sharded_tensor.dispatch import HANDLERS
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.testing.op_check import layout_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensors = list[torch.Tensor]
UNARY = """
    abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2
    neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
"""
BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
TERNARY = "addcmul addcdiv"
ARGUMENTS: dict[str, Callable[[Tensors, Tensors, Tensors], tuple[Any, ...]]] = (
    {name: lambda a, b, c: (a,) for name in UNARY.split()}
    | {name: lambda a, b, c: (a, b) for name in BINARY.split()}
    | {f"{name} number": lambda a, b, c: (a, 1.5) for name in BINARY.split()}
    | {f"{name} numbers": lambda a, b, c: (a, _numbers(a)) for name in BINARY.split()}
    | {f"{name} tensor": lambda a, b, c: (a, torch.tensor(1.5)) for name in ("add", "mul", "div")}
    | {"mul 0-d tensors": lambda a, b, c: (a, [torch.tensor(k / 3) for k in range(len(a))])}
    | {name: lambda a, b, c: (a, b, c) for name in TERNARY.split()}
    | {f"{name} number": lambda a, b, c: (a, b, c, 0.5) for name in TERNARY.split()}
    | {f"{name} numbers": lambda a, b, c: (a, b, c, _numbers(a)) for name in TERNARY.split()}
    | {
        f"{name} vector": lambda a, b, c: (a, b, c, torch.tensor(_numbers(a)))
        for name in TERNARY.split()
    }
    | {
        "lerp": lambda a, b, c: (a, b, c),
        "lerp number": lambda a, b, c: (a, b, 0.3),
        "copy_": lambda a, b, c: (a, b),
        "zero_": lambda a, b, c: (a,),
    }
)


def _numbers(tensors: Tensors) -> list[float]:
    return [1 + k / 7 for k in range(len(tensors))]


def _lists(number: int, every: Sequence[Pair]) -> tuple[Tensors, Tensors]:
    """Full tensors with positive numbers, and the same as they are given."""
    full, given = [], []
    for k, pair in enumerate(every):
        generator = torch.Generator().manual_seed(100 * k + number)
        numbers = torch.rand(pair.full.shape, dtype=torch.float64, generator=generator)
        full.append(numbers * 0.9 + 0.05)
        given.append(pair.like_given(full[-1]))
    return full, given


def _check(name: str, every: Sequence[Pair], policy: Any) -> None:
    base = name.split()[0]
    lists = [_lists(number, every) for number in range(3)]
    for suffix in ("", "_"):
        function = getattr(torch, f"_foreach_{base}{suffix}", None)
        if function is None:
            continue
        full = ARGUMENTS[name](*[one for one, _ in lists])
        given = ARGUMENTS[name](*[one for _, one in lists])
        expected = function(*full)
        with shardwise.implicit_comm(policy):
            found = function(*given)
        if base.endswith("_") or suffix:
            expected, found = lists[0]
        for k, (one, reference) in enumerate(zip(found, expected, strict=True)):
            check_same(one, reference, f"{name}{suffix} at {k}")
            assert isinstance(one, ShardedTensor) == (every[k].layout is not None)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_that_lie_alike_stay_where_they_are(name: str) -> None:
    def on_rank(rank: int) -> None:
        _check(name, pairs(WORLD_SIZE), "error")
        members: Any = communicator()
        assert members.traffic.total_bytes == 0

    simulate(on_rank, WORLD_SIZE)


OF_SEVERAL = [name for name in ARGUMENTS if name not in UNARY.split()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if k % 3 else ())
        for k, name in enumerate(OF_SEVERAL)
    ],
)
def test_tensors_that_do_not_lie_alike_are_brought_to_the_first(name: str) -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE, [(5, 4), (6,)])
        base = name.split()[0]
        for suffix in ("", "_"):
            function = getattr(torch, f"_foreach_{base}{suffix}", None)
            if function is None:
                continue
            lists = [_lists(number, every) for number in range(3)]
            # The layouts of the next list are those of the next positions of the same shape.
            turned = [
                [
                    given if number == 0 else sharded(full, _other(pair, number))
                    for pair, full, given in zip(every, *lists[number], strict=True)
                ]
                for number in range(3)
            ]
            kept = [k for k, pair in enumerate(every) if pair.layout is not None]
            full = ARGUMENTS[name](*[[one[k] for k in kept] for one, _ in lists])
            given = ARGUMENTS[name](*[[one[k] for k in kept] for one in turned])
            expected, found = function(*full), None
            with shardwise.implicit_comm("allow"):
                found = function(*given)
            if base.endswith("_") or suffix:
                expected, found = full[0], given[0]
            for k, (one, reference) in enumerate(zip(found, expected, strict=True)):
                check_same(one, reference, f"{name}{suffix} at {k}")

    def _other(pair: Pair, number: int) -> Any:
        kinds = layouts(tuple(pair.full.shape), WORLD_SIZE)
        at = kinds.index(pair.layout) if pair.layout is not None else 0
        return kinds[(at + number) % len(kinds)]

    simulate(on_rank, WORLD_SIZE)


def test_every_list_function_of_torch_is_known() -> None:
    names = [name for name in dir(torch) if name.startswith(("_foreach_", "_amp_foreach_"))]
    assert len(names) > 80
    assert [name for name in names if getattr(torch, name) not in HANDLERS] == []


def test_every_list_function_is_tested() -> None:
    known = {f.__name__.removeprefix("_foreach_").removesuffix("_") for f in FOREACH}
    tested = {name.split()[0].removesuffix("_") for name in ARGUMENTS}
    assert known - tested <= {"mm"}


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="this torch has no products of lists")
def test_matrix_products() -> None:
    def on_rank(rank: int) -> None:
        first, second = Pair(0, (5, 4), layouts((5, 4), 2)[3]), Pair(1, (4, 3), None)
        with shardwise.implicit_comm("allow"):
            (found,) = torch._foreach_mm([first.given], [second.given])
        (expected,) = torch._foreach_mm([first.full], [second.full])
        check_same(found, expected, "mm")

    simulate(on_rank, 2)


def test_gradients_pass_through() -> None:
    def on_rank(rank: int) -> None:
        every = [pair for pair in pairs(WORLD_SIZE) if pair.layout is not None]
        factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        same = factor.detach().clone().requires_grad_()
        full = [pair.full.sin() * same for pair in every]  # torch's own list has no such gradient
        with shardwise.implicit_comm("error"):
            found: Any = torch._foreach_mul(torch._foreach_sin([p.given for p in every]), factor)
        sum((one.full_tensor() ** 2).sum() for one in found).backward()
        sum((one**2).sum() for one in full).backward()  # type: ignore[union-attr]  # not empty
        for pair in every:
            assert pair.full.grad is not None
            assert pair.given.grad is not None
            check_same(pair.given.grad, pair.full.grad, "gradient")
        assert same.grad is not None
        torch.testing.assert_close(factor.grad, same.grad)

    simulate(on_rank, WORLD_SIZE)


def test_results_of_functions_in_place_follow_into_the_graph() -> None:
    def on_rank(rank: int) -> None:
        layout = layouts((5, 4), 2)[3]
        source = sharded(torch.ones(5, 4), layout, requires_grad=True)
        target = sharded(torch.ones(5, 4), layout)
        torch._foreach_add_([target], [source])
        assert target.requires_grad

    simulate(on_rank, 2)


def test_a_pending_sum_stays_pending_or_is_reduced() -> None:
    def on_rank(rank: int) -> None:
        full = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        given = sharded(full, layout_kinds((5, 4), world_size=2)["pending"])
        (doubled,) = torch._foreach_mul([given], 2.0)
        assert isinstance(doubled, ShardedTensor)
        assert doubled.shard_layout.pending == "sum"
        torch.testing.assert_close(doubled.full_tensor(), full * 2)
        with shardwise.implicit_comm("allow"):
            (root,) = torch._foreach_sin([given])
            torch._foreach_sin_([given])
        check_same(root, full.sin(), "sin")
        torch.testing.assert_close(given.full_tensor(), full.sin())

    simulate(on_rank, 2)


def test_tensors_of_other_groups_are_refused() -> None:
    def on_rank(rank: int) -> None:
        from shardwise.errors import ArgumentValueError
        from shardwise.sharded_tensor.state import make_state
        from shardwise.sharded_tensor.tensor import wrap

        one = sharded(torch.ones(4), layout_kinds((4,), world_size=2)["replicated"])
        if rank:
            return
        members: Any = communicator()
        alone = members.subgroup([0])
        layout = layout_kinds((4,), world_size=1)["replicated"]
        other = wrap(make_state(layout, [torch.ones(4)], group=alone))
        with pytest.raises(ArgumentValueError, match="one process group"):
            torch._foreach_add([one, other], 1)

    simulate(on_rank, 2)


# -- norms -----------------------------------------------------------------------------------------

ORDERS = [2, 1, 0, 3.5, -1, float("inf"), float("-inf")]


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_a_list_take_one_exchange(order: float) -> None:
    def on_rank(rank: int) -> int:
        every = pairs(WORLD_SIZE, SHAPES)
        members: Any = communicator()
        before: int = sum(members.traffic.messages.values())
        with torch.no_grad(), shardwise.implicit_comm("error"):
            found = torch._foreach_norm([pair.given for pair in every], order)
            expected = torch._foreach_norm([pair.full for pair in every], order)
        for pair, one, reference in zip(every, found, expected, strict=True):
            check_same(one, reference, f"norm {order}")
            if pair.layout is not None:
                assert isinstance(one, ShardedTensor)
                assert one.shard_layout.is_replicated
                assert one.item() == pytest.approx(reference.item())
        return before

    found = simulate(on_rank, WORLD_SIZE)
    assert found.traffic.messages == {
        (a, b): 2 for a in range(WORLD_SIZE) for b in range(WORLD_SIZE) if a != b
    }  # one all-reduce, counted as a reduce-scatter and an all-gather


def test_norms_that_are_no_numbers_are_so_on_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        full = torch.arange(6.0)
        full[4] = float("nan")
        for layout in layouts((6,), WORLD_SIZE):
            given: Tensors = [sharded(full, layout), sharded(full.nan_to_num(float("inf")), layout)]
            for order in (2, float("inf"), float("-inf")):
                expected = torch._foreach_norm([full, full.nan_to_num(float("inf"))], order)
                for one, reference in zip(torch._foreach_norm(given, order), expected, strict=True):
                    check_same(one, reference, f"norm {order}")
            for one, reference in zip(
                torch._foreach_max(given),
                torch._foreach_max([full, full.nan_to_num(float("inf"))]),
                strict=True,
            ):
                check_same(one, reference, "max")

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_norms_have_the_dtype_of_torch(dtype: torch.dtype) -> None:
    def on_rank(rank: int) -> None:
        full = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        for layout in layouts((6, 5), WORLD_SIZE):
            (found,) = torch._foreach_norm([sharded(full, layout)])
            check_same(found, torch._foreach_norm([full])[0], "norm")
            if dtype == torch.bfloat16:
                (found,) = torch._foreach_norm([sharded(full, layout)], 2, torch.float32)
                check_same(found, torch._foreach_norm([full], 2, torch.float32)[0], "norm")

    simulate(on_rank, WORLD_SIZE)


def test_norms_with_gradient() -> None:
    def on_rank(rank: int) -> None:
        for layout in layouts((5, 4), WORLD_SIZE):
            pair = Pair(3, (5, 4), layout)
            with shardwise.implicit_comm("allow"):
                torch._foreach_norm([pair.given])[0].backward()
            torch._foreach_norm([pair.full])[0].backward()
            assert pair.given.grad is not None
            assert pair.full.grad is not None
            check_same(pair.given.grad, pair.full.grad, "gradient")

    simulate(on_rank, WORLD_SIZE)


def test_reductions_of_other_kinds() -> None:
    def on_rank(rank: int) -> None:
        every = pairs(WORLD_SIZE)
        given, full = [p.given.detach() for p in every], [p.full.detach() for p in every]
        for one, reference in zip(torch._foreach_max(given), torch._foreach_max(full), strict=True):
            check_same(one, reference, "max")
        power_sums = getattr(torch, "_foreach_powsum", None)
        if power_sums is not None:
            for order in (1, 2, 3):
                pair_of = zip(power_sums(given, order), power_sums(full, order), strict=True)
                for one, reference in pair_of:
                    check_same(one, reference, "powsum")
        whole = [torch.arange(6) - 3, torch.arange(4)]
        cut: Tensors = [sharded(one, layouts(tuple(one.shape), WORLD_SIZE)[-1]) for one in whole]
        with shardwise.implicit_comm("allow"):
            maxima = torch._foreach_max(cut)
        assert [one.item() for one in maxima] == [2, 3]

    simulate(on_rank, WORLD_SIZE)


def test_norms_of_tensors_without_elements_are_refused_as_torch_does() -> None:
    def on_rank(rank: int) -> None:
        given = sharded(torch.empty(0, 3), layouts((0, 3), 2)[0])
        assert torch._foreach_norm([given])[0].item() == 0
        with pytest.raises(RuntimeError, match="empty"):
            torch._foreach_norm([given], float("inf"))

    simulate(on_rank, 2)


# -- out= ------------------------------------------------------------------------------------------


def test_results_are_written_where_the_tensor_is_that_takes_them() -> None:
    def on_rank(rank: int) -> None:
        kinds = layouts((5, 4), WORLD_SIZE)
        for k in range(len(kinds)):
            x, y = Pair(k, (5, 4), kinds[k]), Pair(k + 50, (5, 4), kinds[k - 1])
            given, full = x.given.detach(), x.full.detach()
            out = sharded(torch.zeros(5, 4, dtype=torch.float64), kinds[k - 2])
            with shardwise.implicit_comm("allow"):
                assert torch.maximum(given, y.given.detach(), out=out) is out
                check_same(out, torch.maximum(full, y.full.detach()), "out")
                torch.maximum(full, y.full.detach(), out=out.zero_())
                check_same(out, torch.maximum(full, y.full.detach()), "out of plain ones")
                torch.sub(out, given, out=out)
                check_same(out, torch.maximum(full, y.full.detach()) - full, "out, an operand")
                with pytest.raises(RuntimeError, match="automatic differentiation"):
                    torch.maximum(x.given, y.given, out=out)
                with pytest.raises(OpError, match="not resized: expected one of shape"):
                    torch.add(given, 1, out=sharded(torch.zeros(6), layouts((6,), WORLD_SIZE)[0]))
                with pytest.raises(OpError, match="expected a ShardedTensor, got Tensor"):
                    torch.add(given, 1, out=torch.zeros(5, 4, dtype=torch.float64))

    simulate(on_rank, WORLD_SIZE)
