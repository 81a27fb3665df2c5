"""Wrong specs: each raises the seed's kind of error and says what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import shardwise.sharding_spec as specs
from shardwise.errors import ShardwiseError
from shardwise.metadata import ShardMetadata

if TYPE_CHECKING:
    from collections.abc import Callable

# Any: these calls are wrong on purpose, and the type checker would say so first.
Chunk: Any = specs.ChunkShardingSpec
Enumerable: Any = specs.EnumerableShardingSpec
Grid: Any = specs.GridShardingSpec
Replicated: Any = specs.ReplicatedShardingSpec
Partial: Any = specs.PartialShardingSpec
Fused: Any = specs.FusedShardingSpec
BlockCyclic: Any = specs.BlockCyclicShardingSpec
Flat: Any = specs.FlatShardingSpec


def _ranks(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def _one(size: int) -> Any:
    """A spec of one shard, on rank 0."""
    return Enumerable([ShardMetadata([0], [size], "rank:0/cpu")])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Chunk("N", _ranks(0)), NotImplementedError, "does not support named dimension"),
        (lambda: Chunk(1.5, _ranks(0)), ValueError, "needs to be an integer"),
        (
            lambda: Chunk(2, _ranks(0)).layout((4, 4)),
            ValueError,
            "Invalid sharding dim: expected -2 to 1",
        ),
        (lambda: Chunk(0, _ranks(0)).layout(()), ValueError, r"Invalid sharding dim.*0-d"),
        (lambda: Chunk(0, []), ValueError, "at least one"),
        (lambda: Chunk(0, "rank:0/cpu"), TypeError, "a list of placements"),
        (lambda: Chunk(0, [0, 1]), TypeError, "Write 'rank:0/cpu'"),
        (lambda: Chunk(0, ["rank:x/cpu"]), ValueError, "Could not parse remote_device: rank:x/cpu"),
        (lambda: Chunk(0, ["rank:0/disk"]), ValueError, "Could not parse remote_device"),
        (
            lambda: Chunk(0, ["cpu"]).layout((4,)),
            ValueError,
            r"names a device but no rank.*'rank:0/cpu'",
        ),
        (
            lambda: Chunk(0, ["trainer0/cpu"]).layout((4,)),
            RuntimeError,
            "RPC Framework needs to be initialized",
        ),
        (lambda: Chunk(0, _ranks(0, 1), sizes=[4]), ValueError, "2 lengths, one per placement"),
        (
            lambda: Chunk(0, _ranks(0, 1), sizes=[4, 3]).layout((8,)),
            ValueError,
            "add up to 8",
        ),
        (lambda: Chunk(0, _ranks(0, 1), sizes=[9, -1]), ValueError, "sizes: expected numbers >= 0"),
        (lambda: Enumerable([]), ValueError, "Empty shard list provided"),
        (lambda: Enumerable(["rank:0"]), TypeError, r"shards\[0\]: expected a ShardMetadata"),
        (
            lambda: Enumerable([ShardMetadata([0], [1]), ShardMetadata([0, 0], [1, 1])]),
            ValueError,
            "Found inconsistent ranks for shards: 1 and 2",
        ),
        (
            lambda: Enumerable([ShardMetadata([0], [4])]).layout((4,)),
            ValueError,
            "remote device is None",
        ),
        (lambda: _one(4).layout((3,)), ValueError, "exceeds tensor dim: 3"),
        (
            lambda: _one(4).layout((5,)),
            ValueError,
            r"does not match tensor volume: 5.*not cover the entire tensor.*nothing covers \[4:5\]",
        ),
        (lambda: _one(4).layout((4, 1)), ValueError, "Rank of tensor is 2, but shards rank is 1"),
        (
            lambda: Grid([2, 2], _ranks(0, 1, 2)),
            ValueError,
            "expected 4, one per cell of a 2x2 grid, got 3",
        ),
        (lambda: Grid([2], _ranks(0, 1)).layout((4, 4)), ValueError, "2 items, one per dim"),
        (lambda: Grid([0, 1], []), ValueError, "a whole number >= 1"),
        (lambda: Grid(2, _ranks(0, 1)), TypeError, "a list of counts or sizes, one per dim"),
        (lambda: Grid([1], [[]]), ValueError, "at least one"),
        (lambda: Grid([1], [_ranks(0, 0)]).layout((4,)), ValueError, r"rank 0 holds box .* twice"),
        (lambda: Replicated(_ranks(1, 1)).layout((4,)), ValueError, r"rank 1 holds box .* twice"),
        (lambda: Partial(_ranks(0, 1), "xor"), ValueError, "reduce_op: expected one of"),
        (
            lambda: Fused(0, [4, 2], _ranks(0, 1)).layout((8,)),
            ValueError,
            r"add up to 8.*together 6",
        ),
        (lambda: Fused(0, [[4, 2]], _ranks(0)), ValueError, "1 lengths, one per placement"),
        (lambda: Fused(0, [], _ranks(0)), ValueError, "at least one length"),
        (lambda: Fused(0, 8, _ranks(0)), TypeError, "a list of lengths"),
        (lambda: BlockCyclic(0, 0, _ranks(0)), ValueError, "block: expected a whole number >= 1"),
        (lambda: BlockCyclic(0, True, _ranks(0)), TypeError, "block: expected a whole number"),
        (lambda: Flat(_ranks(0, 1), sizes=[3, 2]).layout((2, 3)), ValueError, "add up to 6"),
    ],
)
def test_wrong_specs_say_what_was_expected(
    make: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert isinstance(caught.value, ShardwiseError)
