"""What every spec promises: a cover without overlap, one truth in all its views."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ArgumentTypeError, ShardwiseError, TilingError
from shardwise.geometry import Box, Layout
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import rank_of
from shardwise.sharding_spec import (
    BlockCyclicShardingSpec,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    FlatShardingSpec,
    FusedShardingSpec,
    GridShardingSpec,
    PartialShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.testing.strategies import SPEC_KINDS, shapes, specs

Case = tuple[tuple[int, ...], ShardingSpec]


def _ranks(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def _cases(kind: type[ShardingSpec]) -> st.SearchStrategy[Case]:
    at_least = 1 if kind in (ChunkShardingSpec, FusedShardingSpec, BlockCyclicShardingSpec) else 0
    return shapes(min_ndim=at_least).flatmap(
        lambda shape: st.tuples(st.just(shape), specs(shape, kinds=[kind]))
    )


def _coverage(layout: Layout) -> dict[tuple[int, int], np.ndarray]:
    """Oracle: per (rank, term), how often each element is held."""
    held: dict[tuple[int, int], np.ndarray] = {}
    for box, rank, term in layout:
        counts = held.setdefault((rank, term), np.zeros(layout.shape, int))
        counts[box.slices()] += 1
    return held


@pytest.mark.parametrize("kind", SPEC_KINDS)
@given(data=st.data())
def test_every_element_is_held_and_by_no_rank_twice(
    kind: type[ShardingSpec], data: st.DataObject
) -> None:
    shape, spec = data.draw(_cases(kind))
    layout = spec.layout(shape)
    held = _coverage(layout)
    assert all((counts <= 1).all() for counts in held.values())
    total = sum(held.values(), np.zeros(shape, int))
    assert (total >= 1).all()
    if kind in (ChunkShardingSpec, FusedShardingSpec, BlockCyclicShardingSpec, FlatShardingSpec):
        assert (total == 1).all()


@pytest.mark.parametrize("kind", SPEC_KINDS)
@given(data=st.data())
def test_metadata_layout_and_devices_tell_the_same(
    kind: type[ShardingSpec], data: st.DataObject
) -> None:
    shape, spec = data.draw(_cases(kind))
    layout = spec.layout(shape)
    metadata = spec.build_metadata(torch.Size(shape), TensorProperties(dtype=torch.int8))
    assert metadata.size == torch.Size(shape)
    assert metadata.tensor_properties.dtype is torch.int8
    placed = sorted((shard.box, rank_of(shard.placement)) for shard in metadata.shards_metadata)
    assert placed == sorted((box, rank) for box, rank, _ in layout)
    for rank in range(4):
        assert spec.local_devices(shape, rank) == (torch.device("cpu"),) * len(
            layout.boxes_of(rank)
        )


@pytest.mark.parametrize("kind", SPEC_KINDS)
@given(data=st.data())
def test_specs_are_values(kind: type[ShardingSpec], data: st.DataObject) -> None:
    shape, spec = data.draw(_cases(kind))
    layout = spec.layout(shape)
    for again in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
        assert again == spec
        assert hash(again) == hash(spec)
        assert again.layout(shape) == layout
    assert spec.layout(torch.Size(shape)) == layout


@given(_cases(ChunkShardingSpec))
def test_chunks_follow_each_other_in_placement_order(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, ChunkShardingSpec)
    full = torch.arange(math.prod(shape)).reshape(shape)
    sizes = spec.sizes or [
        len(c) for c in torch.arange(shape[spec.dim]).chunk(len(spec.placements))
    ]
    expected = list(torch.split(full, list(sizes), spec.dim))
    shards = spec.build_metadata(full.shape, TensorProperties()).shards_metadata
    for shard, piece in zip(shards, expected, strict=False):
        assert torch.equal(full[shard.box.slices()], piece)
    assert all(shard.box.is_empty for shard in shards[len(expected) :])
    assert [shard.placement for shard in shards] == spec.placements


@given(_cases(GridShardingSpec))
def test_grid_cells_are_cuts_of_cuts(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, GridShardingSpec)
    pieces = [torch.arange(math.prod(shape)).reshape(shape)]
    for dim, split in enumerate(spec.splits):
        cut = []
        for piece in pieces:
            if isinstance(split, int):
                found = list(piece.chunk(split, dim))
                found += [piece.narrow(dim, piece.shape[dim], 0)] * (split - len(found))
            else:
                found = list(torch.split(piece, list(split), dim))
            cut += found
        pieces = cut
    full = torch.arange(math.prod(shape)).reshape(shape)
    shards = iter(spec.build_metadata(full.shape, TensorProperties()).shards_metadata)
    for piece, cell in zip(pieces, spec.placements, strict=True):
        for placement in cell if isinstance(cell, list) else [cell]:
            shard = next(shards)
            assert torch.equal(full[shard.box.slices()], piece)
            assert shard.placement == placement


@given(_cases(FusedShardingSpec))
def test_each_section_is_chunked_on_its_own(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, FusedShardingSpec)
    full = torch.arange(math.prod(shape)).reshape(shape)
    lengths = [n if isinstance(n, int) else sum(n) for n in spec.sections]
    shards = spec.build_metadata(full.shape, TensorProperties()).shards_metadata
    assert len(shards) == len(spec.sections) * len(spec.placements)
    for k, (part, section) in enumerate(
        zip(torch.split(full, lengths, spec.dim), spec.sections, strict=True)
    ):
        sizes = None if isinstance(section, int) else section
        alone = ChunkShardingSpec(spec.dim, spec.placements, sizes)
        own = alone.build_metadata(part.shape, TensorProperties()).shards_metadata
        ours = shards[k * len(own) : (k + 1) * len(own)]
        for shard, expected in zip(ours, own, strict=True):
            assert torch.equal(full[shard.box.slices()], part[expected.box.slices()])
            assert shard.placement == expected.placement


@given(_cases(BlockCyclicShardingSpec))
def test_blocks_are_dealt_out_in_turn(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, BlockCyclicShardingSpec)
    dim = spec.dim % len(shape)
    for box, rank, _ in spec.layout(shape):
        turn = box.start[dim] // spec.block % len(spec.placements)
        assert rank == spec.placements[turn].rank()
        assert box.start[dim] % spec.block == 0
        assert box.stop[dim] == min(box.start[dim] + spec.block, shape[dim])


@given(_cases(FlatShardingSpec))
def test_flat_ranges_follow_each_other(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, FlatShardingSpec)
    full = np.arange(math.prod(shape)).reshape(shape)
    metadata = spec.build_metadata(torch.Size(shape), TensorProperties())
    elements = [full[shard.box.slices()].ravel() for shard in metadata.shards_metadata]
    assert np.concatenate([*elements, []]).tolist() == list(range(full.size))
    chunks = spec.sizes or [len(c) for c in torch.arange(full.size).chunk(len(spec.placements))]
    held: dict[int | None, int] = {}
    for size, placement in zip(chunks, spec.placements, strict=False):
        held[placement.rank()] = held.get(placement.rank(), 0) + size
    assert spec.layout(shape).bytes_per_rank(1) == {r: n for r, n in sorted(held.items()) if n}


@given(_cases(PartialShardingSpec))
def test_partial_puts_one_addend_of_the_whole_on_each_rank(case: Case) -> None:
    shape, spec = case
    assert isinstance(spec, PartialShardingSpec)
    layout = spec.layout(shape)
    several = len(spec.placements) > 1 and 0 not in shape
    assert layout.pending == (spec.reduce_op if several else None)
    assert {box for box, _, _ in layout} == {Box.whole(shape)}
    assert layout.bar == ReplicatedShardingSpec(spec.placements).layout(shape)
    if several:
        assert len({term for _, _, term in layout}) == len(spec.placements)


def test_torch_reduce_ops_are_understood() -> None:
    op = torch.distributed.ReduceOp
    for torch_op, name in (
        (op.SUM, "sum"),
        (op.AVG, "avg"),
        (op.PRODUCT, "product"),
        (op.MAX, "max"),
    ):
        assert PartialShardingSpec(_ranks(0, 1), torch_op).reduce_op == name


def test_a_rank_may_appear_several_times_and_ranks_in_any_order() -> None:
    layout = ChunkShardingSpec(0, _ranks(2, 0, 2)).layout((6, 2))
    assert layout.boxes_of(2) == (Box((0, 0), (2, 2)), Box((4, 0), (6, 2)))
    rotated = ChunkShardingSpec(0, _ranks(1, 2, 0)).layout((6, 2))
    assert [rotated.boxes_of(r)[0].start[0] for r in range(3)] == [4, 0, 2]


def test_layouts_of_different_specs_are_equal_when_the_boxes_are() -> None:
    by_chunk = ChunkShardingSpec(0, _ranks(0, 1), sizes=[2, 3]).layout((5, 4))
    by_grid = GridShardingSpec([[2, 3], 1], _ranks(0, 1)).layout((5, 4))
    by_flat = FlatShardingSpec(_ranks(0, 1), sizes=[8, 12]).layout((5, 4))
    shards = [ShardMetadata([2, 0], [3, 4], "rank:1"), ShardMetadata([0, 0], [2, 4], "rank:0")]
    assert by_chunk == by_grid == by_flat == EnumerableShardingSpec(shards).layout((5, 4))


def test_what_the_caller_passed_in_stays_as_it_was() -> None:
    placements, sizes = _ranks(0, 1), [2, 3]
    shards = [ShardMetadata([0], [5], "rank:0/cpu")]
    specs = [ChunkShardingSpec(0, placements, sizes), EnumerableShardingSpec(shards)]
    before = [spec.layout((5,)) for spec in specs]
    assert placements == ["rank:0/cpu", "rank:1/cpu"]
    placements[0], sizes[0] = "rank:7/cpu", 9
    shards[0].placement = None
    shards.append(ShardMetadata([5], [1]))
    assert [spec.layout((5,)) for spec in specs] == before
    chunk = specs[0]
    assert isinstance(chunk, ChunkShardingSpec)
    with pytest.raises(ArgumentTypeError, match="cannot change"):
        chunk.placements.append(chunk.placements[0])


def test_a_placement_assigned_in_a_spec_counts() -> None:
    spec = EnumerableShardingSpec([ShardMetadata([0], [5], "rank:0/cpu")])
    assert spec.layout((5,)).ranks == (0,)
    spec.shards[0].placement = ShardMetadata([], [], "rank:3/meta").placement
    assert spec.layout((5,)).ranks == (3,)
    assert spec.local_devices((5,), 3) == (torch.device("meta"),)


def test_devices_follow_the_order_of_the_local_shards() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cuda:1", "rank:1/cpu", "rank:0/meta"])
    assert spec.local_devices((6,), 0) == (torch.device("cuda:1"), torch.device("meta"))
    backwards = EnumerableShardingSpec(
        [ShardMetadata([3], [3], "rank:0/meta"), ShardMetadata([0], [3], "rank:0/cuda:1")]
    )
    assert backwards.local_devices((6,), 0) == (torch.device("cuda:1"), torch.device("meta"))


@dataclass
class MiddleSpec(ShardingSpec):
    """A user's spec, written for the seed: one rank in the middle, another around it."""

    margin: int

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        size = tensor_sizes[0]
        ends = [
            (0, self.margin, 1),
            (self.margin, size - self.margin, 0),
            (size - self.margin, size, 1),
        ]
        shards = [ShardMetadata([a], [b - a], f"rank:{rank}/cpu") for a, b, rank in ends]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def test_a_users_own_spec_has_a_layout_and_devices() -> None:
    spec = MiddleSpec(2)
    layout = spec.layout((9,))
    assert [str(box) for box in layout.boxes_of(1)] == ["[0:2]", "[7:9]"]
    assert spec.local_devices((9,), 1) == (torch.device("cpu"),) * 2
    spec.margin = 3  # a user's spec may change: nothing is kept
    assert [str(box) for box in spec.layout((9,)).boxes_of(1)] == ["[0:3]", "[6:9]"]
    with pytest.raises(ShardwiseError) as caught:
        MiddleSpec(6).layout((9,))
    assert "MiddleSpec(margin=6)" in "".join(caught.value.__notes__)


def test_a_user_spec_that_builds_overlapping_metadata_is_refused() -> None:
    class Twice(ShardingSpec):
        def build_metadata(
            self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
        ) -> ShardedTensorMetadata:
            shards = [ShardMetadata([k], [2], f"rank:{k}/cpu") for k in range(2)]
            return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    with pytest.raises(TilingError, match=r"\[0:2\] on rank 0 and \[1:3\] on rank 1 overlap"):
        Twice().layout((3,))


def test_replicas_of_enumerated_boxes_need_the_flag() -> None:
    twice = [ShardMetadata([0], [4], f"rank:{rank}/cpu") for rank in range(2)]
    with pytest.raises(ValueError, match=r"overlap.*pass replicas=True"):
        EnumerableShardingSpec(twice)
    assert EnumerableShardingSpec(twice, replicas=True).layout((4,)).is_replicated
    with pytest.raises(ValueError, match="overlap"):
        EnumerableShardingSpec([*twice, ShardMetadata([3], [4], "rank:2/cpu")], replicas=True)


def test_a_subclass_that_says_its_own_metadata_is_believed() -> None:
    class AllOnFive(ChunkShardingSpec):
        def build_metadata(
            self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
        ) -> ShardedTensorMetadata:
            shard = ShardMetadata([0], list(tensor_sizes), "rank:5/cpu")
            return ShardedTensorMetadata([shard], tensor_sizes, tensor_properties)

    assert AllOnFive(0, _ranks(0, 1)).layout((4,)).ranks == (5,)
    assert ChunkShardingSpec(0, _ranks(0, 1)).layout((4,)).ranks == (0, 1)


@dataclass
class SeedArithmetic(ShardingSpec):
    """A user's spec that copies the seed's arithmetic, and has fields of likely names."""

    devices: list[str]
    pieces: int

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        length = -(-tensor_sizes[0] // self.pieces)
        shards = [
            ShardMetadata([length * k], [max(min(length, tensor_sizes[0] - length * k), 0)], device)
            for k, device in enumerate(self.devices)
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def test_a_users_empty_chunks_past_the_end_lie_at_the_end() -> None:
    layout = SeedArithmetic(_ranks(0, 1, 2, 3), 4).layout((5,))
    assert layout == ChunkShardingSpec(0, _ranks(0, 1, 2, 3)).layout((5,))


def test_layouts_are_kept_per_shape_but_not_for_ever_nor_in_pickles() -> None:
    spec = ChunkShardingSpec(0, _ranks(0, 1))
    assert spec.layout((4,)) is spec.layout(torch.Size([4]))
    first = spec.layout((4,))
    for size in range(100):
        spec.layout((size, 2))
    assert len(spec.__dict__["_layouts"]) <= 64
    assert spec.layout((4,)) == first
    assert "_layouts" not in spec.__getstate__()


def test_devices_of_addends_follow_their_terms() -> None:
    spec = PartialShardingSpec(["rank:0/meta", "rank:0/cpu"])
    assert spec.local_devices((4,), 0) == (torch.device("meta"), torch.device("cpu"))
