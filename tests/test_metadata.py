from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.remote_device import _remote_device

from shardwise.errors import (
    ArgumentTypeError,
    DeviceError,
    MetadataError,
    PickleError,
    PlacementError,
)
from shardwise.geometry import Box
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import parse_placement, placement_at, rank_of
from shardwise.sharding_spec import DevicePlacementSpec


def test_shard_metadata_reads_and_prints_as_in_the_seed() -> None:
    shard = ShardMetadata(shard_offsets=[0, 4], shard_sizes=[2, 4], placement="rank:1/cpu")
    assert (shard.shard_offsets, shard.shard_sizes) == ([0, 4], [2, 4])
    assert shard.placement == _remote_device("rank:1/cpu")
    assert repr(shard) == (
        "ShardMetadata(shard_offsets=[0, 4], shard_sizes=[2, 4], placement=rank:1/cpu)"
    )
    assert shard.box == Box((0, 4), (2, 8))
    assert ShardMetadata([0], [1]).placement is None


def test_the_hash_of_shard_metadata_cannot_change() -> None:
    shard = ShardMetadata([0, 4], [2, 4], "rank:1/cpu")
    before = hash(shard)
    shard.placement = _remote_device("rank:2/cpu")
    assert hash(shard) == before
    assert shard != ShardMetadata([0, 4], [2, 4], "rank:1/cpu")
    assert shard == ShardMetadata((0, 4), (2, 4), "rank:2/cpu")
    with pytest.raises(ArgumentTypeError, match="Make a new ShardMetadata"):
        shard.shard_offsets = [1, 1]
    for change in ("append", "remove", "extend", "__setitem__", "__delitem__", "sort", "pop"):
        with pytest.raises(ArgumentTypeError, match="cannot change"):
            getattr(shard.shard_sizes, change)(1)
    assert hash(shard) == before
    assert len({shard, ShardMetadata([0, 4], [2, 4], "rank:2/cpu")}) == 1


def test_the_callers_lists_are_not_kept() -> None:
    offsets = [0, 4]
    shard = ShardMetadata(offsets, [2, 4])
    offsets[0] = 9
    assert shard.shard_offsets == [0, 4]


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ([0], [1, 2], "same number of elements: got 1 offsets and 2 sizes"),
        ([-1], [1], "shard_offsets should be >=0"),
        ([0], [-1], "shard_sizes should be >= 0"),
        ([0.5], [1], "shard_offsets: expected a list of whole numbers"),
        (3, [1], "shard_offsets: expected a list of whole numbers"),
    ],
)
def test_contradictory_shard_metadata_is_refused(offsets: Any, sizes: Any, message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        ShardMetadata(offsets, sizes)


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format]
)
def test_metadata_survives_pickle_and_deepcopy(memory_format: torch.memory_format) -> None:
    metadata = ShardedTensorMetadata(
        [ShardMetadata([0], [4], "rank:0/cuda:1"), ShardMetadata([4], [4])],
        torch.Size([8]),
        TensorProperties(torch.float16, requires_grad=True, memory_format=memory_format),
    )
    for again in (pickle.loads(pickle.dumps(metadata)), copy.deepcopy(metadata)):
        assert again == metadata
        assert again.shards_metadata[0] is not metadata.shards_metadata[0]
        assert isinstance(again.size, torch.Size)


def test_a_memory_format_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(PickleError, match=r"Invalid torch.memory_format"):
        pickle.dumps(TensorProperties(memory_format=torch.channels_last_3d))


def test_the_default_dtype_is_read_at_the_call() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert TensorProperties().dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert TensorProperties().dtype is torch.float32


def test_properties_of_a_tensor() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    expected = TensorProperties(torch.bfloat16, torch.strided, True, torch.contiguous_format, False)
    assert TensorProperties.create_from_tensor(tensor) == expected


def test_shards_can_be_sorted_in_place_and_compared() -> None:
    shards = [ShardMetadata([4], [4], "rank:1"), ShardMetadata([0], [4], "rank:0")]
    metadata = ShardedTensorMetadata(list(shards), torch.Size([8]), TensorProperties())
    metadata.shards_metadata.sort(key=lambda shard: shard.shard_offsets)
    assert metadata.shards_metadata == shards[::-1]


@pytest.mark.parametrize(
    ("text", "rank", "device"),
    [("rank:3/cuda:1", 3, "cuda:1"), ("rank:0", 0, "cpu"), ("rank:12/meta", 12, "meta")],
)
def test_placements_are_read_as_in_the_seed(text: str, rank: int, device: str) -> None:
    placement = parse_placement(text)
    assert placement == _remote_device(text)
    assert (rank_of(placement), placement.device()) == (rank, torch.device(device))
    assert parse_placement(placement) is placement


@pytest.mark.parametrize("text", ["", "rank:1/cpu/0", "rank:-1/cpu", "a:b/cpu"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match=r"Could not parse remote_device.*E\.g\. 'rank:0/cpu'"):
        parse_placement(text)


@pytest.mark.parametrize("text", ["rank:1/floppy", "rank:0/cuda:foo", "rank:0/cpu2"])
def test_an_unknown_device_is_the_runtime_error_of_torch_too(text: str) -> None:
    with pytest.raises(DeviceError, match="Invalid device string") as caught:
        parse_placement(text)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


def test_a_torch_device_is_a_placement() -> None:
    assert DevicePlacementSpec(torch.device("cuda:0")).device == _remote_device("cuda:0")
    assert parse_placement(torch.device("cpu")) == _remote_device("cpu")


def test_an_assigned_placement_is_read_from_text() -> None:
    shard = ShardMetadata([0], [4])
    shard.placement = "rank:3/cpu"  # type: ignore[assignment]  # read from text
    assert rank_of(shard.placement) == 3


def test_a_pickle_with_an_unknown_memory_format_is_refused() -> None:
    state = TensorProperties().__getstate__()
    with pytest.raises(PickleError, match="encoding: 7"):
        TensorProperties().__setstate__((*state[:3], 7, state[4]))


def test_ends_beyond_64_bits_are_refused() -> None:
    for offset, size in ((2**70, 4), (2**62, 2**62)):
        with pytest.raises(MetadataError, match=r"ends below 2\*\*63"):
            ShardMetadata([offset], [size])


def test_a_bare_cuda_is_the_ranks_own_gpu_where_gpus_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert placement_at(6, "cuda") == _remote_device("rank:6/cuda:2")
    assert placement_at(6, "cuda:3") == _remote_device("rank:6/cuda:3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun with two of the four
    assert placement_at(3, "cuda") == _remote_device("rank:3/cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert placement_at(6, "cuda") == _remote_device("rank:6/cuda")
