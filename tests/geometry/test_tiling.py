from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import TilingError
from shardwise.geometry import Box, Boxes, check_tiling, is_tiling
from shardwise.testing.strategies import boxes, shapes, tilings


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))))
def test_every_tiling_passes(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = case
    report = check_tiling(parts, shape)
    assert report.ok, report.describe()
    assert is_tiling(Boxes.of(parts, len(shape)), shape)
    assert report.describe() == f"{len(parts)} boxes tile {shape}"


@st.composite
def _any_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes that mostly do not tile: random ones, repeated ones, ones out of range."""
    shape = draw(shapes(max_ndim=3, max_size=5))
    inside, beyond = boxes(shape), boxes(tuple(size + 1 for size in shape))
    listed = draw(st.lists(inside | beyond, max_size=6))
    if draw(st.booleans()):
        listed += draw(tilings(shape, max_boxes=4))[:-1]
    repeated = draw(st.lists(st.sampled_from(listed), max_size=2)) if listed else []
    return shape, draw(st.permutations(listed + repeated))


@given(_any_boxes(), st.booleans())
def test_the_report_names_exactly_what_is_wrong(
    case: tuple[tuple[int, ...], list[Box]], replicas: bool
) -> None:
    shape, listed = case
    report = check_tiling(listed, shape, replicas=replicas, limit=10**6)
    count = np.zeros(shape, int)  # oracle: how often each element is covered
    for box in dict.fromkeys(listed) if replicas else listed:
        count[box.slices()] += 1
    gaps, shared = np.zeros(shape, int), np.zeros(shape, bool)
    for gap in report.gaps:
        gaps[gap.slices()] += 1
    for i, j in report.overlaps:
        common = listed[i] & listed[j]
        assert i < j
        assert common is not None
        shared[common.slices()] = True
    assert np.array_equal(gaps, count == 0)
    assert np.array_equal(shared, count > 1)
    beyond = [i for i, box in enumerate(listed) if np.any(np.array(box.stop) > np.array(shape))]
    assert list(report.out_of_range) == beyond
    assert report.is_complete
    assert report.ok == (not beyond and bool((count == 1).all()))


def test_a_report_is_read_by_people() -> None:
    report = check_tiling([Box((0, 0), (4, 3)), Box((3, 0), (6, 3)), Box((0, 3), (9, 6))], (8, 6))
    assert report.describe() == (
        "box 2 [0:9, 3:6] exceeds tensor dims (8, 6); "
        "box 0 [0:4, 0:3] and box 1 [3:6, 0:3] overlap in [3:4, 0:3]; nothing covers [6:8, 0:3]"
    )
    with pytest.raises(TilingError, match=r"weights.*cover the entire tensor.*shard 0 and shard 1"):
        report.raise_if_bad("weights", label=lambda i: f"shard {i}")


def test_the_limit_bounds_the_report_and_says_so() -> None:
    row = [Box((k,), (k + 1,)) for k in range(0, 100, 2)]
    report = check_tiling(row, (100,), limit=3)
    assert report.gaps == (Box((1,), (2,)), Box((3,), (4,)), Box((5,), (6,)))
    assert not report.is_complete
    assert not report.ok
    assert report.describe().endswith("and more")
    with pytest.raises(ValueError, match="limit: expected a whole number >= 1"):
        check_tiling(row, (100,), limit=0)


def test_identical_boxes_are_replicas_or_an_overlap() -> None:
    twice = [Box((0,), (4,)), Box((0,), (4,))]
    assert check_tiling(twice, (4,), replicas=True).ok
    assert check_tiling(twice, (4,)).overlaps == ((0, 1),)
    part = [*twice, Box((2,), (4,))]
    assert check_tiling(part, (4,), replicas=True).overlaps == ((0, 2),)


def test_a_vast_sparse_shape_needs_no_big_numbers() -> None:
    # The product of the sizes + 1 is above 2**63, though the shape has fewer elements.
    shape = (2**16 - 1, 2**16 - 1, 2**16 - 1, 2**15 - 1)
    half = [Box.whole(shape)]
    for dim in range(4):
        box = half.pop()
        at = shape[dim] // 3
        half.append(Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])))
        half.append(Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop))
    assert check_tiling(half, shape).ok
    assert check_tiling(half[1:], shape).gaps == (half[0],)


@pytest.mark.parametrize("shape", [(3, 2**61), (2**61, 3), (2**30, 2**30, 7)])
def test_keys_of_corners_that_do_not_fit_64_bits_are_ranked(shape: tuple[int, ...]) -> None:
    parts = [Box.whole(shape)]
    for dim, size in enumerate(shape):
        parts = [
            half
            for box in parts
            for half in (
                Box(box.start, (*box.stop[:dim], size // 3, *box.stop[dim + 1 :])),
                Box((*box.start[:dim], size // 3, *box.start[dim + 1 :]), box.stop),
            )
        ]
    assert check_tiling(parts, shape).ok
    assert check_tiling(parts[:-1], shape).gaps == (parts[-1],)
    assert check_tiling([*parts, parts[1]], shape).overlaps == ((1, len(parts)),)


def test_more_repeats_than_the_limit_are_no_complete_report() -> None:
    report = check_tiling([Box((0,), (4,))] * 20, (4,), limit=3)
    assert (report.overlaps, report.is_complete) == (((0, 1), (0, 2), (0, 3)), False)


@pytest.mark.parametrize("shape", [(316, 316), (2, 50_000), (1, 100_000), (46, 46, 47)])
def test_a_hundred_thousand_boxes_in_any_order(shape: tuple[int, ...]) -> None:
    cells = np.stack([axis.ravel() for axis in np.indices(shape)], axis=1)
    cells = np.random.default_rng(0).permutation(cells)
    full = tuple(3 * n for n in shape)
    assert check_tiling(Boxes(3 * cells, 3 * cells + 3), full).ok
    missing = check_tiling(Boxes(3 * cells[1:], 3 * cells[1:] + 3), full)
    assert missing.gaps == (Box.at((3 * cells[0]).tolist(), (3,) * len(shape)),)


def test_boxes_and_shape_must_have_as_many_dims() -> None:
    with pytest.raises(TilingError, match=r"expected 2 dims as in \(4, 4\), got 1"):
        check_tiling(Boxes.of([Box((0,), (4,))], 1), (4, 4))


@pytest.mark.long
def test_all_sets_of_up_to_four_boxes_in_a_small_shape() -> None:
    shape = (2, 3)
    ends = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    every = [Box((a, c), (b, d)) for a, b in ends[0] for c, d in ends[1]]
    for count in range(5):
        for listed in itertools.combinations_with_replacement(every, count):
            cover = np.zeros(shape, int)
            for box in listed:
                cover[box.slices()] += 1
            assert check_tiling(listed, shape).ok == bool((cover == 1).all())
