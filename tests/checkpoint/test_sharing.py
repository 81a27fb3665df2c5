"""Who reads what, as a function of layouts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import sharing
from shardwise.checkpoint.sharing import filled_rows, lots, shard_of_box, single_rows
from shardwise.testing.strategies import layouts

if TYPE_CHECKING:
    from shardwise.geometry import Layout


@given(layout=layouts(), max_bytes=st.sampled_from([None, 1, 30]), turn=st.integers(0, 5))
def test_each_element_is_read_once_by_one_that_needs_it(
    layout: Layout, max_bytes: int | None, turn: int
) -> None:
    least, sharing._LEAST = sharing._LEAST, 12
    try:
        found = lots(layout, 4, turn=turn, max_bytes=max_bytes)
    finally:
        sharing._LEAST = least
    read = np.zeros(layout.shape, np.int64)
    for rank in range(4):
        for row in single_rows(layout, rank):
            assert layout.owners[row] == rank
            read[layout.boxes[row].slices()] += 1
    for lot in found:
        assert max_bytes is None or lot.size * 4 <= max(max_bytes, 4)
        for one in lot.ranges:
            assert one.reader in one.owners
            box = layout.boxes[one.row]
            flat = np.zeros(box.volume, np.int64)
            flat[one.start : one.stop] = 1
            read[box.slices()] += flat.reshape(box.shape)
    assert (read == 1).all()


@given(layout=layouts())
def test_every_owner_gets_what_others_read(layout: Layout) -> None:
    filled = set(filled_rows(layout).tolist())
    for lot in lots(layout, 4):
        source, target = lot.layouts()
        assert source.shape == target.shape == (lot.size,)
        held = sum(source.bytes_per_rank(1).values()) + sum(target.bytes_per_rank(1).values())
        assert held == sum(one.size * len(one.owners) for one in lot.ranges)
        for one in lot.ranges:
            for rank in one.owners:
                shard = shard_of_box(layout, rank)[one.row]
                assert layout.boxes_of(rank)[shard] == layout.boxes[one.row]
                assert int(layout.rows_of(rank)[shard]) in filled
