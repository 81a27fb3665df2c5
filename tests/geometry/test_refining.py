"""Tests of boxes that are cut where they overlap."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import Box, common_pieces, is_tiling
from shardwise.testing.strategies import boxes, tilings

SHAPE = (6, 5)


def full_boxes() -> st.SearchStrategy[list[Box]]:
    return st.lists(boxes(SHAPE).filter(lambda box: not box.is_empty), max_size=8)


@given(full_boxes())
def test_pieces_are_equal_or_apart_and_make_up_their_boxes(listed: list[Box]) -> None:
    found = common_pieces(listed)
    assert set(found) == set(listed)
    for box, pieces in found.items():
        assert is_tiling([piece.relative_to(box) for piece in pieces], box.shape)
    every = list(itertools.chain.from_iterable(found.values()))
    for one, other in itertools.combinations(every, 2):
        assert one == other or not one & other


@given(tilings(SHAPE))
def test_boxes_that_do_not_overlap_stay_whole(listed: list[Box]) -> None:
    full = [box for box in listed if not box.is_empty]
    assert common_pieces(full) == {box: (box,) for box in full}


def test_only_boxes_that_overlap_are_cut() -> None:
    far = Box((0, 4), (6, 5))
    found = common_pieces([Box((0, 0), (4, 2)), Box((2, 0), (6, 2)), far])
    assert found[far] == (far,)
    assert found[Box((0, 0), (4, 2))] == (Box((0, 0), (2, 2)), Box((2, 0), (4, 2)))
