"""Equal specs share what they say of a shape, and nobody can tell but by the time it takes."""

from __future__ import annotations

import weakref
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise import placement
from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, spec
from shardwise.testing.strategies import shapes, specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from shardwise.sharding_spec.spec import Pieces

Case = tuple[tuple[int, ...], ShardingSpec]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes(max_size=5))
    return shape, draw(specs(shape))


@given(cases())
def test_what_is_shared_is_what_each_would_say(case: Case) -> None:
    shape, one = case
    for same in (one, copy(one), copy(one)):
        assert same.layout(shape) == ShardingSpec.layout(one, shape)
        for rank in range(4):
            places = ShardingSpec._local_placements(one, shape, rank)
            assert same.local_devices(shape, rank) == tuple(place.device() for place in places)


def test_equal_specs_have_one_layout() -> None:
    first, second = (shardwise.chunk(0, ranks=[0, 2, 1]) for _ in range(2))
    assert first.layout((7, 4)) is second.layout([7, 4])
    assert first.layout((7, 4)) is not shardwise.chunk(0, ranks=[0, 1, 2]).layout((7, 4))
    on_meta = shardwise.chunk(0, ranks=[0, 2, 1], device="meta")
    assert on_meta.layout((7, 4)) == first.layout((7, 4))
    assert on_meta.local_devices((7, 4), 2) == (torch.device("meta"),)
    assert second.local_devices((7, 4), 2) == (torch.device("cpu"),)


def test_a_users_subclass_is_asked_each_time() -> None:
    class Turned(ChunkShardingSpec):
        """Equal to others of its class, whatever its dim is."""

        other: int | None = None

        def _pieces(self, shape: Sequence[int]) -> Pieces:
            plain = shardwise.chunk(self.dim if self.other is None else self.other, ranks=[0, 1])
            return plain._pieces(shape)

    made: list[Any] = [Turned(0, ["rank:0/cpu", "rank:1/cpu"]) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].layout((4, 6)).boxes_of(1)[0].shape == (2, 6)
    object.__setattr__(made[1], "other", 1)
    assert made[1].layout((4, 6)).boxes_of(1)[0].shape == (4, 3)
    assert made[1].local_devices((4, 6), 1) == (torch.device("cpu"),)


def test_assigned_placements_are_seen() -> None:
    listed = [ShardMetadata([k], [1], f"rank:{k}/cpu") for k in range(2)]
    one = EnumerableShardingSpec(listed)
    assert one.local_devices((2,), 0) == (torch.device("cpu"),)
    for shard in one.shards:
        shard.placement = shardwise.placement.parse_placement("rank:1/meta")
    assert one.layout((2,)).ranks == (1,)
    assert one.local_devices((2,), 0) == ()
    assert one.local_devices((2,), 1) == (torch.device("meta"),) * 2


def test_little_is_kept() -> None:
    for size in range(2 * spec._MOST_SHARED):
        shardwise.chunk(0, ranks=[0, 1]).layout((size,))
        assert len(spec._shared) <= spec._MOST_SHARED
    many = shardwise.block_cyclic(0, 1, ranks=[0, 1])
    again = copy(many)
    large = (spec._FEW + 1,)
    assert many.layout(large) is not again.layout(large)
    few = shardwise.chunk(0, ranks=[0, 1, 2])
    few.layout((7,))
    gone = weakref.ref(few)
    del few
    assert gone() is None


def test_what_a_worker_is_called_is_asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
        monkeypatch.setattr(placement, "rpc_worker_ranks", lambda ranks=ranks: ranks)
        layout = ChunkShardingSpec(0, ["a/cpu", "b/cpu"]).layout((4,))
        assert [layout.boxes_of(rank)[0].start for rank in ranks.values()] == [(0,), (2,)]
