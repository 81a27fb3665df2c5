"""Layouts as plain values, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from shardwise.errors import ShardwiseError
from shardwise.geometry import Box, Layout
from shardwise.geometry.plain_layouts import layout_from_plain, plain_layout
from shardwise.testing.strategies import layouts

ROWS = Layout((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))], [0, 1])


@given(layouts(world_size=4))
def test_every_layout_comes_back_from_json(layout: Layout) -> None:
    assert layout_from_plain(json.loads(json.dumps(plain_layout(layout)))) == layout


@given(layouts(world_size=4))
def test_earlier_files_have_all_starts_and_all_stops(layout: Layout) -> None:
    earlier = plain_layout(layout)
    del earlier["boxes"]
    earlier["starts"] = layout.boxes.starts.ravel().tolist()
    earlier["stops"] = layout.boxes.stops.ravel().tolist()
    assert layout_from_plain(earlier) == layout


# What is wrong with a list of boxes, of owners and so on, the tests of plans as text say.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [0, 0, 2, 0]}, "layout: expected the keys 'stops'"),
        ({"starts": [0, 0, 2], "stops": [2, 6, 4, 6]}, "starts: expected 2 x 2 numbers, got 3"),
        ({"starts": [0, 0, 2, 0], "stops": [2, 6, 4, -6]}, "stops: expected numbers from 0"),
        ({"starts": [0, 0, 1, 0], "stops": [2, 6, 4, 6]}, "overlap"),
        ({}, "layout: expected the keys 'boxes'"),
    ],
)
def test_starts_and_stops_that_are_wrong_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    plain = plain_layout(ROWS)
    del plain["boxes"]
    with pytest.raises(ShardwiseError, match=message):
        layout_from_plain(plain | change)
