"""Tensors to test with: local shards of any layout, and the full tensor that shards stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.comm.process_group import communicator
from shardwise.comm.reducing import add_to, rescale
from shardwise.errors import LayoutError
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.transfer.program import Scale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout, ReduceOp

__all__ = ["assemble", "random_shards", "random_tensor"]


def random_shards(
    layout: Layout, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> dict[int, list[torch.Tensor]]:
    """Every rank's local shards with random content, equal on replicas.

    The numbers are small and whole, so that reducing them is exact in any order and every dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    values: dict[tuple[Box, int], torch.Tensor] = {}
    shards: dict[int, list[torch.Tensor]] = {rank: [] for rank in layout.ranks}
    for box, rank, term in layout:
        if (box, term) not in values:
            values[box, term] = _random(box.shape, dtype, layout.pending, generator)
        shards[rank].append(values[box, term].clone())
    return shards


def random_tensor(
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    requires_grad: bool = False,
    group: ProcessGroup | Communicator | None = None,
) -> ShardedTensor:
    """A sharded tensor of the content of `random_shards`. Every rank of the group calls it."""
    members = communicator(group)
    shards = random_shards(layout, dtype, seed=seed).get(members.rank, [])
    for shard in shards:
        shard.requires_grad_(requires_grad)
    state = make_state(layout, shards, group=members, dtype=dtype, requires_grad=requires_grad)
    return wrap(state)


def assemble(layout: Layout, shards: Mapping[int, Sequence[torch.Tensor]]) -> torch.Tensor:
    """The full tensor that everybody's shards stand for: pending terms reduced, in order.

    Raises if replicas are not equal bit for bit, or a shard is not of its box's shape.
    """
    dtype = next((tensor.dtype for held in shards.values() for tensor in held), None)
    full = torch.zeros(layout.shape, dtype=dtype)
    terms: dict[Box, dict[int, torch.Tensor]] = {}
    position = dict.fromkeys(layout.ranks, 0)
    for box, rank, term in layout:
        shard = shards[rank][position[rank]].detach().cpu()
        position[rank] += 1
        if tuple(shard.shape) != box.shape:
            raise LayoutError(f"shard {box}", rank=rank, expected=box.shape, got=tuple(shard.shape))
        known = terms.setdefault(box, {}).setdefault(term, shard)
        if not torch.equal(_bits(known), _bits(shard)):
            raise LayoutError(f"shard {box}, term {term}", rank=rank, expected="equal replicas")
    for box, addends in terms.items():
        in_order = [addends[term] for term in sorted(addends)]
        result = in_order[0].clone()
        for addend in in_order[1:]:
            assert layout.pending is not None
            add_to(result, addend, layout.pending)
        if layout.pending == "avg":
            rescale(result, Scale(1, len(in_order)))
        full[box.slices()] = result
    return full


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _random(
    shape: Sequence[int], dtype: torch.dtype, pending: ReduceOp | None, generator: torch.Generator
) -> torch.Tensor:
    low, high = (0, 2) if dtype == torch.bool else (1, 5)
    if pending == "product":
        low, high = 1, 3
    numbers = torch.randint(low, high, tuple(shape), generator=generator)
    if pending == "avg":
        numbers = numbers * 6  # whole after division by 1, 2 or 3
    return numbers.to(dtype)
