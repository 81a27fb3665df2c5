"""The attributes that callers of the seed assign: read, assigned, and in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded_tensor.shards import metadata_of, numbers, shards_of

import shardwise
from shardwise import Layout, run_local
from shardwise.errors import ArgumentTypeError, OpError
from shardwise.metadata import ShardMetadata
from shardwise.sharded_tensor import Shard, ShardedTensor, full, ones
from shardwise.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec


def _check_holds(st: ShardedTensor, layout: Layout, given: list[Shard]) -> None:
    assert st.shard_layout == layout
    assert st.shape == layout.shape
    assert st.dtype == torch.float64
    assert all(a.tensor is b.tensor for a, b in zip(st.local_shards(), given, strict=True))
    assert torch.equal(st.full_tensor().detach(), numbers(layout.shape))
    assert torch.equal((st.clone()).detach().full_tensor(), numbers(layout.shape))


def _every_order(rank: int, targets: list[ShardingSpec], size: tuple[int, ...]) -> None:
    """Assigned in every order, the three together make the tensor."""
    from itertools import permutations

    for spec in targets:
        layout = spec.layout(size)
        for order in permutations(["_local_shards", "_metadata", "_sharding_spec"]):
            st = ones(shardwise.chunk(0), 5, 3)
            shards = shards_of(layout, rank, requires_grad=True)
            values = {
                "_local_shards": shards,
                "_metadata": metadata_of(layout, requires_grad=True),
                "_sharding_spec": spec,
            }
            for name in order:
                setattr(st, name, values[name])
            assert st._sharding_spec is spec
            assert st.requires_grad
            _check_holds(st, layout, shards)
            whole = st.full_tensor()
            (whole * numbers(layout.shape)).sum().backward()
            for shard in shards:
                grad = shard.tensor.grad
                assert grad is not None
                assert torch.equal(grad, numbers(layout.shape)[shard.metadata.box.slices()])


def test_three_assignments_in_any_order_rebuild_the_tensor() -> None:
    rotated = ChunkShardingSpec(0, ["rank:1/cpu", "rank:2/cpu", "rank:0/cpu"])
    boxes = [([0, 0], [2, 3], "rank:2/cpu"), ([2, 0], [3, 3], "rank:2/cpu")]
    lone = EnumerableShardingSpec([ShardMetadata(*box) for box in boxes])
    columns = shardwise.chunk(1, ranks=[0, 1, 2])
    specs: list[ShardingSpec] = [rotated, columns, lone]
    run_local(_every_order, 3, specs, (5, 3))
    grids: list[ShardingSpec] = [columns, shardwise.grid([3, 1], ranks=[2, 1, 0])]
    run_local(_every_order, 3, grids, (7, 2))


def _in_between(rank: int) -> None:
    st = full(shardwise.chunk(0), (5, 3), 2.0, dtype=torch.float64)
    old = st.metadata()
    layout = shardwise.chunk(1).layout((5, 3))
    shards = shards_of(layout, rank)
    st._local_shards = shards
    # what was assigned is read, the rest as it was; everything else raises and says why
    assert [s.tensor is t.tensor for s, t in zip(st._local_shards, shards, strict=True)] == [True]
    assert st._metadata == old
    assert st._process_group is dist.group.WORLD
    for use in (
        lambda: st.full_tensor(),
        lambda: st.metadata(),
        lambda: st.local_shards(),
        lambda: st.clone(),
        lambda: repr(st),
        lambda: st.requires_grad,
    ):
        with pytest.raises(OpError, match="_local_shards assigned, which does not fit") as caught:
            use()
        assert "expected the boxes of this rank" in str(caught.value)
        assert "Assign what belongs to it" in str(caught.value)
    assert st.shape == (5, 3)
    metadata = metadata_of(layout)
    st._metadata = metadata
    _check_holds(st, layout, shards)
    assert isinstance(st._sharding_spec, ChunkShardingSpec)
    # the metadata is a view again, which changes nothing
    st._metadata.shards_metadata.clear()
    metadata.shards_metadata.clear()
    assert len(st.metadata().shards_metadata) == 2
    # a wrong assignment can be taken back
    st._sharding_spec = shardwise.chunk(0)
    with pytest.raises(OpError, match="_sharding_spec assigned"):
        st.full_tensor()
    st._sharding_spec = shardwise.chunk(1)
    _check_holds(st, layout, shards)


def test_in_between_the_tensor_says_what_is_missing() -> None:
    run_local(_in_between, 2)


def _one_alone(rank: int) -> None:
    layout = shardwise.chunk(0).layout((5, 3))
    st = ones(shardwise.chunk(0), 5, 3, dtype=torch.float64, requires_grad=True)
    seen: list[Any] = []
    st.register_hook(lambda grad: seen.append(grad.shape))
    # shards of the same boxes are enough: other values, another dtype
    shards = shards_of(layout, rank, requires_grad=True)
    given = list(shards)
    st._local_shards = shards
    shards.clear()  # the tensor has a list of its own
    _check_holds(st, layout, given)
    st.full_tensor().sum().backward()
    assert seen == [torch.Size([5, 3])]  # hooks follow
    halves = [Shard(s.tensor.detach().half(), s.metadata) for s in given]
    st._local_shards = halves
    assert st.dtype == torch.float16
    assert st.metadata().tensor_properties.dtype == torch.float16
    assert not st.requires_grad
    # a spec that says the same in other words
    same = EnumerableShardingSpec(metadata_of(layout).shards_metadata)
    st._sharding_spec = same
    assert st.sharding_spec() is same
    assert st.shard_layout == layout
    # metadata that says the same leaves the spec; another dtype waits for its shards
    st._metadata = st.metadata()
    assert st.sharding_spec() is same
    st._metadata = metadata_of(layout)
    with pytest.raises(OpError, match="dtype property is incompatible with tensor property"):
        st.full_tensor()
    st._local_shards = shards_of(layout, rank)
    assert torch.equal(st.full_tensor(), numbers(layout.shape))


def test_one_assignment_that_fits_takes_effect_at_once() -> None:
    run_local(_one_alone, 3)


def _another_size(rank: int) -> None:
    """A parameter of a module grows; the object stays the same, as do those who hold it."""
    module = torch.nn.Module()
    weight: Any = torch.nn.Parameter(ones(shardwise.chunk(0), 4, 3, dtype=torch.float64))
    module.register_parameter("weight", weight)
    layout = shardwise.chunk(0).layout((7, 3))
    shards = shards_of(layout, rank, requires_grad=True)
    weight._metadata = metadata_of(layout, requires_grad=True)
    with pytest.raises(OpError, match="_metadata assigned"):
        weight.sum()
    weight._local_shards = shards
    held: Any = module.weight
    assert held is weight
    assert isinstance(held, torch.nn.Parameter)
    assert weight.shape == (7, 3)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    _check_holds(module.get_parameter("weight"), layout, shards)  # type: ignore[arg-type]  # it is sharded


def test_the_size_may_change() -> None:
    run_local(_another_size, 2)


def _groups(rank: int) -> None:
    pair, other = dist.new_group([1, 3]), dist.new_group([0, 1])
    layout = shardwise.chunk(0, ranks=[3, 1]).layout((5, 3))
    st = ones(shardwise.chunk(0, ranks=[3, 1]), 5, 3)
    assert st._process_group is dist.group.WORLD
    if rank in (0, 2):
        return
    st._process_group = pair
    assert st._process_group is pair
    assert st.full_tensor().sum() == 15  # of which ranks 0 and 2 know nothing
    if rank == 1:
        st._process_group = other
        with pytest.raises(OpError, match="Global rank 3 does not exist in input process group"):
            st.full_tensor()
        assert st._process_group is other
    st._process_group = None
    assert st._process_group is None
    assert st.shard_layout == layout
    with pytest.raises(RuntimeError, match="belongs to no process group"):
        st.full_tensor()
    st._process_group = pair
    assert st.full_tensor().sum() == 15


def test_the_group_is_read_and_assigned() -> None:
    run_local(_groups, 4)


def _replicas_and_sums(rank: int) -> None:
    """Metadata does not tell replicas and addends apart; the spec does."""
    for spec in (shardwise.replicate(), shardwise.partial()):
        st = full(spec, (2, 3), 5.0, dtype=torch.float64)
        layout = st.shard_layout
        st._metadata = st.metadata()
        assert st.shard_layout == layout
        st._local_shards = st.local_shards()
        assert st.shard_layout == layout
        assert st.full_tensor().tolist() == [[5.0] * 3] * 2
        rows = shardwise.chunk(0)
        st._sharding_spec = rows
        st._local_shards = shards_of(rows.layout((2, 3)), rank)
        assert torch.equal(st.full_tensor(), numbers((2, 3)))
        # and back: replicas in the metadata overlap until the spec says that they are meant
        st._metadata = metadata_of(shardwise.replicate().layout((2, 3)))
        with pytest.raises(OpError, match="overlap"):
            st.full_tensor()
        whole = numbers((2, 3))
        st._local_shards = [Shard.from_tensor_and_offsets(whole, [0, 0], rank)]
        st._sharding_spec = shardwise.replicate()
        assert st.shard_layout.is_replicated
        assert st.local_tensor() is whole


def test_replicas_and_pending_sums_survive_their_own_metadata() -> None:
    run_local(_replicas_and_sums, 2)


def _wrong_kinds(rank: int) -> None:
    st = ones(shardwise.chunk(0), 5, 3)
    for name, value, expected in (
        ("_local_shards", torch.zeros(2), "a Shard"),
        ("_local_shards", None, "a list of Shard"),
        ("_metadata", [1], "a ShardedTensorMetadata"),
        ("_sharding_spec", "chunk", "a ShardingSpec"),
        ("_process_group", "world", "a torch.distributed.ProcessGroup"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"expected {expected}"):
            setattr(st, name, value)
    assert st.full_tensor().sum() == 15  # as if nothing had been tried


def test_what_can_never_fit_raises_at_once() -> None:
    run_local(_wrong_kinds, 1)
