"""What functions of elements decide, without processes, and what ranks without elements do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.deciding import ITEMSIZE, RANKS, decide, layout, moved, pending

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.testing import Sample, check_op

if TYPE_CHECKING:
    from collections.abc import Callable


def test_operands_come_together_on_the_cheaper_side() -> None:
    rows, near = layout("chunk(0)", (8, 8)), layout("chunk(0, sizes=[2, 2, 3, 1])", (8, 8))
    everywhere = layout("replicate()", (8, 8))
    for pair in ((rows, near), (near, rows)):
        found = decide(torch.add, *pair)
        assert found.outputs == (pair[0],)  # both ways cost the same: the first stays
        assert moved(found, *pair) == 8 * ITEMSIZE
    for pair in ((rows, everywhere), (everywhere, rows)):
        found = decide(torch.maximum, *pair)
        assert found.outputs == (rows,)  # which sends nothing; the other way gathers
        assert moved(found, *pair) == 0
        assert all(need.work is None for need in found.needs)
    small = layout("on_rank(3)", (8, 8))
    two = decide(torch.where, rows, rows, small)
    assert two.outputs == (rows,)  # one tensor goes to the other two


def test_an_operand_that_is_broadcast_enters_the_work_of_each_rank() -> None:
    x, bias = layout("chunk(0)", (8, 6)), layout("replicate()", (6,))
    found = decide(torch.add, x, bias)
    assert found.outputs == (x,)
    assert moved(found, x, bias) == 0
    need = found.needs[1]
    assert need.layout == bias
    assert need.work is not None
    assert need.work.terms is not None
    assert sorted(need.work.terms.tolist()) == [0, 1, 2, 3]
    columns = layout("chunk(1, sizes=[2, 2, 2, 0])", (8, 6))
    assert decide(torch.add, columns, layout("chunk(0, sizes=[2, 2, 2, 0])", (6,))).is_one_call


def test_replicas_that_do_the_same_work_are_counted_once() -> None:
    x = Layout((4, 6), [Box((0, 0), (2, 6))] * 2 + [Box((2, 0), (4, 6))] * 2, RANKS)
    need = decide(torch.mul, x, layout("replicate()", (6,))).needs[1]
    assert need.work is not None
    assert need.work.terms_of(0) == need.work.terms_of(1) != need.work.terms_of(2)


def test_linear_functions_keep_a_pending_sum_and_others_reduce_it() -> None:
    p, everywhere = pending((4, 6)), layout("replicate()", (4, 6))
    kept: list[Any] = [(torch.neg, p), (torch.mul, p, 2.0), (torch.add, p, p), (torch.div, p, 3)]
    for call in kept:
        found = decide(*call)
        assert found.outputs == (p,)
        assert found.is_one_call
    assert decide(torch.add, p, everywhere).needs[1].layout == p  # one term gets it, no more
    factor = decide(torch.mul, p, everywhere).needs[1]
    assert factor.layout == everywhere
    assert factor.work is not None  # each term has its own part of the factor's gradient
    reduced: list[Any] = [(torch.tanh, p), (torch.mul, p, p), (torch.add, p, 1)]
    for call in [*reduced, (torch.div, everywhere, p)]:
        assert decide(*call).outputs == (everywhere,)
    assert decide(torch.add, p, layout("chunk(0)", (4, 6))).outputs == (p,)
    rows = layout("chunk(0)", (4, 6))
    assert decide(torch.maximum, p, rows).outputs == (rows,)  # reduced where the other is


def test_a_pending_sum_that_is_broadcast_adds_to_one_with_terms_in_the_same_places() -> None:
    full, row = pending((5, 4, 6)), pending((4, 6))
    sample = Sample(torch.add, ((5, 4, 6), (4, 6)))
    for call, terms in ((sample, [full, row]), (Sample(torch.sub, sample.shapes), [full, row])):
        found = decide(call.call, *terms)
        assert found.outputs == (full,)
        assert found.is_one_call
        assert moved(found, *terms) == 0
        check_op(call, terms, world_size=4)
    assert decide(torch.add, row, full).outputs == (full,)
    swapped = Layout((4, 6), [Box.whole((4, 6))] * 4, RANKS, terms=(1, 0, 2, 3), pending="sum")
    elsewhere = Layout((4, 6), [Box.whole((4, 6))] * 3, (0, 1, 2), terms=(0, 1, 2), pending="sum")
    for other in (swapped, elsewhere):
        assert decide(torch.add, full, other).outputs[0].pending is None
        check_op(sample, [full, other], world_size=4)
    halves = [Box((0, 0, 0), (5, 4, 2)), Box((0, 0, 2), (5, 4, 6))]
    cut = Layout((5, 4, 6), halves * 2, RANKS, terms=(0, 0, 1, 1), pending="sum")
    narrow = [Box((0, 0), (4, 2)), Box((0, 2), (4, 6))]
    other = Layout((4, 6), narrow * 2, RANKS, terms=(0, 0, 1, 1), pending="sum")
    assert decide(torch.add, cut, other, rank=3).outputs == (cut,)
    check_op(sample, [cut, other], world_size=4)


def test_in_place_the_first_operand_stays() -> None:
    x, y = layout("on_rank(0)", (8, 8)), layout("chunk(0)", (8, 8))
    found = decide(torch.Tensor.add_, x, y)
    assert found.is_in_place
    assert found.outputs == (x,)
    assert moved(found, x, y) == 6 * 8 * ITEMSIZE
    with pytest.raises(OpError, match=r"add_ in place.*shape"):
        decide(torch.Tensor.add_, layout("chunk(0)", (1, 8)), y)


def test_numbers_of_boxes_that_do_not_tile_are_brought_whole() -> None:
    """Boxes of a pinwheel, projected on one dim, overlap in part."""
    boxes = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 3)),
        Box((2, 1), (3, 3)),
        Box((1, 0), (3, 1)),
        Box((1, 1), (2, 2)),
    ]
    x, bias = Layout((3, 3), boxes, [0, 1, 2, 3, 0]), layout("replicate()", (3,))
    found = decide(torch.add, x, bias)
    assert found.outputs == (x,)
    assert found.needs[1].layout == bias
    assert not found.is_one_call


def test_empty_boxes_of_a_weight_that_loses_its_dim_stay_empty() -> None:
    number = layout("on_rank(0)", ())
    weight = Layout((1,), [Box((0,), (1,)), Box((1,), (1,))], [0, 0])
    found = decide(torch.nn.functional.prelu, number, weight)
    assert found.outputs == (number,)
    assert moved(found, number, weight) == 0


DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "%": lambda a, b: a % b,
    "//": lambda a, b: a // b,
    "fmod": torch.fmod,
    "div, trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div, floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "a number by it": lambda a, b: 7 // b,
    "in place": lambda a, b: (a * 1).floor_divide_(b),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_ranks_without_the_numbers_divide_whole_numbers_too(name: str) -> None:
    call, numbers = DIVISIONS[name], (torch.tensor(17), torch.tensor(5))

    def on_rank(_: int) -> int:
        there = shardwise.on_rank(1)
        given = [shardwise.reshard(shardwise.as_replicated(one), there) for one in numbers]
        found = call(*given)
        assert found.shard_layout.ranks == (1,)
        return int(found.full_tensor())

    assert simulate(on_rank, 3).results == [int(call(*numbers))] * 3
