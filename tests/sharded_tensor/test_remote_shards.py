"""Remote references to shards, with a real RPC group on loopback."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import AgreementError, ArgumentValueError, NotInitializedError, OpError
from shardwise.sharded_tensor import empty, full, zeros
from shardwise.sharded_tensor.api import _register_remote_shards, _sharded_tensor_map
from shardwise.sharding_spec import BlockCyclicShardingSpec, ChunkShardingSpec
from shardwise.testing.local_run import run_local
from shardwise.testing.rpc_workers import rpc_workers

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.sharded_tensor import ShardedTensor
    from shardwise.sharding_spec import ShardingSpec

TABLE = torch.arange(30.0).view(5, 6)


def _check(st: Any) -> None:
    """References lead to all other ranks that hold something, box by box, with their data."""
    layout, rank = st.shard_layout, dist.get_rank()
    dist.barrier(st._state.process_group)  # everybody has written its data
    found = st.remote_shards()
    assert list(found) == [other for other in layout.ranks if other != rank]
    for other, rrefs in found.items():
        assert [rref.owner().id for rref in rrefs] == [other] * len(layout.boxes_of(other))
        for rref, box in zip(rrefs, layout.boxes_of(other), strict=True):
            shard = rref.to_here()
            assert shard.metadata.box == box
            assert shard.metadata.placement.rank() == other
            assert shard.tensor.dtype == st.dtype
            assert torch.equal(shard.tensor, TABLE[box.slices()].to(st.dtype))
    dist.barrier(st._state.process_group)  # nobody goes on while others fetch


def _forgotten() -> None:
    gc.collect()
    assert _sharded_tensor_map == {}


def _made(spec: ShardingSpec, **options: Any) -> ShardedTensor:
    st = empty(spec, 5, 6, init_rrefs=True, **options)
    with torch.no_grad():
        st.copy_(TABLE)
    return st


def _references(rank: int, rendezvous: str) -> None:
    with rpc_workers(rendezvous, rank, 4):
        specs = [
            shardwise.chunk(0),  # the last rank holds nothing
            shardwise.chunk(1, sizes=[1, 3, 0, 2], ranks=[3, 1, 0, 2]),
            BlockCyclicShardingSpec(0, 1, ["trainer2/cpu", "trainer0/cpu"]),  # several on a rank
            shardwise.replicate(ranks=[1, 3]),
            shardwise.on_rank(2),
        ]
        for spec in specs:
            st = _made(spec, requires_grad=spec is specs[0])
            assert len(_sharded_tensor_map) == 1
            _check(st)
        _verbs(_made(specs[0]))
        _module(_made(specs[0]))
        _subgroup(rank)
        _pending(rank)
        del st
        _forgotten()
        _collected_while_made()


def _verbs(st: Any) -> None:
    assert st._state.remote in [reference() for reference in _sharded_tensor_map.values()]
    st.reshard(shardwise.chunk(1))
    _check(st)
    assert st.cpu() is st
    _check(st.double())
    # What shares the memory shares the references; a copy gets its own when it is asked.
    assert st.detach().remote_shards() is st.remote_shards()
    assert copy.copy(st).remote_shards() is st.remote_shards()
    for made in (st.clone(), copy.deepcopy(st), pickle.loads(pickle.dumps(st))):
        assert made.remote_shards() is not st.remote_shards()
        _check(made)
    computed: Any
    for computed in (shardwise.reshard(st, shardwise.chunk(0)), torch.isclose(st, st)):
        with pytest.raises(OpError, match="ShardedTensor created with init_rrefs=False"):
            computed.remote_shards()


def _module(st: ShardedTensor) -> None:
    module = nn.ModuleList([nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)])
    module[0].weight = module[1].weight = nn.Parameter(st)
    weight: Any = module[0].weight
    weight.grad = weight.detach() * 1  # which has no references
    del st
    _check(weight)
    module.double()
    assert module[0].weight is module[1].weight is weight
    _check(weight)
    assert isinstance(weight.grad, shardwise.ShardedTensor)
    with pytest.raises(OpError, match="init_rrefs=False"):
        weight.grad.remote_shards()
    with torch.no_grad():
        weight.data = weight.data.clone()
    _check(weight)
    weight.grad = None
    weight.data = _made(shardwise.chunk(1), dtype=torch.float64)
    _check(weight)


def _subgroup(rank: int) -> None:
    """Of the RPC world, only the group's ranks take part."""
    group = dist.new_group([3, 1])
    if rank in (1, 3):
        spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:3/cpu", "rank:1/cpu"])
        st = _made(spec, process_group=group)
        _check(st)
        assert list(st.remote_shards()) == [4 - rank]
        _check(st.half())
    dist.barrier()


def _pending(rank: int) -> None:
    st = zeros(shardwise.partial(ranks=[0, 1]), 2, 3, init_rrefs=True)
    (rref,) = st.remote_shards()[1] if rank != 1 else st.remote_shards()[0]
    assert rref.to_here().tensor.tolist() == [[0.0] * 3] * 2
    dist.barrier()


def _collected_while_made() -> None:
    """Tensors die by garbage collections in the middle of making others."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(8):
            st: Any = zeros(shardwise.chunk(0), 4, 2, init_rrefs=True)
            st.cycle = [st]
            ends = weakref.ref(st._state)
            del st
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert ends() is None
    assert _sharded_tensor_map == {}
    with pytest.raises(OpError, match="Could not find sharded_tensor_id: 0"):
        _register_remote_shards(0, [], 1)
    dist.barrier()


def test_every_rank_refers_to_the_shards_of_all_others(tmp_path: Path) -> None:
    run_local(_references, 4, str(tmp_path / "rpc"))


def _alone(rank: int, rendezvous: str) -> None:
    with rpc_workers(rendezvous, rank, 1):
        st = full(shardwise.chunk(0), (3,), 1, init_rrefs=True)
        assert st.remote_shards() == {}
        assert len(_sharded_tensor_map) == 1
        del st
        _forgotten()


def test_one_rank_has_nothing_to_refer_to(tmp_path: Path) -> None:
    run_local(_alone, 1, str(tmp_path / "rpc"))


def _message(kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        zeros(shardwise.chunk(0), 4, 2, init_rrefs=True)
    _forgotten()
    return str(caught.value)


def _refusals(rank: int, rendezvous: str) -> list[str]:
    with pytest.raises(OpError, match="ShardedTensor created with init_rrefs=False, no RRefs"):
        zeros(shardwise.chunk(0), 4, 2).remote_shards()
    messages = [_message(NotInitializedError)]
    # RPC on two of three ranks: what is wrong on each reaches the others.
    if rank < 2:
        with rpc_workers(rendezvous, rank, 2):
            messages.append(_message(ArgumentValueError))
            dist.barrier()
    else:
        messages.append(_message(NotInitializedError))
        dist.barrier()
    return messages


def test_what_rpc_lacks_is_said_on_all_ranks(tmp_path: Path) -> None:
    for rank, (stopped, partly) in enumerate(run_local(_refusals, 3, str(tmp_path / "rpc"))):
        assert f"[rank {rank}] RPC Framework needs to be initialized" in stopped
        expected = "RPC Framework" if rank == 2 else "RPC workers: expected one for each rank of"
        assert f"[rank {rank}] {expected}" in partly


def _swapped(rank: int, rendezvous: str) -> str:
    worker = 2 - rank
    with rpc_workers(rendezvous, worker, 3):
        message = _message(AgreementError if rank == 1 else ArgumentValueError)
        dist.barrier()
    return message


def test_other_ranks_in_rpc_than_in_the_group_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for rank, swapped in enumerate(run_local(_swapped, 3, str(tmp_path / "rpc"))):
        if rank == 1:  # which has the same, and hears of it
            assert "failed on other ranks: rank 0: ArgumentValueError: [rank 0] Def" in swapped
        else:
            assert "Default ProcessGroup and RPC ranks must be the same" in swapped
            assert f"got RPC rank {2 - rank}" in swapped
