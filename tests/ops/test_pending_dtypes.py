"""Pending sums of integers and booleans, of which the terms say less than the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import wrap

if TYPE_CHECKING:
    from collections.abc import Callable


def pending(*terms: torch.Tensor, op: Any = "sum") -> Any:
    """A pending reduction of one term per rank."""
    shape, ranks = tuple(terms[0].shape), range(len(terms))
    layout = Layout(shape, [Box.whole(shape)] * len(terms), ranks, terms=ranks, pending=op)
    members = communicator()
    return wrap(make_state(layout, [terms[members.rank].clone()], group=members))


OR = (torch.tensor([True, True, False]), torch.tensor([True, False, False]))
WRAPPING = (torch.tensor([100, 1], dtype=torch.int8), torch.tensor([100, 2], dtype=torch.int8))
HALVES = (torch.tensor([0.5, 1.0, 0.6]), torch.tensor([0.5, -1.0, 0.6]))
REAL = torch.tensor([1.5, 2.5, 3.5])


@pytest.mark.parametrize(
    ("terms", "call"),
    [
        (OR, lambda p: p * 2),
        (OR, lambda p: p / 2),
        (OR, lambda p: p + torch.tensor([1, 2, 3])),
        (OR, lambda p: p.int()),
        (OR, lambda p: p.sum(0)),
        (WRAPPING, lambda p: p * 1.0),
        (WRAPPING, lambda p: p / 1),
        (WRAPPING, lambda p: p * torch.tensor([3, 4], dtype=torch.int16)),
        (WRAPPING, lambda p: p.to(torch.int32)),
        (WRAPPING, lambda p: p.float()),
        (HALVES, lambda p: p.int()),
        (HALVES, lambda p: p.bool()),
        (HALVES, lambda p: p.type(torch.int64)),
        (HALVES, lambda p: p.double() * 3),
        (HALVES, lambda p: p.sum(0, dtype=torch.int64)),
    ],
)
def test_the_sum_comes_first_where_it_matters(
    terms: tuple[torch.Tensor, ...], call: Callable[[Any], Any]
) -> None:
    full = terms[0] + terms[1]

    def on_rank(_: int) -> None:
        found, expected = call(pending(*terms)), call(full)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.full_tensor(), expected)

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


def test_two_pending_sums_of_which_one_is_of_booleans() -> None:
    def on_rank(_: int) -> None:
        found = pending(REAL, REAL) + pending(*OR)
        torch.testing.assert_close(found.full_tensor(), 2 * REAL + (OR[0] | OR[1]))

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_complex_product_has_another_real_part_than_its_factors() -> None:
    factor = torch.tensor([1 + 1j])

    def on_rank(_: int) -> None:
        found = pending(factor, factor, op="product").to(torch.float32)
        torch.testing.assert_close(found.full_tensor(), torch.tensor([0.0]))

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


def test_conversions_of_a_pending_sum_that_send_say_so() -> None:
    def on_rank(_: int) -> None:
        sum_of_floats = pending(*HALVES)
        with shardwise.implicit_comm("error"):
            assert sum_of_floats.double().shard_layout.pending == "sum"
            with pytest.raises(OpError, match=r"torch\.Tensor\.to moves"):
                sum_of_floats.int()

    simulate(on_rank, 2)
