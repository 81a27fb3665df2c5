"""Specs in few words: `chunk(0)`, `grid([2, 2])`; and the same words read from text."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.arguments import is_whole_number, items, whole_numbers
from shardwise.errors import NotInitializedError, SpecError
from shardwise.placement import Placement, placement_at
from shardwise.sharding_spec.block_cyclic import BlockCyclicShardingSpec
from shardwise.sharding_spec.calls import parse_call
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.flat import FlatShardingSpec
from shardwise.sharding_spec.fused import FusedShardingSpec
from shardwise.sharding_spec.grid import GridShardingSpec
from shardwise.sharding_spec.replicated import PartialShardingSpec, ReplicatedShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "block_cyclic",
    "check_spec_text",
    "chunk",
    "flat",
    "fused",
    "grid",
    "on_rank",
    "parse_spec",
    "partial",
    "replicate",
    "simulated_world_size",
]

Device = str | torch.device
# Of the simulation that this code runs in; None outside of one.
simulated_world_size: ContextVar[int | None] = ContextVar("simulated_world_size", default=None)


def chunk(
    dim: int,
    sizes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    device: Device | None = None,
) -> ChunkShardingSpec:
    """Spec that cuts one dim, evenly or by `sizes`.

    Ranks and device default to those of the default process group.

    >>> chunk(0, ranks=[0, 1, 2]).layout((7, 4)).bytes_per_rank(itemsize=4)
    {0: 48, 1: 48, 2: 16}
    """
    return ChunkShardingSpec(dim, _placements(ranks, device), sizes)


def grid(
    splits: Sequence[int | Sequence[int]],
    ranks: Sequence[int | Sequence[int]] | None = None,
    device: Device | None = None,
) -> GridShardingSpec:
    """Spec that cuts several dims; a cell's item in `ranks` may be a list of replicas.

    Ranks and device default to those of the default process group.

    >>> grid([2, 1], ranks=[[0, 1], [2, 3]]).layout((4, 6))
    Layout((4, 6): grid 2x1, up to 2 replicas per cell, ranks 0-3)
    """
    per_cell = _default_ranks() if ranks is None else items(ranks, "ranks", of="one rank per cell")
    cells = [
        _place(cell, device) if is_whole_number(cell) else _placements(cell, device)
        for cell in per_cell
    ]
    return GridShardingSpec(splits, cells)


def replicate(
    ranks: Sequence[int] | None = None, device: Device | None = None
) -> ReplicatedShardingSpec:
    """Spec that puts a copy of the whole tensor on every rank.

    Ranks and device default to those of the default process group.
    """
    return ReplicatedShardingSpec(_placements(ranks, device))


def on_rank(rank: int, device: Device | None = None) -> ReplicatedShardingSpec:
    """Spec that puts the whole tensor on one rank; the device defaults as in `chunk`."""
    return ReplicatedShardingSpec([_place(rank, device)])


def partial(
    reduce_op: str = "sum", ranks: Sequence[int] | None = None, device: Device | None = None
) -> PartialShardingSpec:
    """Spec with one addend of a pending reduction per rank.

    Ranks and device default to those of the default process group.
    """
    return PartialShardingSpec(_placements(ranks, device), reduce_op)


def fused(
    dim: int,
    sections: Sequence[int | Sequence[int]],
    ranks: Sequence[int] | None = None,
    device: Device | None = None,
) -> FusedShardingSpec:
    """Spec that cuts each section of a dim (Q, K, V) over all ranks.

    Ranks and device default to those of the default process group.
    """
    return FusedShardingSpec(dim, sections, _placements(ranks, device))


def block_cyclic(
    dim: int, block: int, ranks: Sequence[int] | None = None, device: Device | None = None
) -> BlockCyclicShardingSpec:
    """Spec that deals blocks of a dim out in turn.

    Ranks and device default to those of the default process group.
    """
    return BlockCyclicShardingSpec(dim, block, _placements(ranks, device))


def flat(
    sizes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    device: Device | None = None,
) -> FlatShardingSpec:
    """Spec that cuts the flattened tensor, evenly or by `sizes`.

    Ranks and device default to those of the default process group.
    """
    return FlatShardingSpec(_placements(ranks, device), sizes)


_BY_NAME: dict[str, Callable[..., ShardingSpec]] = {
    make.__name__: make
    for make in (chunk, grid, replicate, on_rank, partial, fused, block_cyclic, flat)
}


def parse_spec(
    text: str, *, ranks: Sequence[int] | None = None, device: Device | None = None
) -> ShardingSpec:
    """Spec written as a call, such as "chunk(0, sizes=[5, 3])". Runs no code from `text`.

    `ranks` and `device` are used unless the text gives its own.

    >>> parse_spec("on_rank(2)", device="cpu").layout((3,))
    Layout((3,): whole, rank 2)
    """
    make, call = _bound(text)
    for name, default in (("ranks", ranks), ("device", device)):
        if name in call.signature.parameters:
            call.arguments.setdefault(name, default)
    return make(*call.args, **call.kwargs)


def check_spec_text(text: str) -> None:
    """Raises if `parse_spec` cannot read the text, whatever the ranks are."""
    _bound(text)


def _bound(text: str) -> tuple[Callable[..., ShardingSpec], inspect.BoundArguments]:
    """The function that the text calls, and its arguments by name."""
    call = parse_call(text, fix=_examples())
    if call.name not in _BY_NAME:
        raise SpecError(
            "spec",
            expected=f"one of {', '.join(sorted(_BY_NAME))}",
            got=call.name,
            fix=_examples(),
        )
    make = _BY_NAME[call.name]
    try:
        return make, inspect.signature(make).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise SpecError(f"spec {text!r}", got=str(error), fix=_examples()) from error


def _examples() -> str:
    return 'E.g. "chunk(0)", "chunk(0, sizes=[5, 3])", "grid([2, 2])", "fused(0, [8, 4, 4])".'


def _placements(ranks: object, device: Device | None) -> list[Placement]:
    listed = _default_ranks() if ranks is None else whole_numbers(ranks, "ranks")
    return [_place(rank, device) for rank in listed]


def _place(rank: object, device: Device | None) -> Placement:
    return placement_at(rank, _default_device() if device is None else device)


def _default_ranks() -> Sequence[int]:
    if (simulated := simulated_world_size.get()) is not None:
        return range(simulated)
    if not (dist.is_available() and dist.is_initialized()):
        raise NotInitializedError(
            "the spec's ranks are not known: Need to initialize default process group first",
            fix="To look at layouts, pass ranks=[0, 1, ...]. For tensors, start with torchrun and "
            "call torch.distributed.init_process_group(), or use shardwise.run_local(fn, "
            "world_size); on one process alone, shardwise.init_single().",
        )
    return range(dist.get_world_size())


def _default_device() -> str:
    """Kind of device that the default group works on: GPUs for NCCL, else the CPU."""
    if not (dist.is_available() and dist.is_initialized()):
        return "cpu"
    uses_nccl = "nccl" in str(dist.get_backend_config())
    return "cuda" if uses_nccl and torch.cuda.is_available() else "cpu"
