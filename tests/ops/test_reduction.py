"""Reductions over layouts of every kind; what decides them, without processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.deciding import decide
from tests.ops.parameters import sharded

import shardwise
from shardwise.comm import communicator
from shardwise.comm.simulate import simulate
from shardwise.geometry import Box, Layout
from shardwise.ops import Operand
from shardwise.ops.terms import Reduced, reduced_of, terms_of
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.tensor import wrap
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds
from shardwise.testing.strategies import layouts, shapes
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.testing.op_check import Values

Dims = tuple[int, ...]

# Function of a tensor and dims, the values it is tried on, whether it takes several dims.
MANY: dict[str, tuple[Callable[..., Any], Values]] = {
    "sum": (lambda x, dims, keep: x.sum(dims, keep), "real"),
    "mean": (lambda x, dims, keep: x.mean(dims, keep), "real"),
    "amax": (lambda x, dims, keep: x.amax(dims, keep), "ties"),
    "var": (lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep), "real"),
    "std_mean": (
        lambda x, dims, keep: torch.std_mean(x, dims, correction=0.5, keepdim=keep),
        "real",
    ),
    "logsumexp": (lambda x, dims, keep: x.logsumexp(dims, keep), "real"),
    "vector_norm": (lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep), "ties"),
    "max norm": (lambda x, dims, keep: torch.linalg.vector_norm(x, math.inf, dims, keep), "ties"),
    "count_nonzero": (lambda x, dims, keep: x.count_nonzero(dims), "ties"),
    "nanmean": (lambda x, dims, keep: x.nanmean(dims, keep), "real"),
}
ONE: dict[str, tuple[Callable[..., Any], Values]] = {
    "prod": (lambda x, dim, keep: x.prod(dim, keep), "ties"),
    "max": (lambda x, dim, keep: x.max(dim, keep), "ties"),
    "argmin": (lambda x, dim, keep: x.argmin(dim, keep), "ties"),
    "cumsum": (lambda x, dim, keep: x.cumsum(dim), "real"),
    "cumprod": (lambda x, dim, keep: x.cumprod(dim), "ties"),
    "topk": (lambda x, dim, keep: x.topk((x.shape[dim] + 1) // 2, dim), "distinct"),
    "sort": (lambda x, dim, keep: x.sort(dim), "distinct"),
}
WITHOUT_GRADIENT = ("count_nonzero", "argmin")


def _given(full: torch.Tensor, to: Layout | str) -> Any:
    """The full tensor cut as `to` says, on the ranks of the simulation."""
    if isinstance(to, str):
        ranks = sorted(communicator().ranks)
        to = parse_spec(to, ranks=ranks, device="cpu").layout(tuple(full.shape))
    return sharded(full, to)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, Dims, bool]:
    """A layout, dims of it, and whether to keep them."""
    layout = draw(layouts(shape=draw(shapes(min_ndim=1, max_ndim=4, max_size=5))))
    dims = draw(st.lists(st.integers(0, layout.ndim - 1), min_size=1, unique=True))
    return layout, tuple(dims), draw(st.booleans())


def _check(name: str, call: Callable[..., Any], values: Values, layout: Layout) -> None:
    if layout.pending == "product":
        layout = layout.bar
    # Of a pending mean each term has its own part of the gradient; of others there is none.
    has_grad = layout.pending in (None, "sum") and name not in WITHOUT_GRADIENT
    check_op(Sample(call, (layout.shape,), values, has_grad), [layout])


@pytest.mark.parametrize("name", MANY)
@settings(max_examples=min(settings().max_examples // 2, 200))
@given(case=cases())
def test_over_several_dims(name: str, case: tuple[Layout, Dims, bool]) -> None:
    layout, dims, keepdim = case
    call, values = MANY[name]
    if 0 in layout.shape and name in ("amax", "var", "std_mean", "max norm"):
        return  # some of these raise; see below
    _check(name, lambda x: call(x, dims, keepdim), values, layout)


@pytest.mark.parametrize("name", ONE)
@settings(max_examples=min(settings().max_examples // 2, 200))
@given(case=cases())
def test_over_one_dim(name: str, case: tuple[Layout, Dims, bool]) -> None:
    layout, (dim, *_), keepdim = case
    call, values = ONE[name]
    if 0 in layout.shape and name in ("max", "argmin", "topk"):
        return
    _check(name, lambda x: call(x, dim, keepdim), values, layout)


@pytest.mark.parametrize("name", [*MANY, *ONE])
@settings(max_examples=min(settings().max_examples // 3, 150))
@given(case=cases(), data=st.data())
def test_backward_goes_on_to_exchanges_before(
    name: str, case: tuple[Layout, Dims, bool], data: st.DataObject
) -> None:
    layout, dims, keepdim = case
    if 0 in layout.shape or name in WITHOUT_GRADIENT:
        return
    before = data.draw(layouts(shape=layout.shape, addends=False))
    call, values = MANY[name] if name in MANY else ONE[name]
    over = dims if name in MANY else dims[0]

    def moved(x: Any) -> Any:
        if isinstance(x, shardwise.ShardedTensor):
            x = wrap(reshard_state(x._state, layout.bar))
        return call(x, over, keepdim)

    check_op(Sample(moved, (layout.shape,), values), [before])


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "var", "prod", "max", "argmax", "norm"])
@settings(max_examples=min(settings().max_examples // 3, 150))
@given(layout=layouts())
def test_of_the_whole_tensor_every_rank_has_the_result(name: str, layout: Layout) -> None:
    if 0 in layout.shape and name in ("amax", "var", "max", "argmax"):
        return
    if layout.pending is not None:
        layout = layout.bar

    def on_rank(rank: int) -> bool:
        x = _given(torch.ones(layout.shape), layout)
        found = getattr(x, name)() if name != "var" else x.var(correction=0)
        with shardwise.implicit_comm("error"):
            found.item()
        return bool(found.shard_layout.is_replicated) and found.shard_layout.ranks == (0, 1, 2, 3)

    assert all(simulate(on_rank, 4).results)


# -- special values --------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
AWKWARD = [
    [NAN, 1.0, NAN, 2.0, 2.0],
    [INF, 1.0, INF, -INF, 0.0],
    [-INF, -INF, -INF, -INF, -INF],
    [-INF, -INF, -2000.0, -2001.0, -INF],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [1.0, 2.0, 2.0, -2.0, 0.0],
    [1.0, INF, 2.0, -INF, 3.0],
    [INF, 2.0, -INF, 0.5, 3.0],
]


@pytest.mark.parametrize("numbers", AWKWARD, ids=str)
@pytest.mark.parametrize(
    "name",
    ["amax", "amin", "max", "argmax", "logsumexp", "std", "prod", "norm", "norm1", "norm0.5"],
)
def test_values_that_are_not_finite_or_tie(name: str, numbers: list[float]) -> None:
    def on_rank(rank: int) -> None:
        full = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
        layout = layout_kinds((5,))["dim 0 uneven, permuted, one empty"]
        x = _given(full.detach(), layout).requires_grad_()
        function = _named(name)
        expected, found = function(full), function(x)
        torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)
        if expected.requires_grad:
            expected.backward()
            found.backward()
            torch.testing.assert_close(x.grad.full_tensor(), full.grad, equal_nan=True)

    simulate(on_rank, 4)


def _named(name: str) -> Callable[[Any], Any]:
    if name.startswith("norm"):
        return lambda x: x.norm(float(name[4:] or 2))
    dims = (0,) if name == "logsumexp" else ()
    return lambda x: getattr(x, name)(*dims)


@pytest.mark.parametrize("name", ["amax", "amin", "max", "argmax", "argmin"])
def test_no_elements_have_no_largest(name: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises((RuntimeError, IndexError)) as raised:
            getattr(_given(torch.zeros(0, 3), "chunk(0)"), name)(0)
        return str(raised.value)

    with pytest.raises((RuntimeError, IndexError)) as raised:
        getattr(torch.zeros(0, 3), name)(0)
    assert set(simulate(on_rank, 2).results) == {str(raised.value)}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
@pytest.mark.parametrize("shape", [(4, 3), (1, 2), (0, 3)])
def test_moments_with_a_correction_near_the_count(
    shape: tuple[int, ...], name: str, beyond: int
) -> None:
    """torch's gradients of an infinite variance are not the same by dims and of all elements."""
    function = getattr(torch, name)
    rows, everything = shape[0] + beyond, math.prod(shape) + beyond
    for layout in layout_kinds(shape).values():
        _check(name, lambda x: function(x, 0, correction=rows), "ties", layout)
        _check(name, lambda x: function(x, (0, 1), correction=everything), "real", layout)
        _check(name, lambda x: function(x, correction=everything), "ties", layout)
    cut = layout_kinds(shape)["dim 0 uneven, permuted, one empty"]
    _check(name, lambda x: function(x, 0, correction=rows, keepdim=True), "complex", cut)


def test_half_precision_loses_nothing_on_the_way() -> None:
    full = (torch.arange(3000) % 7).to(torch.bfloat16).reshape(1000, 3) + 100

    def on_rank(rank: int) -> None:
        x = _given(full, "chunk(0)")
        torch.testing.assert_close(x.std(0).full_tensor(), full.std(0))
        torch.testing.assert_close(x.mean().full_tensor(), full.mean())
        leaf = _given(full, "chunk(0)").requires_grad_()
        leaf.amax().backward()
        ties = int((full == full.max()).sum())
        assert leaf.grad is not None
        assert leaf.grad.max().item() == pytest.approx(1 / ties, rel=1e-2)

    simulate(on_rank, 3)


def test_double_backward_of_a_variance() -> None:
    full = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def twice(x: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad((x.var(0) ** 2).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((grad * grad).sum(), x)
        return again

    def on_rank(rank: int) -> None:
        expected = twice(full.clone().requires_grad_())
        with shardwise.implicit_comm("allow"):
            found = twice(_given(full, "chunk(0)").requires_grad_())
        torch.testing.assert_close(found.full_tensor(), expected)

    simulate(on_rank, 3)


@pytest.mark.parametrize("kind", ["on the last rank", "dim 1 uneven, permuted, one empty"])
@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp", "softmax", "log_softmax"])
def test_double_backward_on_ranks_that_hold_nothing(name: str, kind: str) -> None:
    full = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = layout_kinds((4, 5))[kind]

    def twice(x: Any) -> Any:
        result = getattr(torch, name)(x, 1)
        weights = torch.arange(1.0, 21.0, dtype=torch.float64).reshape(4, 5)
        whole = result if type(result) is torch.Tensor else result.full_tensor()
        (grad,) = torch.autograd.grad((whole * weights).sum(), x, create_graph=True)
        (grad**2).sum().backward()
        return x.grad

    def on_rank(rank: int) -> None:
        expected = twice(full.clone().requires_grad_())
        with shardwise.implicit_comm("allow"):  # logcumsumexp of a cut dim is gathered
            found = twice(sharded(full, layout, requires_grad=True))
        torch.testing.assert_close(found.full_tensor(), expected)

    simulate(on_rank, 4)


def test_results_are_torchs_own_types() -> None:
    def on_rank(rank: int) -> None:
        x = _given(torch.arange(12.0).reshape(4, 3), "chunk(0)")
        assert type(x.max(0)) is torch.return_types.max
        assert type(x.aminmax()) is torch.return_types.aminmax
        assert type(x.topk(2)) is torch.return_types.topk
        assert x.max(0).indices.full_tensor().tolist() == [3, 3, 3]
        assert type(torch.var_mean(x)) is tuple

    simulate(on_rank, 2)


def test_a_result_of_one_element_speaks_for_itself() -> None:
    def on_rank(rank: int) -> tuple[float, str, bool]:
        x = _given(torch.arange(12.0).reshape(4, 3), "chunk(0)")
        total = x.sum()
        with shardwise.implicit_comm("error"):
            return float(total), f"{x.mean():.1f}", bool((x >= 0).all())

    assert simulate(on_rank, 3).results == [(66.0, "5.5", True)] * 3


# -- decisions -------------------------------------------------------------------------------------

ROWS = Layout((4, 6), [Box((k, 0), (k + 1, 6)) for k in range(4)], range(4))


def test_a_sum_over_a_cut_dim_stays_pending() -> None:
    decision = decide(torch.sum, ROWS, 0)
    (output,) = decision.outputs
    assert decision.needs[0].layout == ROWS
    assert decision.finish is None
    assert output.pending == "sum"
    assert list(output) == [(Box((0,), (6,)), rank, rank) for rank in range(4)]


def test_a_sum_over_a_whole_dim_is_one_call() -> None:
    decision = decide(torch.sum, ROWS, 1)
    assert decision.outputs[0] == Layout((4,), [Box((k,), (k + 1,)) for k in range(4)], range(4))
    assert decision.is_one_call
    assert decision.finish is None


def test_a_sum_of_all_is_brought_to_all_ranks() -> None:
    decision = decide(torch.sum, ROWS)
    assert decision.outputs[0].pending == "sum"
    assert decision.finish is not None
    assert decision.finish[0].is_replicated
    assert decision.finish[0].ranks == (0, 1, 2, 3)


def test_a_sum_of_addends_multiplies_terms() -> None:
    halves = [Box((0, 0), (2, 6))] * 2 + [Box((2, 0), (4, 6))] * 2
    layout = Layout((4, 6), halves, range(4), terms=[0, 1, 0, 1], pending="sum")
    (output,) = decide(torch.sum, layout, 0).outputs
    assert output.pending == "sum"
    assert output.num_terms.tolist() == [4]


def test_a_largest_element_travels_as_one_partial_per_rank() -> None:
    decision = decide(torch.amax, ROWS, 0, needs_grad=True)
    assert decision.then is not None
    (slots,), (need,) = decision.outputs, decision.then.needs
    assert slots.shape == (4, 2, 1, 6)  # value and count
    assert plan_reshard(slots, need.layout, 4).total_bytes == 4 * 3 * 2 * 6 * 4
    assert decision.then.outputs[0].is_replicated
    detached = decide(torch.amax, ROWS, 0)
    assert detached.outputs[0].pending == "max"
    assert detached.finish == (detached.outputs[0].bar,)


def test_only_totals_travel_for_a_cumulative_sum() -> None:
    decision = decide(torch.cumsum, ROWS, 0)
    assert decision.then is not None
    totals, need = decision.outputs[0], decision.then.needs[0]
    assert totals.shape == (4, 1, 1, 6)
    assert plan_reshard(totals, need.layout, 4).total_bytes == 4 * 3 * 6 * 4
    assert need.work is not None  # every piece's use of the totals is another
    assert decision.then.outputs == (ROWS,)


def test_cells_are_cut_where_boxes_lie_askew() -> None:
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (4, 3)), Box((0, 3), (3, 6)), Box((3, 3), (4, 6))]
    terms = terms_of(Layout((4, 6), boxes, [0, 1, 1, 0]), Reduced((4, 6), (1,)), rank=0)
    assert {cell: ranks for cell, ranks in terms.holders.items()} == {
        Box((0, 0), (2, 1)): {0: (0,), 1: (1,)},
        Box((2, 0), (3, 1)): {1: (0,)},
        Box((3, 0), (4, 1)): {0: (0,), 1: (1,)},
    }
    assert not terms.is_whole


def test_shares_are_put_together_where_ranks_have_equal_or_disjoint_ones() -> None:
    boxes = [Box((k,), (k + 1,)) for k in range(4)]
    reduced = Reduced((4,), (0,))
    apart = terms_of(Layout((4,), boxes, [0, 1, 0, 1]), reduced, rank=0)
    assert list(apart.holders.values()) == [{0: (0,), 1: (1,)}]
    overlapping = Layout((4,), [*boxes, boxes[0]], [0, 1, 0, 1, 1])
    each = terms_of(overlapping, reduced, rank=0)
    assert each.count(Box((0,), (1,))) == 4
    alike = Layout((4,), [*boxes, *boxes], [0] * 4 + [2] * 4)
    assert list(terms_of(alike, reduced, rank=0).holders.values()) == [{0: (0,), 2: (0,)}]


@pytest.mark.parametrize(
    ("dim", "dims"), [(None, (0, 1)), ((), (0, 1)), (-1, (1,)), ([1, 0], (0, 1)), ("n", None)]
)
def test_dims_as_torch_means_them(dim: Any, dims: Dims | None) -> None:
    found = reduced_of(Operand(ROWS, torch.float32), dim)
    assert (None if found is None else found.dims) == dims


def test_pieces_that_are_passed_over_answer_in_backward() -> None:
    """Rank 1 has a full piece of one exchange, and a piece without elements of another."""
    whole, empty = Box.whole((1, 2)), Box((1, 0), (1, 2))
    replicated = Layout((1, 2), [whole, whole], [0, 1])
    other = Layout((1, 2), [whole, empty, empty], [0, 1, 2])

    def call(x: Any) -> Any:
        y = shardwise.reshard(x, other) if isinstance(x, shardwise.ShardedTensor) else x * 1
        return torch.stack([x, y], -1)

    for reduce in (torch.sum, torch.var, torch.logsumexp, torch.cumsum, torch.softmax, torch.amax):
        sample = Sample(lambda x, reduce=reduce: reduce(call(x), -1), ((1, 2),))
        check_op(sample, [replicated], world_size=3)
