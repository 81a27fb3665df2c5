from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ArgumentTypeError, ArgumentValueError, GeometryError
from shardwise.geometry import Box, Boxes, overlapping_pairs
from shardwise.testing.strategies import boxes, shapes

if TYPE_CHECKING:
    from collections.abc import Callable

Any_Box: Any = Box  # for calls that are wrong on purpose


def _points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.start, box.stop)))


def _two_boxes() -> st.SearchStrategy[tuple[Box, Box]]:
    return shapes(max_size=5).flatmap(lambda shape: st.tuples(boxes(shape), boxes(shape)))


@given(_two_boxes())
def test_intersection_holds_the_common_points(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a & b
    assert (set() if common is None else _points(common)) == _points(a) & _points(b)


@given(_two_boxes())
def test_containment_is_that_of_the_points(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.contains(b) == (_points(b) <= _points(a))
    assert all((point in a) == (point in _points(a)) for point in _points(b))


@given(_two_boxes())
def test_volume_counts_the_points(pair: tuple[Box, Box]) -> None:
    assert pair[0].volume == len(_points(pair[0]))
    assert pair[0].is_empty == (not _points(pair[0]))


@given(_two_boxes())
def test_relative_coordinates_cut_the_same_elements_out_of_the_shard(pair: tuple[Box, Box]) -> None:
    origin, other = pair
    inner = origin & other
    if inner is None:
        return
    full = np.arange(np.prod(origin.stop, dtype=int)).reshape(origin.stop)
    shard = full[origin.slices()]
    assert np.array_equal(shard[inner.relative_to(origin).slices()], full[inner.slices()])
    assert inner.relative_to(origin).shift(origin.start) == inner


def test_an_empty_box_is_inside_every_box_and_has_relative_coordinates() -> None:
    origin, empty = Box((4, 4), (8, 8)), Box((2, 9), (2, 9))
    assert origin.contains(empty)
    assert empty.relative_to(origin).shape == (0, 0)


def test_the_0d_box_has_one_element_and_no_slices() -> None:
    box = Box((), ())
    assert (box.volume, box.slices(), box & box, str(box)) == (1, (), box, "[]")


def test_a_box_is_made_of_a_range_for_each_dim() -> None:
    assert Box.of([(0, 3), (1, 5)]) == Box((0, 1), (3, 5))
    assert Box.of([]) == Box((), ())


def test_a_box_along_some_dims_has_their_ranges_in_their_order() -> None:
    box = Box((0, 1, 2), (3, 5, 7))
    assert box.along([2, 0]) == Box((2, 0), (7, 3))
    assert box.along([]) == Box((), ())


def test_a_box_gets_another_range_along_a_dim_that_may_count_from_the_end() -> None:
    box = Box((0, 1, 2), (3, 5, 7))
    assert box.with_range(1, 0, 9) == box.with_range(-2, 0, 9) == Box((0, 0, 2), (3, 9, 7))
    assert box.with_range(-1, 4, 4) == Box((0, 1, 4), (3, 5, 4))
    for dim in (3, -4):
        with pytest.raises(GeometryError, match=r"dim: expected one of the 3 dims of \[0:3, 1:5"):
            box.with_range(dim, 0, 1)
    with pytest.raises(GeometryError, match="one of the 0 dims"):
        Box((), ()).with_range(0, 0, 1)


def test_boxes_are_values() -> None:
    box = Box.at((1, 2), (3, 4))
    assert box == Box((1, 2), (4, 6))
    assert hash(box) == hash(Box((1, 2), (4, 6)))
    assert pickle.loads(pickle.dumps(box)) == box
    assert box.shape == (3, 4)
    assert type(Box(tuple(np.arange(1)), tuple(np.arange(1))).stop[0]) is int


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box((0,), (1, 2)), "start and stop of one length"),
        (lambda: Box((2,), (1,)), "start <= stop"),
        (lambda: Box.at((0,), (1, 2)), "offset and shape of one length"),
        (lambda: Box((0,), (1,)) & Box((), ()), "expected 1 dims, got 0"),
        (lambda: Box((0,), (4,)).relative_to(Box((1,), (4,))), r"a box inside \[1:4\]"),
        (lambda: Boxes.of([Box((0,), (1,))], 2), "box 0: expected 2 dims, got 1"),
        (lambda: Boxes(np.array([[1]]), np.array([[0]])), "box 0: expected 0 <= start <= stop"),
        (lambda: Boxes(np.zeros(3, np.int64), np.zeros(3, np.int64)), r"one shape \(n, ndim\)"),
    ],
)
def test_impossible_boxes_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(GeometryError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Any_Box(0, 4),
        lambda: Any_Box(("0",), (4,)),
        lambda: Any_Box((False,), (True,)),
        lambda: Any_Box.whole(4),
        lambda: Any_Box.at(0, 4),
        lambda: Boxes.of([((0,), (4,))], 1),  # type: ignore[list-item]  # wrong on purpose
        lambda: Boxes(np.array([[0.5]]), np.array([[4.7]])),
        lambda: 5 in Any_Box((0,), (4,)),
    ],
)
def test_what_is_no_whole_number_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"expected (a list of )?whole numbers|a Box"):
        make()


def test_coordinates_are_not_negative() -> None:
    with pytest.raises(
        ArgumentValueError, match=r"Box.start: expected numbers >= 0, got .*\(-1,\)"
    ):
        Box((-1,), (1,))
    with pytest.raises(GeometryError, match="offset: expected 1 numbers"):
        Box((0,), (1,)).shift((1, 2))
    with pytest.raises(TypeError, match="unsupported operand"):
        Box((0,), (1,)) & 5  # type: ignore[operator]  # wrong on purpose


def test_volumes_beyond_64_bits_do_not_make_a_box_empty() -> None:
    vast = Boxes.of([Box((0, 0), (2**32, 2**32))] * 2, 2)
    assert vast.is_full.tolist() == [True, True]
    assert overlapping_pairs(vast, limit=3) == [(0, 1)]


def test_boxes_as_arrays_are_a_sequence_that_cannot_change() -> None:
    listed = [Box((0, 0), (1, 2)), Box((1, 0), (1, 2))]
    arrays = Boxes.of(listed, 2)
    assert list(arrays) == listed
    assert (len(arrays), arrays[1], arrays.volumes.tolist()) == (2, listed[1], [2, 0])
    assert list(arrays[np.array([True, False])]) == listed[:1]
    with pytest.raises(ValueError, match="read-only"):
        arrays.starts[0, 0] = 5
    assert Boxes.of([], 3).starts.shape == (0, 3)


def test_arrays_of_the_caller_are_copied() -> None:
    starts, stops = np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
    arrays = Boxes(starts, stops)
    stops[0, 0] = 7
    assert arrays[0] == Box((0,), (1,))
