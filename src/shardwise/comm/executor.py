"""Carrying out plans: local shards of one layout become local shards of another.

[Note: a round] Receives are posted first. Messages are packed and sent one by one, so that the
first flies while the second is packed; what is one contiguous box is sent and received where it
is. Local boxes are copied while messages fly. Then messages are unpacked as they land, and
addends are reduced in order of term.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.arguments import cap
from shardwise.comm.agreement import agree
from shardwise.comm.alike import sort_out
from shardwise.comm.aside import Aside
from shardwise.comm.batch import Batch, batched
from shardwise.comm.checks import DEBUGGERS, is_debugging
from shardwise.comm.communicator import Flight
from shardwise.comm.leaving import Left, land_quietly, tell_those_who_wait
from shardwise.comm.load import Load, Transfer, is_usual, is_usual_out, load_of, new_tensors
from shardwise.comm.load_check import check_apart, check_list
from shardwise.comm.lowering import lower
from shardwise.comm.marks import mark_of
from shardwise.comm.message_memory import NewMemory, Slab
from shardwise.comm.pages import new_like, new_tensor
from shardwise.comm.process_group import communicator
from shardwise.comm.reducing import add_to, fill_identity, rescale
from shardwise.comm.short import run_short
from shardwise.comm.tracing import Recording, is_watched
from shardwise.transfer import RankProgram, TransferPlan, make_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from shardwise.comm.agreement import Agreement
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.message_memory import MessageMemory
    from shardwise.transfer.program import (
        MessagePart,
        PeerMessage,
        Reduction,
        Round,
    )

__all__ = ["Started", "agree_on_moves", "execute", "execute_all", "start_all"]

Loads = Sequence[Load | Batch]
_MANY = 8  # exchanges of one call, whose results are worth another thread


def execute(
    plan: TransferPlan,
    shards: Sequence[torch.Tensor],
    *,
    out: Sequence[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
    agreement: Agreement | None = None,
) -> list[torch.Tensor]:
    """This rank's shards in the plan's target layout; arguments as in `Transfer`.

    Every rank of `group` calls it, also those that hold nothing. The plan's ranks are global and
    must be in the group. `max_bytes` caps the staging. `agreement` is what all ranks are yet to
    agree on. No gradients: values only.
    """
    if device is None and max_bytes is None:
        members = communicator(group)
        known = members.rank_plans.get(id(plan))  # it holds the plan, so the id is the plan's own
        if (
            known is not None
            and known.short is not None
            and is_usual(shards, dtype, known)
            and (out is None or is_usual_out(out, shards, known, members.wire_device))
            and not is_watched()
            and not (DEBUGGERS and is_debugging())  # asked in any case when the plan became known
        ):
            shape = known.only_shape
            assert known.usual_dtype is not None
            try:
                if out is not None:
                    outputs = [tensor.detach() for tensor in out]
                elif shape is None:
                    outputs = new_tensors(
                        known.shapes.target, known.usual_dtype, members.wire_device
                    )
                elif shards:  # quicker than to say dtype and device
                    outputs = [new_like(shards[0], shape)]
                else:
                    outputs = [new_tensor(shape, known.usual_dtype, members.wire_device)]
            except Exception as problem:  # for want of memory
                if agreement is not None:
                    agreement.fail(problem)
                members.tell(problem)  # [Note: who raised] in `watch.py`
                raise
            run_short(known.short, shards, outputs, members, known.mark, agreement)
            return outputs
    if agreement is not None:
        agreement.reach()
        group = agreement.apart
    transfer = Transfer(plan, shards, out, dtype, device)
    return execute_all([transfer], group=group, max_bytes=max_bytes)[0]


def execute_all(
    transfers: Sequence[Transfer],
    *,
    group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
) -> list[list[torch.Tensor]]:
    """The same for many tensors of any dtypes in one exchange: one message per peer and round.

    Thousands of small ones are a few exchanges, see `comm/batch.py`.
    """
    return start_all(transfers, group=group, max_bytes=max_bytes).wait()


def start_all(
    transfers: Sequence[Transfer],
    *,
    group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
) -> Started:
    """The same, not waited for: the messages of the last exchange's first rounds may fly on.

    Ranks start and await exchanges in the same order.
    """
    members = communicator(group)
    problem = None
    work = _Work([])
    try:
        check_list(transfers, members.rank)
        max_bytes = cap(max_bytes)
        work = _divide(transfers, max_bytes, members)
        if any([transfer.out is not None for transfer in transfers]):
            check_apart(transfers, members.rank)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    if problem is not None or is_debugging():
        agree_on_moves(transfers, max_bytes, members, problem=problem)
    recording = _recording(transfers, members) if is_watched() else None
    moved = [(load.plan, load.dtype) for _, lot in work.exchanges for load in lot]
    mark = mark_of(moved, max_bytes, num_tensors=len(transfers)) if moved else None
    aside = Aside(is_large=len(work.exchanges) >= _MANY)
    left = Left(sum([len(program.rounds) for program, _ in work.exchanges]), mark)
    try:
        flying = _overlap(
            [
                _exchange(program, lot, work.results, members, aside, max_bytes, left)
                for program, lot in work.exchanges
            ]
        )
        lower(work.by_collective, members)
    except Exception as problem:
        has_left = not left.num_rounds and not work.by_collective
        tell_those_who_wait(problem, members, has_left=has_left)
        raise
    return Started(_ended(flying, aside, members), work.results, recording)


def _recording(transfers: Sequence[Transfer], members: Communicator) -> Recording | None:
    """For those who look; none of an exchange in which nothing is sent."""
    plans, rank = [transfer.plan for transfer in transfers], members.rank
    sizes = (
        sum(plan.bytes_sent(rank) for plan in plans),
        sum(plan.bytes_received(rank) for plan in plans),
        sum(plan.total_bytes for plan in plans),
    )
    return Recording("reshard", members, sizes) if sizes[-1] else None


class Started:
    """An exchange under way."""

    def __init__(
        self,
        flying: Iterator[None],
        results: list[list[torch.Tensor]],
        recording: Recording | None = None,
    ) -> None:
        self._flying = flying
        self._results = results
        self._recording = recording

    def wait(self) -> list[list[torch.Tensor]]:
        """Every transfer's local tensors, once all have landed; at every call the same."""
        next(self._flying, None)
        if self._recording is not None:
            self._recording.end()
            self._recording = None
        return self._results


class _Unpacking(NamedTuple):
    """What is to be done with a message that has landed."""

    boxes: list[torch.Tensor]
    targets: list[torch.Tensor]  # of the boxes that are no addends
    sources: list[torch.Tensor]  # these boxes


_Flying = tuple[Flight, list[_Unpacking]]


@contextmanager
def _landed(flight: Flight) -> Iterator[None]:
    """Messages that fly land also if something fails meanwhile."""
    try:
        yield
    except Exception:
        land_quietly(flight)
        raise


class _Work(NamedTuple):
    """Transfers by how they are carried out."""

    results: list[list[torch.Tensor]]  # of all of them, in their order; batches make theirs last
    exchanges: Sequence[tuple[RankProgram, Loads]] = ()  # one after the other
    by_collective: Sequence[Load] = ()


def _divide(transfers: Sequence[Transfer], max_bytes: int | None, members: Communicator) -> _Work:
    """Collectives for the transfers that are one, messages for the others, in batches.

    Under a cap: messages as they are. What is not in a batch gets its outputs.
    """
    if max_bytes is not None:
        loads = [load_of(transfers, number, members) for number in range(len(transfers))]
        results = [load.make_outputs() for load in loads]
        return _Work(results, [(_program(loads, max_bytes, members), loads)])
    groups = sort_out(transfers, members)
    results = [[] for _ in transfers]
    for group in groups:
        if not group.is_batched:
            for number, load in group.loads.items():
                results[number] = load.make_outputs()
    together = batched([group for group in groups if not group.by_collective], members)
    exchanges = [(_program(lot, None, members), lot) for lot in together]
    lowered = [group for group in groups if group.by_collective]
    by_collective = [group.loads[number] for group in lowered for number in group.numbers]
    return _Work(results, exchanges, by_collective)


def _overlap(exchanges: Sequence[Iterator[None]]) -> Iterator[None]:
    """Carries them out one after the other; while the last round of one flies, the next starts.

    So all ranks meet their messages in the order of the exchanges, whichever rounds they have.
    The last one is returned where it flies.
    """
    flying: Iterator[None] = iter(())
    for exchange in exchanges:
        try:
            next(exchange, None)
            next(flying, None)
        except Exception:
            for one in (flying, exchange):  # of which the other may fly; see `leaving.py`
                with suppress(Exception):
                    next(one, None)
            raise
        flying = exchange
    return flying


def _ended(flying: Iterator[None], aside: Aside, members: Communicator) -> Iterator[None]:
    """The rest of the exchange that flies, and of what is done aside."""
    try:
        yield from flying
        aside.catch_up()
    except Exception as problem:
        tell_those_who_wait(problem, members, has_left=True)
        raise


def _exchange(
    program: RankProgram,
    loads: Loads,
    results: list[list[torch.Tensor]],
    members: Communicator,
    aside: Aside,
    max_bytes: int | None,
    left: Left,
) -> Iterator[None]:
    """Stops once, where the messages of its last round fly."""
    batches = [load for load in loads if isinstance(load, Batch)]
    for batch in batches:
        batch.fill()
    rounds = _rounds(program, loads, members)
    memory = _memory(rounds, loads, members, max_bytes)
    for round_ in rounds[:-1]:
        _land(round_, _launch(round_, loads, members, memory, left), loads)
    for round_ in rounds[-1:]:
        flying = _launch(round_, loads, members, memory, left)
        yield
        _land(round_, flying, loads)
    for batch in batches:
        aside.call(partial(batch.hand_out, results))


def agree_on_moves(
    transfers: Sequence[Transfer],
    max_bytes: int | None,
    members: Communicator,
    *,
    problem: Exception | None = None,
) -> None:
    """What every exchange does first in debug mode, or if a rank has found something wrong."""
    agree("reshard", _agreed(transfers, max_bytes), group=members, hot=True, problem=problem)


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


def _program(loads: Loads, max_bytes: int | None, members: Communicator) -> RankProgram:
    if len(loads) == 1 and max_bytes is None:
        return loads[0].known.program()
    return make_schedule([load.plan for load in loads], max_bytes).program(members.rank)


def _rounds(program: RankProgram, loads: Loads, members: Communicator) -> Sequence[Round]:
    """The rounds, after what comes before the first."""
    for tensor, shard in program.cleared:
        pending = loads[tensor].plan.target.pending
        assert pending is not None
        fill_identity(loads[tensor].outputs[shard], pending)
    if not program.rounds:
        members.flight().launch()  # which is a meeting of all ranks where the backend needs one
    return program.rounds


def _memory(
    rounds: Sequence[Round], loads: Loads, members: Communicator, max_bytes: int | None
) -> MessageMemory:
    if max_bytes is None or len(rounds) == 1:
        return NewMemory(members.wire_device)
    sizes = [
        [one.nbytes for one in (*round_.receives, *round_.sends) if not _is_direct(one, loads)]
        for round_ in rounds
    ]
    return Slab(sizes, {load.dtype for load in loads}, members.wire_device)


def _launch(
    round_: Round, loads: Loads, members: Communicator, memory: MessageMemory, left: Left
) -> _Flying:
    """[Note: a round] up to where it has to wait; the round before is over."""
    flight = members.flight(left.mark)
    memory.next_round()
    staged: list[torch.Tensor | None] = []  # None: it lands where it belongs
    for message in round_.receives:
        place = _landing_place(message, loads)
        buffer = _buffer(message, loads, memory) if place is None else None
        landing = place if buffer is None else buffer
        assert landing is not None
        flight.receive(message.peer, landing)
        staged.append(buffer)
    for message in round_.sends:
        single = message.single
        if single is not None and loads[single[0]].is_on_wire:
            flight.send(message.peer, loads[single[0]].packed(single[1], memory))
        else:
            flight.send(message.peer, _packed(message, loads, memory, members.wire_device))
    flight.launch()
    left.num_rounds -= 1
    with _landed(flight):
        _copy(
            [loads[tensor].at(target) for tensor, _, target in round_.copies],
            [loads[tensor].at(source) for tensor, source, _ in round_.copies],
        )
        # Made while messages fly, so that what lands has its place.
        unpackings = [
            _unpacking(message, buffer, loads)
            for message, buffer in zip(round_.receives, staged, strict=True)
        ]
    return flight, unpackings


def _land(round_: Round, flying: _Flying, loads: Loads) -> None:
    """The rest of the round."""
    flight, unpackings = flying
    landed: set[int] = set()

    def boxes_of(number: int) -> list[torch.Tensor]:
        boxes, targets, sources = unpackings[number]
        if number not in landed:
            landed.add(number)
            flight.land(number)
            _copy(targets, sources)
        return boxes

    with _landed(flight):
        # Addends that are there are added while others fly.
        for reduction in round_.reductions:
            _reduce(reduction, boxes_of, loads[reduction.tensor])
        for number in range(len(unpackings)):
            boxes_of(number)
        for tensor, region, scale in round_.scales:
            rescale(loads[tensor].at(region), scale)
        flight.finish()


def _landing_place(message: PeerMessage, loads: Loads) -> torch.Tensor | None:
    """Where the message can land as it comes, if it can."""
    if message.single is None or not _is_direct(message, loads):
        return None
    tensor, place = message.single
    found = loads[tensor].at(place)
    return found if found.is_contiguous() else None  # a given output may have any strides


def _is_direct(message: PeerMessage, loads: Loads) -> bool:
    """Whether it is one run of memory where messages leave, if its tensor is row-major."""
    single = message.single
    return single is not None and single[1].is_contiguous and loads[single[0]].is_on_wire


def _buffer(message: PeerMessage, loads: Loads, memory: MessageMemory) -> torch.Tensor:
    if len(message.parts) == 1:
        part = message.parts[0]
        return loads[part.tensor].room(part.shape, memory)
    return memory.take((message.nbytes,), torch.uint8)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        foreach_copy(targets, sources)


def _packed(
    message: PeerMessage, loads: Loads, memory: MessageMemory, wire: torch.device
) -> torch.Tensor:
    buffer = _buffer(message, loads, memory)
    slots = _carve(buffer, message.parts, loads)
    _copy(slots, [loads[part.tensor].at(part.places[0]) for part in message.parts])
    if message.has_sums:
        for slot, part in zip(slots, message.parts, strict=True):
            load = loads[part.tensor]
            for place in part.places[1:]:
                assert load.plan.source.pending is not None
                add_to(slot, load.at(place).to(wire), load.plan.source.pending)
    return buffer


def _unpacking(message: PeerMessage, buffer: torch.Tensor | None, loads: Loads) -> _Unpacking:
    """For a message that lands in the buffer, or (None) where it belongs."""
    if buffer is None:
        return _Unpacking([], [], [])
    boxes = _carve(buffer, message.parts, loads)
    if len(boxes) == 1 and message.single is not None:
        return _Unpacking(boxes, [loads[message.single[0]].at(message.single[1])], boxes)
    placed = [(box, p) for box, p in zip(boxes, message.parts, strict=True) if p.places]
    targets = [loads[part.tensor].at(part.places[0]) for _, part in placed]
    return _Unpacking(boxes, targets, [box for box, _ in placed])


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
    for dtype, run in itertools.groupby(parts, key=lambda part: loads[part.tensor].dtype):
        same = list(run)
        shapes = [(*loads[part.tensor].lead, *part.shape) for part in same]
        sizes = list(map(math.prod, shapes))
        stop = at + sum(sizes) * dtype.itemsize
        flat = buffer[at:stop].view(dtype).split_with_sizes(sizes)
        found += [box.view(shape) for box, shape in zip(flat, shapes, strict=True)]
        at = stop
    return found
