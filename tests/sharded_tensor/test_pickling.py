"""Sharded tensors in files: all that they are comes back, where it was saved and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardwise
from shardwise.api import _get_current_process_group
from shardwise.comm.simulate import simulate
from shardwise.errors import LoadError, NotInitializedError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor import Shard as LocalShard
from shardwise.sharded_tensor import ShardedTensor, ShardedTensorBase, zeros
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    FixedShardingSpec,
    MeshShardingSpec,
    ShardingSpec,
)
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from pathlib import Path

TABLE = torch.arange(42.0).view(7, 6)


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _again(value: Any, **options: Any) -> Any:
    return torch.load(_saved(value), **options)  # weights_only=True, which is torch's default


def _sharded(spec: ShardingSpec, **options: Any) -> Any:
    return shardwise.from_callback(spec, (7, 6), lambda index: TABLE[index], **options)


def _specs(world_size: int) -> list[ShardingSpec]:
    """Of every kind: uneven, several shards on a rank, ranks with none, replicas, addends."""
    ranks = list(range(world_size))
    boxes = [ShardMetadata([0, 0], [7, 4], f"rank:{rank}/cpu") for rank in ranks]
    last = ShardMetadata([0, 4], [7, 2], f"rank:{world_size - 1}/cpu")
    return [
        shardwise.chunk(0),
        shardwise.chunk(-1, sizes=[6] + [0] * (world_size - 1), ranks=ranks[::-1]),
        shardwise.grid([2, 1], ranks=[0, world_size - 1]),
        shardwise.flat(),
        shardwise.fused(0, [3, 4]),
        shardwise.block_cyclic(0, 2, ranks=ranks[:2]),
        shardwise.on_rank(world_size - 1),
        shardwise.replicate(),
        shardwise.partial(),
        shardwise.partial("max", ranks=ranks[:2]),
        EnumerableShardingSpec([*boxes, last], replicas=True),
        MeshShardingSpec([ranks], [Replicate(), Shard(0)]),
        MeshShardingSpec([ranks], [Shard(1), Partial()]),
        FixedShardingSpec(shardwise.flat().layout((7, 6)), "cpu"),
    ]


def _same(found: Any, st: Any) -> None:
    assert type(found) is ShardedTensor
    assert found is not st
    assert (found.shape, found.dtype, found.device) == (st.shape, st.dtype, st.device)
    assert found.requires_grad == st.requires_grad
    assert found.is_leaf
    assert found.grad is None
    assert found.shard_layout == st.shard_layout
    assert found._state.process_group is st._state.process_group
    assert isinstance(found, nn.Parameter) == isinstance(st, nn.Parameter)
    for a, b in zip(found._state.carriers, st._state.carriers, strict=True):
        assert a.data_ptr() != b.data_ptr() or not a.numel()
        assert torch.equal(a, b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def _round_trips(rank: int) -> None:
    for spec in _specs(dist.get_world_size()):
        differentiable = spec.layout((7, 6)).pending in (None, "sum")
        st = _sharded(spec, dtype=torch.float64, requires_grad=differentiable)
        for found in (
            _again(st),
            torch.load(_saved(st), weights_only=False),
            pickle.loads(pickle.dumps(st)),
            _again([st])[0],
        ):
            _same(found, st)
            assert found.sharding_spec() == spec
    computed = shardwise.reshard(_sharded(shardwise.chunk(0)), shardwise.flat().layout((7, 6)))
    assert dist.get_world_size() == 1 or computed._state.spec is None
    _same(_again(computed), computed)
    empty = zeros(shardwise.chunk(0), 0, 3)
    _same(_again(empty), empty)
    assert torch.equal(_again(_sharded(shardwise.chunk(0))).full_tensor(), TABLE)
    _parts_of_a_file()


def _parts_of_a_file() -> None:
    """Parameters, attributes, one object twice, shared memory, gradients, what was computed."""
    st = _sharded(shardwise.chunk(0))
    parameter: Any = nn.Parameter(st)
    parameter.tag = {"rows": [1, 2]}
    parameter.grad = st.clone()
    module = nn.Linear(6, 7, bias=False)
    module.weight = parameter
    found = _again({"one": parameter, "two": parameter, "view": st, "module": module.state_dict()})
    _same(found["one"], parameter)
    assert found["one"] is found["two"]
    assert found["one"].tag == {"rows": [1, 2]}
    assert not found["view"].requires_grad
    for other in (found["view"], found["module"]["weight"]):
        for a, b in zip(other._state.carriers, found["one"]._state.carriers, strict=True):
            assert a.data_ptr() == b.data_ptr()
    whole = torch.load(_saved(module), weights_only=False)
    _same(whole.weight, parameter)
    # What autograd computed comes back as a leaf, as torch has it.
    _same(_again(parameter.clone()), parameter.clone().detach().requires_grad_())
    hook: Any = parameter.register_hook(lambda grad: None)
    with pytest.warns(UserWarning, match="hooks of a ShardedTensor are not saved"):
        _again(parameter)
    hook.remove()
    _again(parameter)  # which is no reason to warn any more
    shallow = copy.copy(parameter)
    assert type(shallow) is ShardedTensor
    assert isinstance(shallow, nn.Parameter)
    assert shallow.tag is parameter.tag
    assert shallow.grad is None
    for a, b in zip(shallow._state.carriers, parameter._state.carriers, strict=True):
        assert a is not b
        assert a.data_ptr() == b.data_ptr()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_comes_back_from_a_file(world_size: int) -> None:
    run_local(_round_trips, world_size)


def _from_disk(rank: int, folder: str) -> None:
    path = f"{folder}/rank{rank}.pt"
    st = _sharded(shardwise.chunk(0, ranks=[0, 1, 1]))
    torch.save({"st": st}, path)
    _same(torch.load(path, mmap=True)["st"], st)
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}):
        moved = torch.load(path, map_location=location)["st"]
        assert moved.is_meta
        assert moved.shard_layout == st.shard_layout
        assert [str(p) for p in moved.sharding_spec().placements] == [
            f"rank:{k}/meta" for k in (0, 1, 1)
        ]
    assert torch.load(path, map_location="cpu")["st"].sharding_spec() == st.sharding_spec()


def test_map_location_and_mmap_work_as_for_plain_tensors(tmp_path: Path) -> None:
    run_local(_from_disk, 3, str(tmp_path))


class _OwnSpec(ChunkShardingSpec):
    """A user's spec, of which torch knows nothing."""


def _strangers(rank: int) -> None:
    import __main__

    _OwnSpec.__module__, _OwnSpec.__qualname__ = "__main__", "_OwnSpec"
    __main__._OwnSpec = _OwnSpec  # as in a user's script
    own = _OwnSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    st = _sharded(own)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: GLOBAL __main__"):
        _again(st)
    found = torch.load(_saved(st), weights_only=False)
    _same(found, st)
    assert type(found.sharding_spec()) is _OwnSpec
    assert found.sharding_spec() == own


def test_a_users_own_spec_has_to_be_trusted() -> None:
    run_local(_strangers, 2)


def _in_groups(rank: int) -> list[str]:
    messages = []

    def refusal(value: Any, group: Any) -> str:
        file = _saved(value)
        with pytest.raises(LoadError) as caught, shardwise.load_with_process_group(group):
            torch.load(file)
        return str(caught.value)

    world = dist.group.WORLD
    st = _sharded(shardwise.chunk(0))
    pair = dist.new_group([0, 2, 3])  # rank 1 is left out
    messages.append(refusal(st, pair))
    subgroup, same = dist.new_group([1, 3]), dist.new_group([1, 3])
    if rank in (1, 3):
        spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:3/cpu", "rank:1/cpu"])
        st = _sharded(spec, process_group=subgroup)
        messages.append(refusal(st, world))
        file = _saved(st)
        with shardwise.load_with_process_group(same) as group:
            assert group is same is _get_current_process_group()
            found = torch.load(file)
        assert found._state.process_group is same
        assert torch.equal(found.full_tensor(), TABLE)
    assert _get_current_process_group() is world
    with (
        shardwise.load_with_process_group(pair),
        pytest.raises(LoadError, match="already set by previous"),
        shardwise.load_with_process_group(pair),
    ):
        pass
    assert _get_current_process_group() is world
    st = _sharded(shardwise.chunk(0))
    file = _saved(st)
    dist.destroy_process_group()
    for load in (_get_current_process_group, lambda: torch.load(file), lambda: _saved(st)):
        with pytest.raises(NotInitializedError, match="Need to initialize default process group"):
            load()
    return messages


def test_a_tensor_is_loaded_into_a_group_like_its_own() -> None:
    found = run_local(_in_groups, 4)
    assert "[rank 0] Local world size at save time was 4, but at load time was 3." in found[0][0]
    assert "Local rank at save time was 1, but at load time was -1. Each rank" in found[1][0]
    assert "Local rank at save time was 3, but at load time was 2. Each rank" in found[3][0]
    assert "load_with_process_group(group)" in found[3][0]
    assert "Local rank at save time was 0, but at load time was 1" in found[1][1]
    assert "Local rank at save time was 1, but at load time was 3" in found[3][1]


def _write(rank: int, folder: str) -> None:
    with open(f"{folder}/rank{rank}.pt", "wb") as file:
        file.write(_saved(_sharded(shardwise.chunk(0))).getvalue())


def _read(rank: int, folder: str, whose: int) -> str:
    with pytest.raises(LoadError) as caught:
        torch.load(f"{folder}/rank{whose}.pt")
    return str(caught.value)


def _read_at_the_same_place(rank: int, folder: str) -> str:
    """In a group of two, at the first place, as it was saved; but the world has grown."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank % 2:
        return ""
    with pytest.raises(LoadError) as caught, shardwise.load_with_process_group(groups[rank // 2]):
        torch.load(f"{folder}/rank0.pt")
    return str(caught.value)


def test_another_rank_or_another_world_is_refused(tmp_path: Path) -> None:
    run_local(_write, 2, str(tmp_path))
    (alone,) = run_local(_read, 1, str(tmp_path), 1)
    assert "Local rank at save time was 1, but at load time was 0" in alone
    (alone,) = run_local(_read, 1, str(tmp_path), 0)
    assert "Local world size at save time was 2, but at load time was 1" in alone
    first, _, third, _ = run_local(_read_at_the_same_place, 4, str(tmp_path))
    assert "Global world size at save time was 2, but at load time was 4" in first
    assert "Global rank at save time was 0, but at load time was 2" in third


def _damaged(rank: int) -> None:
    function, (saved,) = _sharded(shardwise.chunk(0)).__reduce_ex__(2)
    for changes, message in [
        ({"version": 99}, "expected version 1 of the format, got 99"),
        ({"tensors": []}, "expected shapes .* of one dtype, got "),
        ({"tensors": [torch.zeros(2, 2)]}, "The file is damaged"),
    ]:
        with pytest.raises(LoadError, match=message):
            function(saved | changes)


def test_a_damaged_file_is_refused() -> None:
    run_local(_damaged, 2)


@pytest.mark.parametrize("owners", [[0, 1], [1], []])
def test_a_tensor_of_no_group_comes_back_with_the_shards_of_any_ranks(owners: list[int]) -> None:
    listed = [ShardMetadata([4 * r, 0], [4 - r, 6], f"rank:{r}/cpu") for r in (0, 1)]
    whole = ShardedTensorMetadata(listed, TABLE.shape, TensorProperties(torch.float32))
    held = [LocalShard(TABLE[listed[r].box.slices()].clone(), listed[r]) for r in owners]
    st = ShardedTensorBase._init_from_local_shards_and_global_metadata(held, whole)
    for found in (_again(st), pickle.loads(pickle.dumps(st)), copy.deepcopy(st)):
        _same(found, st)
        assert found.metadata() == whole
        assert [shard.metadata for shard in found.local_shards()] == [s.metadata for s in held]
        with pytest.raises(RuntimeError, match="belongs to no process group"):
            found.full_tensor()


def _simulated(rank: int) -> None:
    st = _sharded(shardwise.chunk(0, ranks=[0, 1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pickle.loads(pickle.dumps(st))
    assert found.shard_layout == st.shard_layout
    assert torch.equal(found.full_tensor(), TABLE)


def test_simulated_ranks_load_into_their_own_world() -> None:
    simulate(_simulated, 3)
