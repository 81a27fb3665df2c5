"""What functions that join or rearrange decide, what they never share, and their graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.ops.deciding import RANKS, decide, layout, moved, pending
from tests.ops.parameters import sharded
from torch.nn import functional as F

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.ops.rearranging import roll
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds


def _ones(spec: str) -> Any:
    return shardwise.sharded_tensor.ones(parse_spec(spec, ranks=RANKS, device="cpu"), 8, 4)


def on_ranks(run: Any) -> list[Any]:
    return list(simulate(run, 4).results)


def test_a_cat_along_a_whole_dim_is_cut_as_its_operands_are() -> None:
    narrow, wide = layout("chunk(0)", (8, 3)), layout("chunk(0)", (8, 5))
    found = decide(torch.cat, [narrow, wide, narrow], 1)
    assert found.outputs == (layout("chunk(0)", (8, 11)),)
    assert moved(found, narrow, wide, narrow) == 0
    few = layout("chunk(0)", (3, 3))  # rank 3 has an empty box of it
    assert decide(torch.cat, [few, few], 1).outputs == (layout("chunk(0)", (3, 6)),)


def test_a_cat_along_a_cut_dim_leaves_every_piece_where_it_is() -> None:
    rows, columns = layout("chunk(0)", (4, 4)), layout("chunk(1)", (2, 4))
    (output,) = decide(torch.cat, [rows, columns]).outputs
    assert output.boxes_of(1) == (Box((1, 0), (2, 4)), Box((4, 1), (6, 2)))
    (alone,) = decide(torch.cat, [layout("on_rank(2)", (3, 2))] * 2).outputs
    assert alone == layout("on_rank(2)", (6, 2))  # one piece


@pytest.mark.parametrize("plain", [(), (0,)])
def test_what_is_whole_everywhere_is_cut_like_its_neighbour(plain: tuple[int, ...]) -> None:
    everywhere, rows = layout("replicate()", (8, 2)), layout("chunk(0)", (8, 3))
    found = decide(torch.cat, [everywhere, rows], 1, plain=plain)
    assert found.outputs == (layout("chunk(0)", (8, 5)),)
    assert found.needs[0].layout == layout("chunk(0)", (8, 2))
    # Along the cut dim there is nothing to follow.
    other = decide(torch.cat, [layout("replicate()", (2, 3)), rows]).outputs[0]
    assert other.replicas_of(Box((0, 0), (2, 3))) == RANKS
    stacked = decide(torch.stack, [rows, layout("replicate()", (8, 3))])
    assert stacked.outputs == (layout("chunk(1)", (2, 8, 3)),)


def test_a_plain_tensor_goes_where_the_sharded_one_is() -> None:
    here = layout("on_rank(1)", (2, 3))
    found = decide(torch.cat, [here, layout("replicate()", (4, 3))], plain=(1,))
    assert found.outputs == (layout("on_rank(1)", (6, 3)),)


def test_replicated_numbers_stack_without_communication() -> None:
    number = layout("replicate()", ())
    found = decide(torch.stack, [number] * 3)
    assert found.outputs == (layout("replicate()", (3,)),)
    assert all(need.work is None and need.layout == number for need in found.needs)


def test_what_is_pending_stays_pending_beside_what_is_not() -> None:
    sums, rows = pending((4, 3)), layout("chunk(0)", (4, 3))
    (output,) = decide(torch.cat, [sums, rows]).outputs
    assert output.pending == "sum"
    assert output.replicas_of(Box((0, 0), (4, 3)), term=2) == (2,)
    assert output.replicas_of(Box((4, 0), (5, 3))) == (0,)
    assert decide(torch.cat, [sums, sums], 1).outputs == (pending((4, 6)),)


def test_what_is_pending_is_reduced_where_its_kinds_differ_or_it_is_cast_from_integers() -> None:
    sums = pending((4, 3))
    mean = Layout((4, 3), sums.boxes, sums.owners, terms=sums.terms, pending="avg")
    assert decide(torch.cat, [sums, mean]).outputs[0].pending is None
    kinds = (torch.int32, torch.float32)
    assert decide(torch.cat, [sums, sums], dtypes=kinds).needs[0].layout == sums.bar
    assert decide(torch.cat, [sums, sums], dtypes=(torch.int32,) * 2).outputs[0].pending == "sum"
    assert decide(F.pad, sums, (1, 0)).outputs[0].pending == "sum"
    assert decide(F.pad, sums, (1, 0), "constant", 1.0).outputs[0].pending is None


def test_boxes_at_the_border_get_the_padding() -> None:
    rows = layout("chunk(0)", (8, 3))
    (output,) = decide(F.pad, rows, (1, 1, 2, 3)).outputs
    ends = [(box.start[0], box.stop[0]) for box in output.boxes]
    assert ends == [(0, 4), (4, 6), (6, 8), (8, 13)]
    assert output.is_whole(1)
    few = layout("chunk(0)", (3, 3))  # the empty box at its end is not the border
    (output,) = decide(F.pad, few, (0, 0, 0, 2)).outputs
    assert output.boxes_of(2) == (Box((2, 0), (5, 3)),)
    assert not output.boxes_of(3)[0].volume


def test_boxes_that_are_whole_along_what_changes_stay_one_call() -> None:
    rows = layout("chunk(0)", (8, 3))
    for found in (
        decide(torch.Tensor.repeat, rows, 1, 2),
        decide(roll, rows, 1, 1),
        decide(torch.flip, rows, [0]),
        decide(F.pad, layout("chunk(0)", (4, 3, 5)), (2, 2), "reflect"),
    ):
        assert found.is_one_call
        assert len(found.outputs[0]) == 4
    (rolled,) = decide(roll, rows, 1, 0).outputs  # every box is one piece, the last two
    assert [len(rolled.boxes_of(rank)) for rank in RANKS] == [1, 1, 1, 2]


def test_results_are_memory_of_their_own() -> None:
    def run(rank: int) -> None:
        x = _ones("chunk(0)")
        results = [
            torch.cat([x]),
            torch.cat([x, x]),
            torch.stack([x]),
            x.roll(3, 0),
            x.repeat(1, 1),
            x.repeat(2, 1),
            F.pad(x, (0, 0)),
            x.rot90(0),
            x.tril(5),
            x.diag(),
            torch.slice_scatter(x, torch.ones(0, 4), 0, 3, 3),
        ]
        for result in results:
            result.zero_()
        assert x.sum().item() == 32

    on_ranks(run)


def test_every_rank_raises_what_torch_raises() -> None:
    def run(rank: int) -> None:
        x = _ones("on_rank(1)")
        with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 0"):
            torch.cat([x, x.repeat(1, 2)])
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            x.sum(0).tril_()
        with pytest.raises(RuntimeError, match="can not be smaller than number of dimensions"):
            x.repeat(2)
        with pytest.raises(RuntimeError, match="adding size should be less than"):
            F.pad(x, (4, 4), mode="reflect")

    on_ranks(run)


def test_plain_tensors_in_lists_are_asked_about() -> None:
    def run(rank: int) -> None:
        x = _ones("chunk(0)")
        with shardwise.plain_inputs("error"), pytest.raises(OpError, match="and a plain tensor"):
            torch.cat([x, torch.ones(2, 4)])

    on_ranks(run)


TWICE: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "cat": (lambda x, y: torch.cat([x, y]), ((4,), (2,))),
    "cat of nothing": (lambda x, y: torch.cat([x, y * y]), ((4,), (0,))),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), ((4, 3), (2, 3))),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 0, 1), ((4,), ())),
    "roll": (lambda x, y: x.roll(2) * y, ((5,), ())),
}


@pytest.mark.parametrize("name", TWICE)
def test_pieces_without_elements_answer_in_backward_of_backward(name: str) -> None:
    call, shapes = TWICE[name]

    def second(*given: Any) -> list[torch.Tensor]:
        found = whole(call(*given))
        weights = torch.arange(1.0, 1.0 + found.numel(), dtype=found.dtype).view(found.shape)
        grads = torch.autograd.grad(((found * weights) ** 3).sum(), given, create_graph=True)
        loss = torch.stack([(whole(grad) ** 2).sum() for grad in grads]).sum()
        again = torch.autograd.grad(loss, given)
        return [whole(one) for one in again]

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor

    full = Sample(call, shapes).tensors()
    expected = second(*[one.clone().requires_grad_() for one in full])
    kinds = [layout_kinds(shape, world_size=3).values() for shape in shapes]

    def run(rank: int) -> None:
        for held in itertools.product(*kinds):
            pairs = zip(full, held, strict=True)
            given = [sharded(one, cut, requires_grad=True) for one, cut in pairs]
            with shardwise.implicit_comm("allow"):
                torch.testing.assert_close(second(*given), expected)

    simulate(run, 3)


def test_pieces_that_a_view_leaves_out_answer_in_backward() -> None:
    """Rank 0 has a piece of each operand, and goes on with that of the first only."""
    whole = Layout((2, 2), [Box.whole((2, 2))], [0])
    top, bottom = Box((0, 0), (1, 2)), Box((1, 0), (2, 2))

    def call(a: Any, b: Any) -> Any:
        if isinstance(b, shardwise.ShardedTensor):
            b = shardwise.reshard(b, Layout((2, 2), [top, bottom], [1, 0]))
        return torch.cat([a, b * 1])[:2] * 2

    layouts = [whole, Layout((2, 2), [top, bottom], [0, 1])]
    check_op(Sample(call, ((2, 2), (2, 2))), layouts, world_size=2)
