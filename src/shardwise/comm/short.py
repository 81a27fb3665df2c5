"""Short exchanges: one tensor whose messages are one region each, with the least Python between.

The same rounds as in `executor.py`, for the plans that need no more, which most do: no packing of
several regions, no sums but of one region per rank. In an exchange of a few hundred microseconds
every call is seen, so what can be looked up beforehand is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardwise.comm.aside import Aside, has_spare_cores
from shardwise.comm.leaving import Left, land_quietly, tell_those_who_wait
from shardwise.comm.pages import new_like, packed
from shardwise.comm.reducing import reduce_into

if TYPE_CHECKING:
    import torch

    from shardwise.comm.agreement import Agreement
    from shardwise.comm.communicator import Communicator, Flight
    from shardwise.comm.marks import Mark
    from shardwise.geometry import ReduceOp
    from shardwise.transfer import RankProgram
    from shardwise.transfer.program import Addend, Index, PeerMessage, Place, Reduction, Round

__all__ = ["Short", "run_short", "short_of"]


class _Spot(NamedTuple):
    """A region of a local shard."""

    is_target: bool
    shard: int
    region: Index | None  # None: the whole shard


class _Receive(NamedTuple):
    peer: int
    shape: tuple[int, ...]
    spot: _Spot | None  # where it belongs; None: it is an addend
    is_direct: bool  # whether it lands there


class _Sum(NamedTuple):
    """Addends, in order: local regions, or the numbers of receives."""

    spot: _Spot
    addends: tuple[_Spot | int, ...]


_Copies = tuple[tuple[_Spot, _Spot], ...]  # to where, and from where


class _Round(NamedTuple):
    receives: tuple[_Receive, ...]
    sends: tuple[tuple[int, _Spot], ...]  # to whom, and what
    copies: _Copies
    sums: tuple[_Sum, ...]
    num_copied: int  # elements that are copied beside sends


_LARGE = 2 << 20  # bytes of copies that take far longer than to wake a thread
_LARGE_NUMEL = _LARGE // 16  # of the longest elements
_Held = tuple["Sequence[torch.Tensor]", "Sequence[torch.Tensor]"]  # shards, outputs
_Shapes = Sequence[tuple[int, ...]]


class Short(NamedTuple):
    """All that a rank does for a plan."""

    rounds: tuple[_Round, ...]
    op: ReduceOp | None  # of the sums


def short_of(program: RankProgram, op: ReduceOp | None, shapes: _Shapes) -> Short | None:
    """The program of one tensor in short, if all its rounds are such.

    `op` is what is pending, `shapes` are those of this rank's new shards.
    """
    if program.cleared or not program.rounds:
        return None
    rounds = [_short_round(round_, shapes) for round_ in program.rounds]
    if any(round_ is None for round_ in rounds):
        return None
    return Short(tuple(round_ for round_ in rounds if round_ is not None), op)


def _short_round(round_: Round, shapes: _Shapes) -> _Round | None:
    receives = [_receive(message) for message in round_.receives]
    sends = [(message.peer, message.single) for message in round_.sends]
    sums = [_sum(reduction) for reduction in round_.reductions]
    if round_.scales or None in receives or None in sums or any(one is None for _, one in sends):
        return None
    num_copied = sum(_numel(target, shapes) for _, _, target in round_.copies)
    return _Round(
        tuple(receive for receive in receives if receive is not None),
        tuple((peer, _spot(one[1])) for peer, one in sends if one is not None),
        tuple((_spot(target), _spot(source)) for _, source, target in round_.copies),
        tuple(one for one in sums if one is not None),
        num_copied if sends else 0,
    )


def _numel(place: Place, shapes: _Shapes) -> int:
    if place.region is None:
        return math.prod(shapes[place.shard])
    return math.prod(one.stop - one.start for one in place.region)


def _spot(place: Place) -> _Spot:
    return _Spot(place.is_target, place.shard, place.region)


def _receive(message: PeerMessage) -> _Receive | None:
    if len(message.parts) != 1:
        return None
    (part,) = message.parts
    if not part.places:
        return _Receive(message.peer, part.shape, None, is_direct=False)
    if message.single is None or not message.single[1].is_target:
        return None
    place = message.single[1]
    return _Receive(message.peer, part.shape, _spot(place), place.is_contiguous)


def _sum(reduction: Reduction) -> _Sum | None:
    addends = [_addend(addend) for addend in reduction.addends]
    if any(addend is None for addend in addends):
        return None
    return _Sum(_spot(reduction.target), tuple(one for one in addends if one is not None))


def _addend(addend: Addend) -> _Spot | int | None:
    if addend.message >= 0:
        return addend.message
    return _spot(addend.places[0]) if len(addend.places) == 1 else None


def run_short(
    short: Short,
    shards: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    members: Communicator,
    mark: Mark | None,
    agreement: Agreement | None = None,
) -> None:
    """Fills the outputs, which are contiguous and, as the shards, where messages leave.

    `agreement` as in `execute`: what it is about is reached before anything else is waited for.
    """
    left = Left(len(short.rounds), mark)
    try:
        _run_rounds(short, (shards, outputs), members, agreement, left)
    except Exception as problem:
        if not left.num_rounds:
            land_quietly(left.flight)
        tell_those_who_wait(problem, members, has_left=not left.num_rounds)
        raise


def _run_rounds(
    short: Short,
    held: _Held,
    members: Communicator,
    agreement: Agreement | None,
    left: Left,
) -> None:
    outputs = held[1]
    # Of the round before. An allocator that gets memory back and is asked for it again may take
    # more from the system all the same, so that rounds would not be what they are for.
    spare: list[torch.Tensor] = []
    early = None
    if agreement is not None:
        early = agreement.flight()
        if early is None:
            agreement.reach()
        if early is None or len(short.rounds) > 1:
            members = agreement.apart
    for receives, sends, copies, sums, num_copied in short.rounds:
        flight = left.flight = members.flight(left.mark) if early is None else early
        landings: list[torch.Tensor] = []
        is_staged = False
        for peer, shape, spot, is_direct in receives:
            if is_direct:
                assert spot is not None
                landing = outputs[spot.shard]
                if spot.region is not None:
                    landing = landing[spot.region]
            else:
                landing = _take(spare, shape) if spare else new_like(outputs[0], shape)
                is_staged = True
            landings.append(landing)
            flight.receive(peer, landing)
        aside: Aside | None = None
        if num_copied >= _LARGE_NUMEL and _is_large(num_copied, outputs[0]):
            aside = Aside(is_large=True)
            if not aside.is_alone:
                aside.call(partial(_copy, copies, held))
                copies = ()
        elif copies and receives and sends and not has_spare_cores():
            # Beside messages that cross, it would only keep gloo's threads from carrying them.
            _copy(copies, held)
            copies = ()
        try:
            # Regions are looked up here and not by `_at`, whose calls would be a third of all.
            for peer, (is_target, shard, region) in sends:
                sent = held[is_target][shard]
                flight.send(peer, packed(sent if region is None else sent[region]))
            flight.launch()
            left.num_rounds -= 1
            if early is not None:
                early.tell()
        finally:  # also when it raises: shards are the caller's, who may then do as he likes
            if aside is not None:
                aside.catch_up()
        try:
            _copy(copies, held)
        finally:  # also when it raises: what the others have told is heard now or never
            if early is not None:
                assert agreement is not None
                agreement.reach(early)
                early = None
        for one in sums:
            _add_up(one, held, landings, flight, short.op)
        if is_staged:
            _unpack(receives, landings, held, flight)
        flight.finish()
        if is_staged and len(short.rounds) > 1:
            named = zip(receives, landings, strict=True)
            spare = [landing for receive, landing in named if not receive.is_direct]


def _is_large(num_copied: int, output: torch.Tensor) -> bool:
    return output.is_cpu and num_copied * output.itemsize >= _LARGE


def _copy(copies: _Copies, held: _Held) -> None:
    shards, outputs = held
    for (_, to, there), (is_target, shard, region) in copies:
        target, source = outputs[to], (outputs if is_target else shards)[shard]
        target = target if there is None else target[there]
        target.copy_(source if region is None else source[region])


def _take(spare: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Memory of that shape, from what is there if it fits."""
    found, size = spare.pop(), math.prod(shape)
    if found.shape == shape:
        return found
    if found.numel() >= size:
        return found.view(-1)[:size].view(shape)
    spare.clear()
    return new_like(found, shape)


def _add_up(
    one: _Sum, held: _Held, landings: Sequence[torch.Tensor], flight: Flight, op: ReduceOp | None
) -> None:
    assert op is not None
    result = _at(one.spot, held)
    so_far: torch.Tensor | None = None
    for addend in one.addends:
        if isinstance(addend, int):
            flight.land(addend)
            box = landings[addend]
        else:
            box = _at(addend, held)
        so_far = box if so_far is None else reduce_into(result, so_far, box, op)
    assert so_far is not None
    if so_far is not result:
        result.copy_(so_far)


def _unpack(
    receives: Sequence[_Receive], landings: Sequence[torch.Tensor], held: _Held, flight: Flight
) -> None:
    """Copies what has landed beside where it belongs."""
    for number, (_, _, spot, is_direct) in enumerate(receives):
        if spot is not None and not is_direct:
            flight.land(number)
            _at(spot, held).copy_(landings[number])


def _at(spot: _Spot, held: _Held) -> torch.Tensor:
    is_target, shard, region = spot
    tensor = held[is_target][shard]
    return tensor if region is None else tensor[region]
