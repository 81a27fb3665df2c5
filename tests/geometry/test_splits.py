from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.geometry import (
    block_cuts,
    even_cuts,
    flat_range_boxes,
    sized_cuts,
    weighted_sizes,
)
from shardwise.geometry.splits import even_piece, product_boxes
from shardwise.testing.strategies import shapes, split_sizes

if TYPE_CHECKING:
    from collections.abc import Callable


@given(st.integers(0, 40), st.integers(1, 12))
def test_even_cuts_are_those_of_torch_chunk(size: int, parts: int) -> None:
    lengths = np.diff(even_cuts(size, parts)).tolist()
    expected = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    assert lengths == expected + [0] * (parts - len(expected))


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_an_even_piece_is_that_of_the_cuts(size: int, parts: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, parts - 1))
    assert (
        list(even_piece(size, parts, index)) == even_cuts(size, parts)[index : index + 2].tolist()
    )


def test_even_cuts_of_the_largest_dim_do_not_wrap_around() -> None:
    cuts = even_cuts(2**63 - 1, 10)
    assert (np.diff(cuts) >= 0).all()
    assert cuts[-1] == 2**63 - 1


@given(st.integers(0, 30).flatmap(lambda size: split_sizes(size, 4)))
def test_sized_cuts_give_the_chosen_lengths(sizes: list[int]) -> None:
    cuts = sized_cuts(sum(sizes), sizes)
    assert np.diff(cuts).tolist() == sizes
    assert cuts[0] == 0


@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3),
)
def test_weighted_sizes_are_the_exact_shares_rounded(size: int, weights: list[float]) -> None:
    sizes = weighted_sizes(size, weights)
    assert sum(sizes) == size
    for length, weight in zip(sizes, weights, strict=True):
        assert abs(length - size * weight / sum(weights)) < 1 + 1e-6


def test_weighted_sizes_of_vast_dims_lose_no_element() -> None:
    assert sum(weighted_sizes(2**60 + 1, [1, 1, 1])) == 2**60 + 1


def test_equal_weights_differ_by_at_most_one_and_the_first_are_longer() -> None:
    assert weighted_sizes(11, [1, 1, 1]) == (4, 4, 3)


@given(st.integers(0, 40), st.integers(1, 9))
def test_block_cuts_are_blocks_and_a_rest(size: int, block: int) -> None:
    lengths = np.diff(block_cuts(size, block)).tolist()
    assert sum(lengths) == size
    assert all(length == block for length in lengths[:-1])
    assert len(lengths) == math.ceil(size / block)


@given(st.data())
def test_a_flat_range_is_its_boxes_in_order_and_they_are_few(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_size=5))
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    full = np.arange(numel).reshape(shape)
    found = flat_range_boxes(shape, start, stop)
    elements = [full[box.slices()].ravel() for box in found]
    assert np.concatenate([*elements, []]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_the_most_boxes_of_a_flat_range_are_reached() -> None:
    assert len(flat_range_boxes((4, 4, 4), 1, 63)) == 5


def test_product_boxes_of_no_dims_is_the_0d_box() -> None:
    starts, stops = product_boxes([])
    assert starts.shape == stops.shape == (1, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: even_cuts(4, 0), "number of parts: expected a whole number >= 1, got 0"),
        (lambda: sized_cuts(8, [4, 3]), "add up to 8, got .4, 3., together 7"),
        (lambda: sized_cuts(8, [9, -1]), "sizes: expected numbers >= 0"),
        (lambda: sized_cuts(8, [4.5, 3.5]), "whole numbers"),  # type: ignore[list-item]  # wrong on purpose
        (lambda: weighted_sizes(4, [0, 0]), "at least one above 0"),
        (lambda: weighted_sizes(4, [1, -1]), "numbers >= 0"),
        (lambda: weighted_sizes(4, [math.nan]), "numbers >= 0"),
        (lambda: weighted_sizes(-5, [1, 1]), "size: expected a whole number >= 0, got -5"),
        (lambda: block_cuts(4, 0), "block: expected a whole number >= 1, got 0"),
        (lambda: flat_range_boxes((2, 2), 3, 5), "0 <= start <= stop <= 4"),
        (lambda: flat_range_boxes((4,), 1.5, 2), "start: expected a whole number"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: even_cuts(-4, 2), "size: expected a whole number >= 0"),
        (lambda: even_cuts(5.5, 2), "size: expected a whole number"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: weighted_sizes(5, ["a"]), "weights: expected numbers"),  # type: ignore[list-item]  # wrong on purpose
        (lambda: sized_cuts(8, {5: 0, 3: 1}), "sizes: expected a list"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_impossible_splits_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ShardwiseError, match=message):
        call()
