"""torch's own ShardedTensor as ours and back, on the same local tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed._shard import sharded_tensor as torchs
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import shardwise
from shardwise import sharded_tensor
from shardwise.errors import ArgumentTypeError, LayoutError
from shardwise.interop.mesh_layouts import have_same_data
from shardwise.testing.local_run import run_local
from shardwise.testing.strategies import examples, layouts, shapes
from shardwise.testing.tensors import random_tensor

if TYPE_CHECKING:
    from shardwise.geometry import Layout


@st.composite
def plain_layouts(draw: st.DrawFn) -> Layout:
    """Of elements that are there, each once."""
    shape = draw(shapes(max_size=5).filter(lambda sizes: 0 not in sizes))
    return draw(layouts(shape=shape, replicas=False, addends=False))


LAYOUTS = examples(plain_layouts(), 20)


def _back_and_forth(rank: int, listed: list[Layout]) -> None:
    for layout in listed:
        ours = random_tensor(layout, requires_grad=True)
        theirs = shardwise.to_torch_sharded_tensor(ours)
        assert isinstance(theirs, torchs.ShardedTensor)
        assert tuple(theirs.metadata().size) == layout.shape
        again = shardwise.from_torch_sharded_tensor(theirs)
        assert have_same_data(again.shard_layout, layout)
        assert torch.equal(again.detach().full_tensor(), ours.detach().full_tensor())
        held = {shard.tensor.data_ptr() for shard in ours.local_shards() if shard.tensor.numel()}
        assert {shard.tensor.data_ptr() for shard in theirs.local_shards()} == held
        again.full_tensor().square().sum().backward()
        pieces: list[Any] = [shard.tensor for shard in ours.local_shards()]
        for local in [piece for piece in pieces if piece.numel()]:
            assert torch.equal(local.grad, 2 * local.detach())


def test_every_layout_of_elements_that_are_there_once_goes_both_ways() -> None:
    run_local(_back_and_forth, 4, LAYOUTS)


def _made_by_torch(rank: int) -> None:
    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in (2, 0, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it says of itself that it is deprecated
        theirs = torchs.rand(spec, 4, 3)  # of which rank 1 has an empty shard past the end
    ours = shardwise.from_torch_sharded_tensor(theirs)
    assert ours.shape == (4, 3)
    for mine, other in zip(ours.local_shards(), theirs.local_shards(), strict=True):
        assert mine.tensor is other.tensor
    assert ours.full_tensor().shape == (4, 3)
    group: Any = dist.new_group([0, 2])
    if rank != 1:
        part = ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs = torchs.ones(part, 5, process_group=group)
        ours = shardwise.from_torch_sharded_tensor(theirs)
        assert torch.equal(ours.full_tensor(), torch.ones(5))
        assert tuple(ours.shard_layout.ranks) == (0, 2)
        back = shardwise.to_torch_sharded_tensor(ours)
        assert back._process_group is group


def test_what_torch_made_is_taken_with_its_group() -> None:
    run_local(_made_by_torch, 3)


def _refused(rank: int) -> None:
    def why(spec: str, *size: int) -> str:
        with pytest.raises(LayoutError) as caught:
            shardwise.to_torch_sharded_tensor(
                sharded_tensor.ones(shardwise.parse_spec(spec), *size)
            )
        return str(caught.value)

    assert "it has replicas" in why("replicate()", 4)
    assert "a sum is pending" in why("partial()", 4)
    assert "it has no elements" in why("chunk(0)", 0)
    assert "shardwise.reshard(st, shardwise.chunk(0))" in why("replicate()", 4)
    columns = sharded_tensor.ones(shardwise.chunk(0), 4, 3).t()
    with pytest.raises(LayoutError, match="a local tensor is not contiguous"):
        shardwise.to_torch_sharded_tensor(columns)
    shardwise.to_torch_sharded_tensor(columns.contiguous())
    with pytest.raises(ArgumentTypeError, match="expected a ShardedTensor, got Tensor"):
        shardwise.to_torch_sharded_tensor(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="got ShardedTensor"):
        shardwise.from_torch_sharded_tensor(columns)


def test_what_torch_cannot_hold_is_refused_with_the_reason() -> None:
    run_local(_refused, 2)
