from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.metadata import ShardMetadata, TensorProperties
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
)
from shardwise.testing.strategies import shapes, specs

if TYPE_CHECKING:
    import random

    from shardwise.sharding_spec import ShardingSpec

Case = tuple[tuple[int, ...], ChunkShardingSpec]


def _chunk_cases() -> st.SearchStrategy[Case]:
    return shapes(min_ndim=1).flatmap(
        lambda shape: st.tuples(st.just(shape), specs(shape, kinds=[ChunkShardingSpec]))
    )


@given(_chunk_cases(), st.randoms(use_true_random=False))
def test_the_inferred_spec_has_the_same_layout(case: Case, rng: random.Random) -> None:
    shape, spec = case
    shards = spec.build_metadata(torch.Size(shape), TensorProperties()).shards_metadata
    rng.shuffle(shards)
    assert _infer_sharding_spec_from_shards_metadata(shards).layout(shape) == spec.layout(shape)


@given(st.integers(2, 30), st.permutations(range(4)), st.randoms(use_true_random=False))
def test_chunks_are_recognised_in_placement_order(
    size: int, order: list[int], rng: random.Random
) -> None:
    spec = ChunkShardingSpec(1, [f"rank:{r}/cpu" for r in order])
    shards = spec.build_metadata(torch.Size((3, size)), TensorProperties()).shards_metadata
    rng.shuffle(shards)
    found = _infer_sharding_spec_from_shards_metadata(shards)
    assert isinstance(found, ChunkShardingSpec)
    assert found.dim == 1
    assert found.layout((3, size)) == spec.layout((3, size))
    if size >= 10:  # no empty chunks, whose order cannot be told
        assert found == spec


def _kind(*shards: ShardMetadata) -> type[ShardingSpec]:
    return type(_infer_sharding_spec_from_shards_metadata(shards))


def test_everything_else_is_enumerated() -> None:
    assert _kind(ShardMetadata([0], [4], "rank:0")) is EnumerableShardingSpec
    uneven = [ShardMetadata([0], [1], "rank:0"), ShardMetadata([1], [3], "rank:1")]
    assert _kind(*uneven) is EnumerableShardingSpec
    grid = [ShardMetadata([i, j], [1, 1], f"rank:{i}") for i in range(2) for j in range(2)]
    assert _kind(*grid) is EnumerableShardingSpec
    ragged = [ShardMetadata([0, 0], [2, 4], "rank:0"), ShardMetadata([2, 0], [2, 3], "rank:1")]
    assert _kind(*ragged) is EnumerableShardingSpec
    with_gap = [ShardMetadata([0], [1], "rank:0"), ShardMetadata([2], [2], "rank:1")]
    assert _kind(*with_gap) is EnumerableShardingSpec
    nowhere = [ShardMetadata([0], [2]), ShardMetadata([2], [2])]
    assert _kind(*nowhere) is EnumerableShardingSpec


def test_empty_chunks_written_past_the_end_by_the_seed_are_understood() -> None:
    shards = [ShardMetadata([2 * k], [max(min(2, 5 - 2 * k), 0)], f"rank:{k}") for k in range(4)]
    assert shards[3].shard_offsets == [6]
    assert _kind(*shards) is ChunkShardingSpec
