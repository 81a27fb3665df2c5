"""Carrying out plans: local shards of one layout become local shards of another.

[Note: a round] Receives are posted first. Messages are packed and sent one by one, so that the
first flies while the second is packed; what is one contiguous box is sent and received where it
is. Local boxes are copied while messages fly. Then messages are unpacked as they land, and
addends are reduced in order of term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.comm.agreement import agree
from shardwise.comm.batch import Batch, batched
from shardwise.comm.checks import should_check
from shardwise.comm.load import Load, Transfer
from shardwise.comm.load_check import check_apart, check_list
from shardwise.comm.lowering import COLLECTIVES, lower, pattern_of
from shardwise.comm.process_group import communicator
from shardwise.comm.reducing import add_to, fill_identity, rescale
from shardwise.transfer import RankProgram, TransferPlan, make_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.transfer.program import (
        MessagePart,
        PeerMessage,
        Reduction,
        Round,
    )

__all__ = ["execute", "execute_all"]

Loads = Sequence[Load | Batch]


def execute(
    plan: TransferPlan,
    shards: Sequence[torch.Tensor],
    *,
    out: Sequence[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
) -> list[torch.Tensor]:
    """This rank's shards in the plan's target layout; arguments as in `Transfer`.

    Every rank of `group` calls it, also those that hold nothing. The plan's ranks are global and
    must be in the group. `max_bytes` caps the staging. No gradients: values only.
    """
    transfer = Transfer(plan, shards, out, dtype, device)
    return execute_all([transfer], group=group, max_bytes=max_bytes)[0]


def execute_all(
    transfers: Sequence[Transfer],
    *,
    group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
) -> list[list[torch.Tensor]]:
    """The same for many tensors of any dtypes in one exchange: one message per peer and round."""
    members = communicator(group)
    program, problem = None, None
    loads: list[Load] = []
    try:
        check_list(transfers, members.rank)
        for transfer in transfers:
            loads.append(Load(transfer, members))
        if any([transfer.out is not None for transfer in transfers]):
            check_apart(transfers, members.rank)
        # Alone, or under a cap: messages as they are. Otherwise some may go together.
        if max_bytes is not None or (len(loads) == 1 and not COLLECTIVES.get(members.backend)):
            program = _program(loads, max_bytes, members)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    if problem is not None or should_check(hot=True):
        agree("reshard", _agreed(transfers, max_bytes), group=members, hot=True, problem=problem)
    if program is not None:
        _run(program, loads, members)
    else:
        _run_together(loads, members)
    return [load.outputs for load in loads]


def _run_together(loads: Sequence[Load], members: Communicator) -> None:
    """Collectives for the transfers that are one, messages for the others, in batches."""
    others, by_collective = loads, []
    if COLLECTIVES.get(members.backend):
        by_collective = [load for load in loads if pattern_of(load, members) is not None]
        others = [load for load in loads if pattern_of(load, members) is None]
    if others:
        batches = batched(others, members.wire_device)
        _run(_program(batches, None, members), batches, members)
        for batch in batches:
            if isinstance(batch, Batch):
                batch.finish()
    lower(by_collective, members)


def _agreed(transfers: Sequence[Transfer], max_bytes: int | None) -> dict[str, Any]:
    """What all ranks must pass alike."""
    if not isinstance(transfers, list | tuple):
        return {"max_bytes": max_bytes}
    found: dict[str, Any] = {"max_bytes": max_bytes, "number of tensors": len(transfers)}
    for number, transfer in enumerate(transfers):
        if isinstance(transfer, Transfer) and isinstance(transfer.plan, TransferPlan):
            name = f"{transfer.name!r}" if len(transfers) == 1 else f"{transfer.name!r} ({number})"
            found[f"{name} source layout"] = transfer.plan.source
            found[f"{name} target layout"] = transfer.plan.target
            given = [t for t in (transfer.shards, transfer.out) if isinstance(t, list | tuple)]
            dtypes = [getattr(tensor, "dtype", None) for listed in given for tensor in listed]
            found[f"{name} dtype"] = transfer.dtype or (dtypes[0] if dtypes else None)
    return found


# The single plans carried out last: found by identity, because a small exchange takes so little
# time that calls to hash and compare would be seen in it.
_recent: dict[tuple[int, int | None, int], tuple[TransferPlan, RankProgram]] = {}
_MOST_RECENT = 64


def _program(loads: Loads, max_bytes: int | None, members: Communicator) -> RankProgram:
    if len(loads) != 1:
        return make_schedule([load.plan for load in loads], max_bytes).program(members.rank)
    plan = loads[0].plan
    key = (id(plan), max_bytes, members.rank)
    found = _recent.get(key)  # which holds the plan, so its id is its own
    if found is None:
        program = plan.schedule(max_bytes).program(members.rank)
        if len(_recent) >= _MOST_RECENT:
            _recent.clear()
        found = _recent[key] = plan, program
    return found[1]


def _run(program: RankProgram, loads: Loads, members: Communicator) -> None:
    for tensor, shard in program.cleared:
        pending = loads[tensor].plan.target.pending
        assert pending is not None
        fill_identity(loads[tensor].outputs[shard], pending)
    if not program.rounds:
        members.flight().launch()  # which is a meeting of all ranks where the backend needs one
    for round_ in program.rounds:
        _run_round(round_, loads, members)


def _run_round(round_: Round, loads: Loads, members: Communicator) -> None:
    """[Note: a round]"""
    flight, wire = members.flight(), members.wire_device
    landing: list[torch.Tensor | None] = []  # None: where it belongs
    for message in round_.receives:
        single = message.single
        if single is not None and loads[single[0]].is_on_wire:
            place = loads[single[0]].at(single[1])
            if place.is_contiguous():
                flight.receive(message.peer, place)
                landing.append(None)
                continue
        buffer = _buffer(message, loads, wire)
        flight.receive(message.peer, buffer)
        landing.append(buffer)
    for message in round_.sends:
        single = message.single
        if single is not None and loads[single[0]].is_on_wire:
            flight.send(message.peer, loads[single[0]].at(single[1]).contiguous())
        else:
            flight.send(message.peer, _packed(message, loads, wire))
    flight.launch()
    _copy(
        [loads[tensor].at(target) for tensor, _, target in round_.copies],
        [loads[tensor].at(source) for tensor, source, _ in round_.copies],
    )
    heard: dict[int, list[torch.Tensor]] = {}  # boxes of the messages that have landed

    def boxes_of(number: int) -> list[torch.Tensor]:
        staged = landing[number]
        if staged is not None and number not in heard:
            flight.land(number)
            heard[number] = _unpack(round_.receives[number], staged, loads)
        return heard[number]

    # Addends that are there are added while others fly.
    for reduction in round_.reductions:
        _reduce(reduction, boxes_of, loads[reduction.tensor])
    for number, staged in enumerate(landing):
        if staged is not None:
            boxes_of(number)
        else:
            flight.land(number)
    for tensor, region, scale in round_.scales:
        rescale(loads[tensor].at(region), scale)
    flight.finish()


def _buffer(message: PeerMessage, loads: Loads, wire: torch.device) -> torch.Tensor:
    # One for each message: the allocator reuses small ones, whose pages are warm.
    if len(message.parts) == 1:
        part = message.parts[0]
        load = loads[part.tensor]
        return torch.empty((*load.lead, *part.shape), dtype=load.dtype, device=wire)
    return torch.empty(message.nbytes, dtype=torch.uint8, device=wire)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        foreach_copy(targets, sources)


def _packed(message: PeerMessage, loads: Loads, wire: torch.device) -> torch.Tensor:
    buffer = _buffer(message, loads, wire)
    slots = _carve(buffer, message.parts, loads)
    _copy(slots, [loads[part.tensor].at(part.places[0]) for part in message.parts])
    if message.has_sums:
        for slot, part in zip(slots, message.parts, strict=True):
            load = loads[part.tensor]
            for place in part.places[1:]:
                assert load.plan.source.pending is not None
                add_to(slot, load.at(place).to(wire), load.plan.source.pending)
    return buffer


def _unpack(message: PeerMessage, staged: torch.Tensor, loads: Loads) -> list[torch.Tensor]:
    """Boxes of a message that has landed; those that are no addends go where they belong."""
    slots = _carve(staged, message.parts, loads)
    placed = [(slot, p) for slot, p in zip(slots, message.parts, strict=True) if p.places]
    _copy(
        [loads[part.tensor].at(part.places[0]) for _, part in placed], [slot for slot, _ in placed]
    )
    return slots


def _reduce(
    reduction: Reduction, boxes_of: Callable[[int], list[torch.Tensor]], load: Load | Batch
) -> None:
    """The addends one after the other, in their order. [Note: groups] in `transfer/moves.py`."""
    result = load.at(reduction.target)
    is_first = True
    for addend in reduction.addends:
        if addend.message >= 0:
            boxes = [boxes_of(addend.message)[addend.part]]
        else:
            boxes = [load.at(place) for place in addend.places]
        for box in boxes:
            if is_first:
                result.copy_(box)
            else:
                assert load.plan.source.pending is not None
                add_to(result, box.to(result.device), load.plan.source.pending)
            is_first = False


def _carve(buffer: torch.Tensor, parts: Sequence[MessagePart], loads: Loads) -> list[torch.Tensor]:
    """The boxes of a packed message, as tensors that share its memory."""
    if len(parts) == 1:
        return [buffer]
    found: list[torch.Tensor] = []
    at = 0
    for dtype, run in groupby(parts, key=lambda part: loads[part.tensor].dtype):
        same = list(run)
        shapes = [(*loads[part.tensor].lead, *part.shape) for part in same]
        sizes = list(map(math.prod, shapes))
        stop = at + sum(sizes) * dtype.itemsize
        flat = buffer[at:stop].view(dtype).split_with_sizes(sizes)
        found += [box.view(shape) for box, shape in zip(flat, shapes, strict=True)]
        at = stop
    return found
