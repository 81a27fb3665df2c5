"""What rules of products decide, without ranks; and products on random layouts, simulated."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.deciding import ITEMSIZE, RANKS, decide, everywhere, layout, moved

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.strategies import layouts
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops import Decision

WORLD_SIZE = len(RANKS)
M, K, N = 8, 12, 4
X, W = (M, K), (K, N)


def einsum(equation: str, *held: Layout, rank: int = 0) -> Decision:
    return decide(torch.einsum, equation, *held, rank=rank)


def terms(work: Layout | None) -> list[int] | None:
    return None if work is None or work.terms is None else work.terms.tolist()


# -- who computes what -----------------------------------------------------------------------------


def test_rows_by_a_weight_that_all_have_give_rows() -> None:
    x, w = layout("chunk(0)", X), everywhere(W)
    found = decide(torch.mm, x, w)
    assert found.outputs == (layout("chunk(0)", (M, N)),)
    assert [need.layout for need in found.needs] == [x, w]
    assert found.needs[0].work is None
    assert terms(found.needs[1].work) == [0, 1, 2, 3]  # each rank's rows are its own work
    assert all(decide(torch.mm, x, w, rank=rank).is_one_call for rank in RANKS)


def test_columns_of_a_weight_give_columns() -> None:
    x, w = everywhere(X), layout("chunk(1)", W)
    found = decide(torch.mm, x, w)
    assert found.outputs == (layout("chunk(1)", (M, N)),)
    assert terms(found.needs[0].work) == [0, 1, 2, 3]
    assert found.needs[1].work is None


def test_both_cut_along_what_is_summed_give_a_pending_sum() -> None:
    x, w = layout("chunk(1)", X), layout("chunk(0)", W)
    found = decide(torch.mm, x, w)
    boxes = [Box.whole((M, N))] * WORLD_SIZE
    assert found.outputs == (Layout((M, N), boxes, RANKS, terms=RANKS, pending="sum"),)
    assert moved(found, x, w) == 0
    assert [need.work for need in found.needs] == [None, None]
    assert all(decide(torch.mm, x, w, rank=rank).is_one_call for rank in RANKS)


def test_a_mesh_of_rows_and_columns_gives_a_grid() -> None:
    x = layout("grid([2, 1], ranks=[[0, 1], [2, 3]])", X)
    w = layout("grid([1, 2], ranks=[[0, 2], [1, 3]])", W)
    found = decide(torch.mm, x, w)
    assert found.outputs == (layout("grid([2, 2])", (M, N)),)
    assert moved(found, x, w) == 0


def test_a_mesh_of_rows_and_sums_gives_rows_with_two_terms() -> None:
    x = layout("grid([2, 2])", X)
    w = layout("grid([2, 1], ranks=[[0, 2], [1, 3]])", W)
    (out,) = decide(torch.mm, x, w).outputs
    half = Box((0, 0), (M // 2, N)), Box((M // 2, 0), (M, N))
    assert out == Layout(
        (M, N), [half[0], half[0], half[1], half[1]], RANKS, terms=[0, 1, 0, 1], pending="sum"
    )


def test_what_all_have_is_computed_by_all_and_is_nobodys_own_work() -> None:
    found = decide(torch.mm, everywhere(X), everywhere(W))
    assert found.outputs == (everywhere((M, N)),)
    assert [need.work for need in found.needs] == [None, None]


def test_ranges_that_one_rank_holds_are_summed_there() -> None:
    x = layout("chunk(1, ranks=[0, 0, 0])", X)
    w = layout("chunk(0, ranks=[0, 0, 0])", W)
    found = decide(torch.mm, x, w)
    assert found.outputs == (layout("on_rank(0)", (M, N)),)
    full = torch.randn(X), torch.randn(W)
    pieces = [full[0].chunk(3, 1), full[1].chunk(3, 0)]
    (made,) = found.kernel(pieces, torch.mm)
    torch.testing.assert_close(made[0], full[0] @ full[1])
    assert not found.is_one_call


def test_replicas_that_differ_in_part_leave_each_block_to_its_lowest_rank() -> None:
    x = everywhere(X)
    halves = Box((0, 0), (K, 2)), Box((0, 2), (K, N))
    w = Layout(W, [halves[0], halves[0], halves[1], halves[1]], [0, 1, 1, 2])
    (out,) = decide(torch.mm, x, w).outputs
    assert [(rank, box.start[1]) for box, rank, _ in out] == [(0, 0), (1, 2)]


def test_an_output_is_cut_where_terms_overlap_in_part() -> None:
    """Above, the sum is cut for all rows alike; below, for each half of them by itself."""
    boxes = [Box((0, 0), (4, 6)), Box((0, 6), (2, 12)), Box((2, 6), (4, 12)), Box((4, 0), (8, 12))]
    x = Layout(X, boxes, RANKS)
    found = decide(torch.mm, x, everywhere(W))
    (out,) = found.outputs
    assert moved(found, x, everywhere(W)) == 0
    rows = [(box.start[0], box.stop[0], rank, term) for box, rank, term in out]
    assert rows == [(0, 2, 0, 0), (0, 2, 1, 1), (2, 4, 0, 0), (2, 4, 2, 1), (4, 8, 3, 0)]


def test_a_rank_with_an_empty_piece_has_an_empty_piece_of_the_output() -> None:
    x, w = layout("chunk(0)", (5, K)), everywhere(W)
    found = decide(torch.mm, x, w, rank=3)
    assert x.boxes_of(3)[0].is_empty
    assert found.outputs == (layout("chunk(0)", (5, N)),)
    assert found.is_one_call


def test_batch_dims_of_size_one_are_broadcast() -> None:
    x, w = layout("chunk(1)", (1, 4, M, K)), everywhere((3, 1, K, N))
    found = decide(torch.matmul, x, w)
    assert found.outputs == (layout("chunk(1)", (3, 4, M, N)),)
    assert moved(found, x, w) == 0


def test_a_number_is_brought_to_all_ranks() -> None:
    v = layout("chunk(0)", (M,))
    found = decide(torch.dot, v, v)
    assert found.outputs[0].pending == "sum"
    assert found.finish == (everywhere(()),)


def test_a_diagonal_is_taken_where_it_is() -> None:
    x = layout("grid([2, 2])", (M, M))
    found = einsum("ii->i", x)
    assert moved(found, x) == 0
    assert set(found.outputs[0].ranks) == {0, 3}


def test_a_product_without_elements_moves_nothing() -> None:
    x, w = layout("chunk(0)", (0, K)), layout("on_rank(2)", W)
    found = decide(torch.mm, x, w)
    assert moved(found, x, w) == 0
    assert found.outputs == (everywhere((0, N)),)


# -- addends ---------------------------------------------------------------------------------------


def test_a_bias_is_added_to_the_lowest_term_only() -> None:
    x, w, b = layout("chunk(1)", X), layout("chunk(1)", (N, K)), everywhere((N,))
    found = decide(F.linear, x, w, b)
    assert moved(found, x, w, b) == 0
    assert found.needs[2] == (b, None)  # all ranks have it, and so its gradient
    assert found.is_one_call
    assert not decide(F.linear, x, w, b, rank=1).is_one_call
    b = layout("on_rank(0)", (N,))
    found = decide(F.linear, x, w, b)
    assert moved(found, x, w, b) == 0
    assert found.needs[2] == (b, None)


def test_a_bias_where_it_is_needed_goes_to_the_function_itself() -> None:
    x, w, b = everywhere(X), layout("chunk(0)", (N, K)), layout("chunk(0)", (N,))
    found = decide(F.linear, x, w, b)
    assert found.is_one_call
    assert found.needs[2].layout == b
    assert found.needs[2].work is None


def test_an_addend_that_is_cut_otherwise_is_moved() -> None:
    x, w, c = layout("chunk(0)", X), everywhere(W), layout("chunk(1)", (M, N))
    found = decide(torch.addmm, c, x, w)
    assert found.needs[0].layout == layout("chunk(0)", (M, N))
    assert found.outputs == (layout("chunk(0)", (M, N)),)


# -- what moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(64, 4), (4, 64)])
def test_the_smaller_operand_follows_if_owners_do_not_meet(rows: int, columns: int) -> None:
    x, w = layout("chunk(0)", (rows, K)), layout("chunk(1)", (K, columns))
    found = decide(torch.mm, x, w)
    assert moved(found, x, w) == min(rows, columns) * K * ITEMSIZE * (WORLD_SIZE - 1)
    stays = "chunk(0)" if rows > columns else "chunk(1)"
    assert found.outputs == (layout(stays, (rows, columns)),)


def test_a_weight_on_one_rank_goes_where_the_rows_are() -> None:
    x, w = layout("chunk(0)", (64, K)), layout("on_rank(3)", W)
    found = decide(torch.mm, x, w)
    assert found.needs[1].layout == everywhere(W)
    assert moved(found, x, w) == 3 * K * N * ITEMSIZE


def test_a_pending_operand_is_reduced_to_where_the_other_is() -> None:
    x, w = layout("partial()", X), layout("chunk(0)", W)
    found = decide(torch.mm, x, w)
    assert found.needs[0].layout == layout("chunk(1)", X)
    assert found.outputs[0].pending == "sum"
    assert moved(found, x, w) == M * K * ITEMSIZE * (WORLD_SIZE - 1)  # each part goes to its owner


def test_a_pending_operand_is_reduced_in_place_where_it_meets_the_other() -> None:
    x, w = layout("partial()", X), layout("chunk(1)", W)
    found = decide(torch.mm, x, w)
    assert found.needs[0].layout == everywhere(X)
    assert found.outputs == (layout("chunk(1)", (M, N)),)


def test_a_plain_operand_is_taken_where_the_other_is() -> None:
    x, w = everywhere(X), layout("grid([2, 2])", W)
    found = decide(torch.mm, x, w, plain=[0])
    assert moved(found, x, w) == 0


def _settled(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    return layouts(shape=shape, world_size=WORLD_SIZE, addends=False, max_boxes=6)


@given(_settled((5, 6)), _settled((6, 3)))
def test_no_more_moves_than_for_the_better_of_two_that_follow(x: Layout, w: Layout) -> None:
    """By gathering one operand whole on all ranks of the other, which is never better."""
    found = decide(torch.mm, x, w)
    w_to_x = Layout(w.shape, [Box.whole(w.shape)] * len(x.ranks), x.ranks)
    x_to_w = Layout(x.shape, [Box.whole(x.shape)] * len(w.ranks), w.ranks)
    most = min(
        plan_reshard(w, w_to_x, ITEMSIZE).total_bytes,
        plan_reshard(x, x_to_w, ITEMSIZE).total_bytes,
    )
    assert moved(found, x, w) <= most


@given(_settled((5, 6)), _settled((6, 3)))
def test_nothing_moves_if_every_pair_that_is_multiplied_has_a_rank(x: Layout, w: Layout) -> None:
    def owners(of: Layout, row: int, column: int) -> set[int]:
        return {rank for box, rank, _ in of if (row, column) in box}

    meet = all(
        owners(x, i, k) & owners(w, k, j)
        for i, k, j in itertools.product(range(5), range(6), range(3))
    )
    found = decide(torch.mm, x, w)
    assert moved(found, x, w) == 0 or not meet
    if not meet:
        assert [need.layout for need in found.needs] != [x, w]


@given(_settled((5, 6)), _settled((6, 3)), _settled((3,)))
def test_all_ranks_decide_alike(x: Layout, w: Layout, c: Layout) -> None:
    found = [decide(torch.addmm, c, x, w, rank=rank) for rank in RANKS]
    assert len({one.outputs for one in found}) == 1
    assert len({one.needs for one in found}) == 1


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, ((2, 3), (4, 2))),
        (torch.mm, ((2, 3), (3,))),
        (torch.matmul, ((2, 3), (1, 4))),
        (torch.matmul, ((2, 3, 4), (3, 4, 5))),
        (torch.bmm, ((2, 3, 4), (1, 4, 5))),
        (F.linear, ((2, 3), (4, 2))),
        (F.linear, ((2, 3), (4, 3), (3,))),
        (torch.dot, ((3,), (1,))),
    ],
)
def test_shapes_that_do_not_fit_are_named(function: Any, shapes: Any) -> None:
    with pytest.raises(OpError, match="got") as caught:
        decide(function, *map(everywhere, shapes))
    assert all(str(shape) in str(caught.value) for shape in shapes)


@pytest.mark.parametrize("equation", ["ij", "ij,jk->iz", "ij,jk->ii", "i,jk", "ij,jk,k", "ij,j1"])
def test_equations_that_do_not_fit_are_named(equation: str) -> None:
    with pytest.raises(OpError, match=equation):
        einsum(equation, everywhere((2, 3)), everywhere((3, 4)))


# -- random layouts --------------------------------------------------------------------------------


def _summable(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Layouts of which full gradients are known: an average would have them divided."""

    def as_sum(one: Layout) -> Layout:
        if one.pending is None:
            return one
        return Layout(one.shape, one.boxes, one.owners, terms=one.terms, pending="sum")

    return layouts(shape=shape, world_size=WORLD_SIZE, max_boxes=6).map(as_sum)


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, list[Layout]]:
    """Equations of one to three operands, labels that stand twice included."""
    letters = "abcd"[: draw(st.integers(1, 4))]
    size = {letter: draw(st.integers(1, 5)) for letter in letters}
    operand = st.lists(st.sampled_from(letters), max_size=3).map("".join)
    inputs = draw(st.lists(operand, min_size=1, max_size=3))
    used = sorted(set("".join(inputs)))
    output = "".join(draw(st.lists(st.sampled_from(used), unique=True))) if used else ""
    shapes = [tuple(size[letter] for letter in one) for one in inputs]
    return f"{','.join(inputs)}->{output}", [draw(_summable(shape)) for shape in shapes]


@given(einsums())
def test_einsum_on_random_layouts(case: tuple[str, list[Layout]]) -> None:
    equation, held = case
    shapes = tuple(one.shape for one in held)
    check_op(Sample(lambda *operands: torch.einsum(equation, *operands), shapes), held)


def test_an_empty_box_along_a_dim_that_is_broadcast() -> None:
    batches = Layout(
        (2, 1, 1, 1), [Box((0, 0, 0, 0), (0, 0, 1, 1)), Box.whole((2, 1, 1, 1))], [0, 0]
    )
    other = Layout((2, 1, 1), [Box.whole((2, 1, 1))], [0])
    check_op(Sample(torch.matmul, ((2, 1, 1, 1), (2, 1, 1))), [batches, other], world_size=2)


CALLS: list[tuple[Callable[..., torch.Tensor], str]] = [
    (F.linear, "mk nk n"),
    (F.linear, "bmk nk n"),
    (torch.addmm, "mn mk kn"),
    (lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2), "1n mk kn"),
    (torch.baddbmm, "m1 bmk bkn"),
    (torch.addbmm, "mn bmk bkn"),
    (torch.matmul, "b1mk bkn"),
    (torch.matmul, "k bkn"),
    (torch.addmv, "m mk k"),
]


@st.composite
def products(draw: st.DrawFn) -> tuple[Callable[..., torch.Tensor], list[Layout], set[int]]:
    """Calls on sharded tensors, of which one operand may be plain."""
    call, dims = draw(st.sampled_from(CALLS))
    size = {"1": 1} | {name: draw(st.integers(1, 5) | st.integers(0, 5)) for name in "bmkn"}
    shapes = [tuple(size[name] for name in one) for one in dims.split()]
    plain = draw(st.sets(st.integers(0, len(shapes) - 1), max_size=1))
    return call, [draw(_summable(shape)) for shape in shapes], plain


@given(products())
def test_products_on_random_layouts(
    case: tuple[Callable[..., torch.Tensor], list[Layout], set[int]],
) -> None:
    call, held, plain = case
    check_op(Sample(call, tuple(one.shape for one in held)), held, plain=plain)


# -- beyond one gradient ---------------------------------------------------------------------------


def distributed(full: torch.Tensor, spec: str) -> torch.Tensor:
    made: torch.Tensor = shardwise.distribute(full, parse_spec(spec, ranks=RANKS, device="cpu"))
    return made.requires_grad_(full.requires_grad)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor


def check_gradients(
    loss: Callable[..., torch.Tensor], shapes: Sequence[tuple[int, ...]], specs: Sequence[str]
) -> None:
    """Those of a loss of full and of sharded leaves are the same."""
    full = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    loss(*full).backward()

    def on_rank(rank: int) -> None:
        given = [distributed(one.detach().requires_grad_(), spec) for one, spec in cases]
        with shardwise.implicit_comm("allow"):
            loss(*given).backward()
        for one, other in zip(given, full, strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad)

    cases = list(zip(full, specs, strict=True))
    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize(
    "specs",
    [
        ("chunk(1)", "chunk(1)", "replicate()"),
        ("chunk(0)", "replicate()", "replicate()"),
        ("chunk(0)", "chunk(1)", "chunk(0)"),
        ("replicate()", "chunk(0)", "chunk(0)"),
        ("partial()", "chunk(1)", "on_rank(2)"),
    ],
)
def test_third_derivatives_are_those_of_full_tensors(specs: tuple[str, ...]) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = whole(F.linear(x, w, b))
        (first,) = torch.autograd.grad((out**4).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad((whole(first) ** 2).sum(), x, create_graph=True)
        return (whole(second) ** 2).sum()

    check_gradients(loss, [(4, 6), (5, 6), (5,)], specs)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(
    "specs",
    [
        ("chunk(1)", "chunk(1)", "replicate()"),
        ("partial()", "chunk(1)", "replicate()"),
        ("chunk(1)", "chunk(1)", "on_rank(0)"),
    ],
)
def test_the_gradient_of_a_bias_has_gradients(specs: tuple[str, ...], order: int) -> None:
    """All ranks with a term of the sum have the gradient of the bias; one of them hands on."""

    def loss(*given: torch.Tensor) -> torch.Tensor:
        found = (whole(F.linear(*given)) ** 4).sum() / 1000
        for _ in range(order - 1):
            grads = torch.autograd.grad(found, given, create_graph=True)
            found = torch.stack([(whole(grad) ** 2).sum() for grad in grads]).sum()
        return found

    check_gradients(loss, [(4, 6), (5, 6), (5,)], specs)


def test_a_given_gradient_of_a_pending_sum_has_a_gradient() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(x @ w, x, v, create_graph=True)
        return (whole(grad) ** 3).sum()

    def all_used(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return loss(x, w, v) + (whole(x) ** 2).sum()

    check_gradients(all_used, [(4, 6), (6, 5), (4, 5)], ["chunk(1)", "chunk(0)", "replicate()"])


def test_autocast_has_its_way() -> None:
    def on_rank(rank: int) -> None:
        x, w = distributed(torch.ones(4, 6), "chunk(1)"), distributed(torch.ones(5, 6), "chunk(1)")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.linear(x, w)
        assert out.dtype == torch.bfloat16
        assert torch.equal(whole(out), torch.full((4, 5), 6, dtype=torch.bfloat16))

    simulate(on_rank, WORLD_SIZE)
