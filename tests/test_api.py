"""The seed's functions at `shardwise.api`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import api
from shardwise.testing.local_run import run_local

TABLE = torch.arange(30.0).view(5, 6)


def _tensors(rank: int) -> None:
    assert shardwise._shard_tensor is api._shard_tensor
    assert shardwise.load_with_process_group is api.load_with_process_group
    for spec in (shardwise.chunk(0), shardwise.flat(), shardwise.on_rank(1)):
        mine = TABLE.clone() if rank == 2 else torch.empty(5, 6)
        st = api._shard_tensor(mine, spec, 2)
        assert st.sharding_spec() is spec
        assert torch.equal(st.full_tensor(), TABLE)
    group = dist.new_group([1, 2])
    if rank:
        spec = shardwise.chunk(1, ranks=[2, 1])
        st = api._shard_tensor(TABLE * rank, spec, src_rank=1, process_group=group)
        assert torch.equal(st.full_tensor(), TABLE * 2)


def _refusals(rank: int) -> None:
    def refused(match: str, tensor: Any, spec: Any, src_rank: int = 0) -> None:
        with pytest.raises(ValueError, match=match):
            api._shard_tensor(tensor, spec, src_rank)

    refused("does not match with src_rank", TABLE, shardwise.chunk(0), rank)
    refused("does not match with sharding_spec", TABLE, shardwise.chunk(min(rank, 1)))
    # Wrong on rank 0 alone, which says so; the others hear of it.
    mine = TABLE if rank else TABLE.t().contiguous().t()
    refused("not a contiguous Tensor", mine, shardwise.chunk(0))


def test_a_full_tensor_is_scattered_by_any_spec() -> None:
    run_local(_tensors, 3)


def test_the_messages_have_the_phrases_of_the_seed() -> None:
    run_local(_refusals, 3)
