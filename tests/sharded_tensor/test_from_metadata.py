"""Sharded tensors from metadata that every rank knows: nothing is sent, and errors stay local."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded_tensor.shards import entries, metadata_of, numbers, reversed_shards, row

import shardwise
from shardwise import Layout, run_local
from shardwise.errors import MetadataError, ShardCountError, TilingError
from shardwise.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor import Shard, ShardedTensor, ShardedTensorBase
from shardwise.sharding_spec import ChunkShardingSpec, ReplicatedShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable


def _from_metadata(rank: int, ranks: list[int], cases: list[Layout]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    for layout in cases:
        shards = reversed_shards(layout, rank, requires_grad=True)
        metadata = metadata_of(layout, requires_grad=True)
        st = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, group)
        assert st.shard_layout == layout
        assert entries(st.metadata()) == entries(metadata)
        full = numbers(layout.shape)
        whole = st.full_tensor()
        assert torch.equal(whole, full)
        (whole * full).sum().backward()
        for shard in shards:
            assert shard.tensor.grad is not None
            assert torch.equal(shard.tensor.grad, full[shard.metadata.box.slices()])


def test_metadata_of_any_layout_makes_the_tensor_on_any_group() -> None:
    cases = [
        shardwise.chunk(0, ranks=[3, 1]).layout((5, 3)),
        shardwise.chunk(1, ranks=[1, 3, 1]).layout((2, 4)),
        shardwise.on_rank(3).layout((4, 2)),
        shardwise.grid([2, 2], ranks=[1, 3, 3, 1]).layout((5, 5)),
        shardwise.chunk(0, ranks=[1, 3]).layout((0, 2)),
    ]
    run_local(_from_metadata, 4, [1, 3], cases)


def _alone_with_metadata(rank: int) -> list[str]:
    """Rank 1 does nothing: it must not be waited for."""
    if rank == 1:
        return []
    layout = shardwise.chunk(0, ranks=[0, 1]).layout((5, 3))
    make = ShardedTensor._init_from_local_shards_and_global_metadata
    shards = reversed_shards(layout, rank)
    assert make(shards, metadata_of(layout)).local_tensor() is shards[0].tensor
    replicas = ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])
    both = metadata_of(replicas.layout((5, 3)))
    st = make(reversed_shards(replicas.layout((5, 3)), rank), both, sharding_spec=replicas)
    assert st.shard_layout.is_replicated
    found = []

    def refused(error: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(error) as caught:
            call()
        found.append(str(caught.value))

    plain = metadata_of(layout)
    refused(RuntimeError, lambda: make([], plain))
    refused(ShardCountError, lambda: make([*shards, *shards], plain))
    stranger = metadata_of(shardwise.chunk(0, ranks=[0, 5]).layout((5, 3)))
    refused(ValueError, lambda: make(shards, stranger))
    refused(ValueError, lambda: make([], ShardedTensorMetadata()))
    refused(ValueError, lambda: make(shards, metadata_of(layout, layout=torch.sparse_coo)))
    refused(ValueError, lambda: make(shards, metadata_of(layout, requires_grad=True)))
    refused(ValueError, lambda: make(shards, metadata_of(layout, pin_memory=True)))
    single = [row(0, torch.zeros(3, 3))]
    refused(ValueError, lambda: make(single, plain))
    sparse = [row(0, torch.zeros(3, 3, dtype=torch.float64).to_sparse())]
    refused(ValueError, lambda: make(sparse, plain))
    turned = [row(0, torch.zeros(3, 3, dtype=torch.float64).t())]
    assert turned[0].tensor.is_contiguous() is False
    refused(ValueError, lambda: make(turned, plain))
    elsewhere = [row(0, torch.zeros(3, 3, dtype=torch.float64), at=1)]
    refused(MetadataError, lambda: make(elsewhere, plain))
    half = ShardedTensorMetadata(plain.shards_metadata[1:], plain.size, plain.tensor_properties)
    refused(TilingError, lambda: make(shards, half))
    refused(TilingError, lambda: make(reversed_shards(replicas.layout((5, 3)), rank), both))
    columns = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
    refused(MetadataError, lambda: make(shards, plain, sharding_spec=columns))
    refused(TypeError, lambda: make(shards, {"size": (5, 3)}))  # type: ignore[arg-type]  # wrong on purpose
    return found


def test_with_metadata_nothing_is_sent_and_errors_stay_local() -> None:
    messages, _ = run_local(_alone_with_metadata, 2)
    phrases = [
        "Number of local shards (0) does not match number of local shards metadata",
        "Number of local shards (2) does not match number of local shards metadata",
        "Global rank 5 does not exist in input process group",
        "shards_metadata must not be empty!",
        "Only torch.strided layout is currently supported",
        "Local shards' tensor requires_grad property is incompatible with tensor property",
        "Local shards' tensor pin_memory property is incompatible with tensor property",
        "Local shards' tensor dtype property is incompatible with tensor property on rank 0",
        "Local shards' tensor layout property is incompatible with tensor property",
        "Only torch.contiguous_format memory_format is currently supported",
        "expected the boxes of this rank: [0:3, 0:3], got [1:4, 0:3]",
        "do not cover the entire tensor",
        "overlap",
        "does not match with sharding_spec",
        "expected a ShardedTensorMetadata",
    ]
    assert len(messages) == len(phrases)
    for message, phrase in zip(messages, phrases, strict=True):
        assert phrase in message


def test_a_tensor_of_no_group_holds_shards_of_any_ranks() -> None:
    layout = shardwise.chunk(0, ranks=[0, 1]).layout((4, 2))
    metadata = metadata_of(layout)
    full = numbers((4, 2))
    shards = [Shard(full[m.box.slices()], m) for m in metadata.shards_metadata]
    make = ShardedTensorBase._init_from_local_shards_and_global_metadata
    st = make(shards, metadata)
    assert isinstance(st, ShardedTensor)
    assert st.shape == (4, 2)
    held = [(s.metadata.box, s.metadata.placement, s.tensor) for s in st.local_shards()]
    assert [placement.rank() for _, placement, _ in held if placement] == [0, 1]
    assert all(tensor is s.tensor for (_, _, tensor), s in zip(held, shards[::-1], strict=True))
    assert entries(st.metadata()) == entries(metadata)
    assert st._process_group is None
    copy: Any = st.clone()
    assert copy.local_shards()[1].metadata == st.local_shards()[1].metadata
    with pytest.raises(RuntimeError, match="belongs to no process group"):
        st.full_tensor()
    nothing = make([], metadata)
    assert nothing.local_shards() == []
    assert nothing.dtype == torch.float64
    st._local_shards = shards[:1]
    assert [s.tensor is shards[0].tensor for s in st.local_shards()] == [True]
    with pytest.raises(MetadataError, match="one of the metadata's shards"):
        make([Shard.from_tensor_and_offsets(full[:1], [1, 0], 0)], metadata)
    # columns of a tensor, which are not contiguous, will do here
    columns = metadata_of(shardwise.chunk(1, ranks=[0, 1]).layout((4, 2)))
    make([Shard(full[m.box.slices()], m) for m in columns.shards_metadata], columns)
