"""The seed's checks, beside the originals where those are right."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import SpecError
from shardwise.geometry import Box
from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec._internals import (
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)
from shardwise.testing.strategies import boxes, shapes, tilings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the seed warns that it is deprecated
    from torch.distributed._shard.sharding_spec import _internals

seed: Any = _internals  # not typed


def _shards(listed: list[Box]) -> list[ShardMetadata]:
    return [ShardMetadata(box.start, box.shape, "rank:0/cpu") for box in listed]


@given(shapes(min_ndim=1).flatmap(lambda shape: st.lists(boxes(shape), max_size=5)))
def test_overlap_is_found_exactly_when_two_boxes_share_an_element(listed: list[Box]) -> None:
    shares = any((a & b) is not None for i, a in enumerate(listed) for b in listed[:i])
    if shares:
        with pytest.raises(ValueError, match="overlap"):
            validate_non_overlapping_shards_metadata(_shards(listed))
    else:
        validate_non_overlapping_shards_metadata(_shards(listed))


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))), st.data())
def test_gaps_are_allowed_by_one_check_and_found_by_the_other(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, listed = case
    kept = data.draw(st.lists(st.sampled_from(listed), min_size=1, unique=True))
    validate_non_overlapping_shards_metadata(_shards(kept))
    if sum(box.volume for box in kept) == Box.whole(shape).volume:
        check_tensor(_shards(kept), shape)
    else:
        with pytest.raises(ValueError, match="does not match tensor volume"):
            check_tensor(_shards(kept), shape)


@given(st.integers(0, 100), st.integers(1, 20), st.integers(0, 20))
def test_split_arithmetic_is_the_seeds(size: int, chunks: int, index: int) -> None:
    length = get_split_size(size, chunks)
    assert length == seed.get_split_size(size, chunks)
    assert get_chunked_dim_size(size, length, index) == seed.get_chunked_dim_size(
        size, length, index
    )


@given(st.integers(1, 40), st.permutations(range(5)), st.integers(0, 4))
def test_chunk_params_are_the_seeds(size: int, order: list[int], rank: int) -> None:
    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in order])
    start, length = get_chunk_sharding_params(size, 5, spec, rank)
    assert (start, length) == seed.get_chunk_sharding_params(size, 5, spec, rank)


def test_chunk_params_follow_chosen_sizes_and_refuse_other_ranks() -> None:
    spec = ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu"], sizes=[3, 5])
    assert get_chunk_sharding_params(8, 2, spec, 0) == (3, 5)
    with pytest.raises(SpecError, match="got rank 1"):
        get_chunk_sharding_params(8, 2, spec, 1)


def test_shards_of_more_elements_than_64_bits_count_are_compared() -> None:
    vast = ShardMetadata([0, 0], [2**32, 2**32])
    with pytest.raises(ValueError, match="overlap"):
        validate_non_overlapping_shards_metadata([vast, vast])
    validate_non_overlapping_shards_metadata([vast, ShardMetadata([2**40, 2**40], [1, 1])])
    with pytest.raises(ValueError, match=f"Total volume of shards: {2**64} does not match"):
        check_tensor([vast], (2**32, 2**33))


def test_a_thin_grid_of_many_shards_with_a_gap_takes_no_quadratic_time() -> None:
    # The seed needs 12 s for 10,000 of these; a quadratic check of 40,000 would hit the timeout.
    shards = [ShardMetadata([3 * i, 2 * j], [3, 2]) for j in range(20_000) for i in range(2)][1:]
    validate_non_overlapping_shards_metadata(shards)
    with pytest.raises(ValueError, match="overlap"):
        validate_non_overlapping_shards_metadata([*shards, ShardMetadata([4, 7], [1, 1])])
