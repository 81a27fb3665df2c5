"""Plans that are carried out by a collective of the backend: one table, by backend.

On gloo exact messages beat every collective that was measured, so its row is empty. NCCL has ring
and tree algorithms for the patterns in its row. Its all-to-all is a group of sends and receives,
which is what a round of messages is there anyway.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from shardwise.comm.flights import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.load import Load
    from shardwise.geometry import Box
    from shardwise.transfer.patterns import Pattern

__all__ = ["COLLECTIVES", "lower", "pattern_of"]

# Backend -> patterns of plans that it carries out by a collective.
COLLECTIVES: Mapping[str, frozenset[Pattern]] = {
    "gloo": frozenset(),
    "nccl": frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"}),
}

# What NCCL can reduce.
_REDUCIBLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


def pattern_of(load: Load, members: Communicator) -> Pattern | None:
    """The collective by which the backend carries out this transfer, or None."""
    found = load.known.pattern
    if found not in COLLECTIVES.get(members.backend, ()):
        return None
    op = load.plan.source.pending
    return None if op is not None and load.dtype not in _REDUCIBLE else found


def lower(loads: Sequence[Load], members: Communicator) -> None:
    """Carries out transfers of which every one has a `pattern_of`; tensors share a collective.

    All ranks call it with transfers of the same plans and dtypes in the same order.
    """
    together: dict[tuple[Pattern | None, object], list[Load]] = defaultdict(list)
    for load in loads:
        pattern, source = pattern_of(load, members), load.plan.source
        alike: object = (source.pending, load.dtype) if source.pending else None
        together[pattern, source.ranks[0] if pattern == "broadcast" else alike].append(load)
    for (pattern, _), listed in together.items():
        assert pattern is not None
        _RUN[pattern](listed, members)


def _all_gather(loads: Sequence[Load], members: Communicator) -> None:
    wire = members.wire_device
    mine = _joined([as_bytes(load.shards[0].to(wire).contiguous()) for load in loads])
    if len(loads) == 1 and _is_in_order(loads[0], members):
        members.all_gather(as_bytes(loads[0].outputs[0]), mine)
        return
    everything = torch.empty(len(members.ranks) * len(mine), dtype=torch.uint8, device=wire)
    members.all_gather(everything, mine)
    for rank, part in zip(members.ranks, everything.chunk(len(members.ranks)), strict=True):
        sizes = [load.shards[0].nbytes for load in loads]
        for load, piece in zip(loads, part.split_with_sizes(sizes), strict=True):
            (box,) = load.plan.source.boxes_of(rank)
            load.outputs[0][box.slices()].copy_(_typed(piece, load.dtype).view(box.shape))


def _is_in_order(load: Load, members: Communicator) -> bool:
    """Whether the pieces, in order of group rank, are the output's memory as it lies there."""
    output = load.outputs[0]
    if not output.is_contiguous() or output.device != members.wire_device:
        return False
    boxes = [load.plan.source.boxes_of(rank)[0] for rank in members.ranks]
    return all(_is_flat_range(box, load.plan.source.shape, k) for k, box in enumerate(boxes))


def _is_flat_range(box: Box, shape: Sequence[int], number: int) -> bool:
    """Whether the box is piece `number` of the flattened tensor cut into pieces of its size."""
    first = last = 0
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return first == number * box.volume and last + 1 - first == box.volume


def _broadcast(loads: Sequence[Load], members: Communicator) -> None:
    wire, source = members.wire_device, loads[0].plan.source.ranks[0]
    for load in loads:
        if members.rank == source:
            load.outputs[0].copy_(load.shards[0])
    outputs = [load.outputs[0] for load in loads]
    if len(loads) == 1 and outputs[0].is_contiguous() and outputs[0].device == wire:
        members.broadcast(as_bytes(outputs[0]), source)
        return
    buffer = _joined([as_bytes(output.to(wire).contiguous()) for output in outputs], copy=True)
    members.broadcast(buffer, source)
    sizes = [output.nbytes for output in outputs]
    for output, part in zip(outputs, buffer.split_with_sizes(sizes), strict=True):
        output.copy_(_typed(part, output.dtype).view(output.shape))


def _all_reduce(loads: Sequence[Load], members: Communicator) -> None:
    op = loads[0].plan.source.pending
    assert op is not None
    wire = members.wire_device
    outputs = [load.outputs[0] for load in loads]
    for load in loads:
        load.outputs[0].copy_(load.shards[0])
    if len(loads) == 1 and outputs[0].is_contiguous() and outputs[0].device == wire:
        members.all_reduce(outputs[0].view(-1), op)
        return
    buffer = torch.cat([output.reshape(-1).to(wire) for output in outputs])
    members.all_reduce(buffer, op)
    sizes = [output.numel() for output in outputs]
    for output, part in zip(outputs, buffer.split_with_sizes(sizes), strict=True):
        output.copy_(part.view(output.shape))


def _reduce_scatter(loads: Sequence[Load], members: Communicator) -> None:
    op = loads[0].plan.source.pending
    assert op is not None
    wire = members.wire_device
    pieces = []
    for rank in members.ranks:
        for load in loads:
            (box,) = load.plan.target.boxes_of(rank)
            pieces.append(load.shards[0][box.slices()].reshape(-1).to(wire))
    mine = torch.cat(pieces)
    result = torch.empty(len(mine) // len(members.ranks), dtype=mine.dtype, device=wire)
    members.reduce_scatter(result, mine, op)
    sizes = [load.outputs[0].numel() for load in loads]
    for load, part in zip(loads, result.split_with_sizes(sizes), strict=True):
        load.outputs[0].copy_(part.view(load.outputs[0].shape))


def _joined(parts: Sequence[torch.Tensor], *, copy: bool = False) -> torch.Tensor:
    return parts[0] if len(parts) == 1 and not copy else torch.cat(list(parts))


def _typed(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Flat bytes as elements; a copy where they do not lie at a multiple of the element's size."""
    return (piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()).view(dtype)


_RUN: Mapping[Pattern, Callable[[Sequence[Load], Communicator], None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
}
