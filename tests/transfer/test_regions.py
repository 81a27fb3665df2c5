"""Regions against brute force, box by box."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import Box, Boxes, Layout
from shardwise.sharding_spec import GridShardingSpec
from shardwise.testing.strategies import layouts, shapes, specs
from shardwise.transfer.regions import BoxJoin, GridJoin, Regions, join

Shape = tuple[int, ...]
Pair = tuple[Layout, Layout]


def _layouts(shape: Shape) -> st.SearchStrategy[Layout]:
    """Layouts of every kind, of which many are grids."""
    grids = specs(shape, kinds=[GridShardingSpec]).map(lambda spec: spec.layout(shape))
    return layouts(shape=shape) | grids


pairs = shapes(max_size=6).flatmap(lambda shape: st.tuples(_layouts(shape), _layouts(shape)))


def _boxes(layout: Layout) -> list[Box]:
    return [box for box, _ in itertools.groupby(layout.boxes)]


def _listed(regions: Regions) -> list[tuple[Box, int, int]]:
    boxes = Boxes(regions.starts, regions.stops)
    source_box, target_box = regions.source_box.tolist(), regions.target_box.tolist()
    return list(zip(boxes, source_box, target_box, strict=True))


def _expected(source: Layout, target: Layout) -> list[tuple[Box, int, int]]:
    """Oracle: every distinct box of one with every one of the other."""
    both = itertools.product(enumerate(_boxes(source)), enumerate(_boxes(target)))
    found = ((a & b, i, j) for (i, a), (j, b) in both)
    return sorted((box, i, j) for box, i, j in found if box is not None)


@given(pairs)
def test_regions_are_where_a_source_box_meets_a_target_box(pair: Pair) -> None:
    expected = _expected(*pair)
    assert _listed(join(*pair).regions()) == expected
    assert _listed(BoxJoin(*pair).regions()) == expected


@given(pairs, st.integers(0, 4))
def test_the_regions_of_a_rank_are_those_of_the_boxes_that_it_holds(pair: Pair, rank: int) -> None:
    source, target = ([box for box, owner, _ in layout if owner == rank] for layout in pair)
    before, after = map(_boxes, pair)
    expected = [
        region
        for region in _expected(*pair)
        if before[region[1]] in source or after[region[2]] in target
    ]
    assert _listed(join(*pair).regions_of(rank)) == expected
    assert _listed(BoxJoin(*pair).regions_of(rank)) == expected


@given(pairs)
def test_grids_are_joined_along_their_cuts(pair: Pair) -> None:
    are_grids = all(layout.grid is not None for layout in pair)
    assert isinstance(join(*pair), GridJoin if are_grids else BoxJoin)


def test_regions_of_vast_tensors_are_in_order() -> None:
    shape = (2**20, 2**20, 2**22)
    starts = np.array([[2**20 - 1, 0, 0], [0, 0, 2**22 - 1], [0, 2**20 - 1, 0], [0, 0, 2**22 - 1]])
    number = np.arange(4)
    ordered = Regions(starts, starts + 1, number, number).in_order(shape)
    np.testing.assert_array_equal(ordered.starts, starts[[1, 2, 0]])
