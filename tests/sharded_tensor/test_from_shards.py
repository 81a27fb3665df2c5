"""Sharded tensors from local shards, or from one local tensor per rank: every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sharded_tensor.shards import entries, numbers, reversed_shards

import shardwise
from shardwise import Layout, run_local, set_check
from shardwise.errors import MetadataError
from shardwise.metadata import ShardMetadata
from shardwise.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.testing.strategies import layouts


def _rebuild(rank: int, cases: list[Layout], ranks: list[int] | None = None) -> None:
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and rank not in ranks:
        return
    for layout in cases:
        full = numbers(layout.shape)
        shards = reversed_shards(layout, rank, requires_grad=True)
        kept = list(shards)
        given = [shard.metadata for shard in shards]
        st = init_from_local_shards(shards, layout.shape, process_group=group)
        assert st.shard_layout == layout
        assert st.shape == full.shape
        assert st.dtype == torch.float64
        assert st.requires_grad
        assert entries(st.metadata()) == sorted((e.box, e.rank) for e in layout)
        # the very tensors, by their boxes; the caller's list and metadata are left alone
        assert shards == kept
        assert all(shard.metadata is m for shard, m in zip(shards, given, strict=True))
        by_box = {shard.metadata.box: shard.tensor for shard in shards}
        for shard in st.local_shards():
            assert shard.tensor is by_box[shard.metadata.box] or not shard.tensor.numel()
        whole = st.full_tensor()
        assert torch.equal(whole, full)
        # ranks without shards are in the graph too, or this would wait for ever
        (whole * full).sum().backward()
        for shard in shards:
            assert shard.tensor.grad is not None
            assert torch.equal(shard.tensor.grad, full[shard.metadata.box.slices()])


@settings(max_examples=4)
@given(st.lists(layouts(world_size=4, replicas=False, addends=False), min_size=8, max_size=8))
def test_every_layout_is_rebuilt_from_its_shards(cases: list[Layout]) -> None:
    run_local(_rebuild, 4, cases)


@pytest.mark.parametrize(("world_size", "ranks"), [(1, None), (2, None), (3, None), (4, [1, 3])])
def test_shards_of_chunks_grids_and_uneven_cuts_on_every_group(
    world_size: int, ranks: list[int] | None
) -> None:
    on = ranks or list(range(world_size))
    cases = [
        shardwise.chunk(0, ranks=on).layout((5, 3)),
        shardwise.chunk(-1, ranks=on[::-1]).layout((2, 9)),
        shardwise.chunk(0, ranks=on).layout((1, 3)),  # fewer rows than ranks
        shardwise.chunk(0, ranks=on).layout((0, 3)),
        shardwise.chunk(0, ranks=[*on, *on]).layout((7, 2)),  # several shards per rank
        shardwise.on_rank(on[-1]).layout((4, 4)),  # ranks without shards
        shardwise.on_rank(on[0]).layout(()),
        shardwise.block_cyclic(0, 1, ranks=on).layout((6, 2)),
    ]
    run_local(_rebuild, world_size, cases, ranks)


def _rows_of_unknown_size(rank: int) -> dict[str, Any]:
    rows = torch.full((rank + 1, 2), float(rank))
    shard = Shard.from_tensor_and_offsets(rows, [0, 0], rank)
    found: dict[str, Any] = {}
    for name, size in {"star": (None, 2), "list": ([None, None],)}.items():
        st = init_from_local_shards([shard], *size)
        found[name] = (tuple(st.shape), st.full_tensor()[:, 0].tolist())
    # several shards on a rank, and a rank without
    pair = [] if rank == 1 else [shard, Shard.from_tensor_and_offsets(rows + 10, [0, 0], rank)]
    st = init_from_local_shards(pair, None, 2)
    found["pairs"] = (tuple(st.shape), st.full_tensor()[:, 0].tolist())
    found["kept"] = shard.metadata.shard_offsets
    with pytest.raises(MetadataError, match="expected numbers of \\(6, 2\\)"):
        init_from_local_shards([shard], None, 3)
    odd = Shard.from_tensor_and_offsets(torch.zeros(1, rank + 1), [0, 0], rank)
    with pytest.raises(MetadataError, match="shards that differ in dim 0 only"):
        init_from_local_shards([odd], None, None)
    return found


def test_a_size_with_none_is_computed_from_rows_in_rank_order() -> None:
    for found in run_local(_rows_of_unknown_size, 3):
        assert found["star"] == found["list"] == ((6, 2), [0, 1, 1, 2, 2, 2])
        assert found["pairs"] == ((8, 2), [0, 10, 2, 2, 2, 12, 12, 12])
        assert found["kept"] == [0, 0]


def _five_rows_by_the_seeds_arithmetic(rank: int) -> Any:
    """torch.chunk of 5 rows over 4 ranks: the seed puts the empty chunk at row 6 of 5."""
    length = max(min(5, 2 * (rank + 1)) - 2 * rank, 0)
    tensor = torch.ones(length, 3)
    st: Any = init_from_local_shards(
        [Shard.from_tensor_and_offsets(tensor, [2 * rank, 0], rank)], 5, 3
    )
    spec = st.sharding_spec()
    return type(spec).__name__, st.full_tensor().sum().item(), st.clone().local_tensor().shape[0]


def test_an_empty_chunk_past_the_end_stands_at_the_end() -> None:
    found = run_local(_five_rows_by_the_seeds_arithmetic, 4)
    assert found == [("ChunkShardingSpec", 15.0, n) for n in (2, 2, 1, 0)]


def _metadata_is_a_view(rank: int) -> None:
    layout = shardwise.chunk(0, ranks=[1, 0]).layout((5, 3))
    st = init_from_local_shards(reversed_shards(layout, rank), 5, 3)
    held = st.metadata()
    before = list(held.shards_metadata)
    st.reshard(shardwise.chunk(1))
    assert held.shards_metadata == before
    assert held.size == (5, 3)
    now = st.metadata()
    now.shards_metadata.sort(key=lambda m: m.shard_offsets, reverse=True)
    now.shards_metadata.clear()
    assert len(st.metadata().shards_metadata) == 2
    shards = st.local_shards()
    shards.clear()
    assert len(st.local_shards()) == 1


def test_metadata_that_someone_holds_does_not_change_and_changes_nothing() -> None:
    run_local(_metadata_is_a_view, 2)


# ---- from one local tensor ----


def _from_one_tensor(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    make = ShardedTensor._init_from_local_tensor
    on = [f"rank:{r}/cpu" for r in ranks]
    boxes = [([0, 0], [5, 1], on[1]), ([0, 1], [5, 2], on[0])]
    cases: dict[tuple[int, ...], list[ShardingSpec]] = {
        (5, 3): [
            ChunkShardingSpec(0, on),
            ChunkShardingSpec(-1, on[::-1]),
            EnumerableShardingSpec([ShardMetadata(*box) for box in boxes]),
            shardwise.grid([1, 2], ranks=ranks),
            ReplicatedShardingSpec(on),
            shardwise.on_rank(ranks[1]),
        ],
        (1, 3): [ChunkShardingSpec(0, on)],
    }
    for size, specs in cases.items():
        for spec in specs:
            full = numbers(size)
            held = spec.layout(size).boxes_of(rank)
            local = full[held[0].slices()].clone() if held else torch.zeros(9).double()
            local.requires_grad_()
            st = make(local, spec, size, process_group=group)
            assert st.sharding_spec() is spec
            whole = st.full_tensor()
            assert torch.equal(whole, full)
            (whole * full).sum().backward()
            if held:
                assert st.local_tensor() is local
                assert local.grad is not None
                assert torch.equal(local.grad, full[held[0].slices()])


def test_one_local_tensor_makes_the_tensor_for_every_spec() -> None:
    run_local(_from_one_tensor, 4, [1, 3])


def _wrong_tensors(rank: int) -> list[str]:
    make = ShardedTensor._init_from_local_tensor
    rows, twice = shardwise.chunk(0), shardwise.chunk(0, ranks=[0, 1, 1])
    good = torch.zeros(2, 3)
    cases: list[tuple[Any, Any]] = [
        (torch.zeros(3, 2).t(), rows),
        (torch.zeros(2, 4), rows),
        (good.double(), rows),
        (good, "chunk"),
        (good, shardwise.chunk(0, ranks=[1, 0])),
        (torch.zeros(1, 3), twice),
        (good, shardwise.chunk(0, ranks=[0, 5])),
        (good.to_sparse(), rows),
    ]
    found = []
    for tensor, spec in cases:
        with set_check("always", timeout=5), pytest.raises((ValueError, TypeError)) as caught:
            make(*((tensor, spec) if rank else (good, rows)), 4, 3)
        found.append(str(caught.value))
    return found


def test_a_wrong_local_tensor_raises_on_all_ranks() -> None:
    phrases = [
        "local_tensor is not a contiguous Tensor",
        "Shard tensor size does not match with metadata.shard_lengths",
        "ranks differ in dtype",
        "Expecting ShardingSpec but got",
        "ranks differ in sharding_spec",
        "one tensor for a rank that has several shards",
        "Global rank 5 does not exist in input process group",
        "Only torch.strided layout is currently supported",
    ]
    for found in run_local(_wrong_tensors, 2):
        for message, phrase in zip(found, phrases, strict=True):
            assert phrase in message


def _with_the_seed(rank: int) -> list[tuple[str, str]]:
    """Metadata and spec kind that the seed and we say of the same shards."""
    import warnings

    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata as SeedMetadata

    seed: Any = sharded_tensor
    found = []
    for offsets, sizes in (
        ([3 * rank, 0], [3 - rank, 4]),
        ([0, rank], [5, 1 + 2 * rank]),
    ):
        place = f"rank:{rank}/cpu"
        shard = Shard(torch.zeros(sizes), ShardMetadata(offsets, sizes, place))
        theirs = seed.Shard(torch.zeros(sizes), SeedMetadata(offsets, sizes, place))
        ours = init_from_local_shards([shard], 5, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = seed.init_from_local_shards([theirs], 5, 4)
            for st in (ours, other):
                found.append((str(st._metadata), type(st._sharding_spec).__name__))
    return found


def test_metadata_and_spec_are_the_seeds() -> None:
    for found in run_local(_with_the_seed, 2):
        for ours, theirs in zip(found[::2], found[1::2], strict=True):
            assert ours == theirs
