from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import GeometryError
from shardwise.geometry import Box, Boxes, intersecting_pairs, overlap, overlapping_pairs
from shardwise.geometry.overlap import distinct
from shardwise.testing.strategies import boxes, shapes

if TYPE_CHECKING:
    from collections.abc import Iterator


@st.composite
def _two_sets(draw: st.DrawFn, *, most: int = 30) -> tuple[Boxes, Boxes]:
    shape = draw(shapes(max_size=9))
    sets = draw(st.tuples(*[st.lists(boxes(shape), max_size=most)] * 2))
    return Boxes.of(sets[0], len(shape)), Boxes.of(sets[1], len(shape))


def _common(a: Boxes, b: Boxes) -> set[tuple[int, int]]:
    """Oracle: all pairs compared."""
    return {
        (i, j) for i, one in enumerate(a) for j, other in enumerate(b) if (one & other) is not None
    }


@contextmanager
def _treated_as_many(are_many: bool) -> Iterator[None]:
    """Few boxes are compared one with each; within this, if `are_many`, nearly all are halved."""
    with pytest.MonkeyPatch.context() as patch:
        if are_many:
            patch.setattr(overlap, "_LITTLE", 0)
            patch.setattr(overlap, "_FEW", 1)
        yield


@given(_two_sets(), st.booleans())
def test_intersecting_pairs_are_all_pairs_that_share_an_element_each_once(
    sets: tuple[Boxes, Boxes], are_many: bool
) -> None:
    with _treated_as_many(are_many):
        i, j = intersecting_pairs(*sets)
    found = list(zip(i.tolist(), j.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == _common(*sets)


def _random_boxes(rng: np.random.Generator, num_boxes: int, shape: tuple[int, ...]) -> Boxes:
    """Boxes of all sizes, some of them long and thin, some empty, some outside of `shape`."""
    sizes = rng.integers(0, [1 + n // 2 for n in shape], (num_boxes, len(shape)))
    starts = rng.integers(0, shape, (num_boxes, len(shape)))
    thin = rng.random((num_boxes, len(shape))) < 0.5
    return Boxes(starts, starts + np.where(thin, np.minimum(sizes, 2), sizes))


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 600), st.sampled_from([1, 7, 50, 300])),
    st.sampled_from([(), (40,), (2**61,), (30, 40), (2**50, 9), (9, 9, 9), (3, 2, 4, 3, 2)]),
    st.booleans(),
)
def test_intersecting_pairs_of_large_sets_and_of_a_small_one_with_a_large_one(
    seed: int, counts: tuple[int, int], shape: tuple[int, ...], are_many: bool
) -> None:
    rng = np.random.default_rng(seed)
    a, b = (_random_boxes(rng, count, shape) for count in counts)
    low = np.maximum(a.starts[:, None], b.starts)
    expected = (low < np.minimum(a.stops[:, None], b.stops)).all(axis=2)
    for one, other, common in ((a, b, expected), (b, a, expected.T)):
        with _treated_as_many(are_many):
            i, j = intersecting_pairs(one, other)
        order = np.lexsort((j, i))
        np.testing.assert_array_equal((i[order], j[order]), np.nonzero(common))


@given(_two_sets(), st.integers(1, 5))
def test_overlapping_pairs_are_found_up_to_the_limit(sets: tuple[Boxes, Boxes], limit: int) -> None:
    expected = {(i, j) for i, j in _common(sets[0], sets[0]) if i < j}
    found = overlapping_pairs(sets[0], limit=limit)
    assert set(found) <= expected
    assert len(set(found)) == min(limit, len(expected))


def test_many_boxes_over_one_point_stop_at_the_limit() -> None:
    # 20,000 nested boxes have 200 million overlapping pairs; finding three must not list them.
    size = np.arange(1, 20_001)[:, None] * np.ones((1, 2), np.int64)
    nested = Boxes(np.zeros_like(size, dtype=np.int64), size.astype(np.int64))
    assert len(overlapping_pairs(nested, limit=3)) == 3


def test_every_pair_is_compared_when_there_are_millions() -> None:
    rows, columns = np.arange(1500)[:, None], np.zeros((1500, 1), np.int64)
    flat = Boxes(np.hstack([rows, columns]), np.hstack([rows + 1, columns + 1500]))
    tall = Boxes(np.hstack([columns, rows]), np.hstack([columns + 1500, rows + 1]))
    i, j = intersecting_pairs(flat, tall)
    assert len(np.unique(1500 * i + j)) == len(i) == 1500 * 1500


def test_sets_of_different_dims_are_refused() -> None:
    with pytest.raises(GeometryError, match="expected 1 dims, got 0"):
        intersecting_pairs(Boxes.of([], 1), Boxes.of([], 0))


def test_long_thin_boxes_beside_each_other_do_not_overlap() -> None:
    n = 3000
    each, zero, one = np.arange(n), np.zeros(n, int), np.ones(n, int)
    starts = np.concatenate([np.stack([each, zero], 1), np.stack([zero, n + each], 1)])
    sizes = np.concatenate([np.stack([one, n * one], 1), np.stack([n * one, one], 1)])
    assert overlapping_pairs(Boxes(starts, starts + sizes), limit=1) == []
    wider = sizes + (np.arange(2 * n) == 17)[:, None]
    assert overlapping_pairs(Boxes(starts, starts + wider), limit=1)


def test_0d_boxes_intersect() -> None:
    point = Boxes.of([Box((), ())], 0)
    assert [index.tolist() for index in intersecting_pairs(point, point)] == [[0], [0]]


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_distinct_coordinates_are_ascending_and_each_once(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))
