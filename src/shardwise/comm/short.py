"""Short exchanges: one tensor whose messages are one region each, with the least Python between.

The same round as in `executor.py`, for the plans that need no more, which most do: no packing of
several regions, no sums. In an exchange of a few hundred microseconds every call is seen, so what
can be looked up beforehand is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.comm.communicator import Flight
    from shardwise.transfer import RankProgram
    from shardwise.transfer.program import Index, Place

__all__ = ["ShortRound", "run_short", "short_round"]


class _Receive(NamedTuple):
    peer: int
    shard: int
    region: Index | None  # None: the whole shard
    shape: tuple[int, ...]
    is_direct: bool  # whether it lands where it belongs


class _Send(NamedTuple):
    peer: int
    shard: int
    region: Index | None


class _Copy(NamedTuple):
    to_shard: int
    to_region: Index | None
    from_shard: int
    from_region: Index | None


class ShortRound(NamedTuple):
    """All that a rank does for a plan."""

    receives: tuple[_Receive, ...]
    sends: tuple[_Send, ...]
    copies: tuple[_Copy, ...]


def short_round(program: RankProgram) -> ShortRound | None:
    """The program of one tensor in short, if it is no more than one such round."""
    if program.cleared or len(program.rounds) != 1:
        return None
    (round_,) = program.rounds
    received = [(message, message.single) for message in round_.receives]
    sent = [(message.peer, message.single) for message in round_.sends]
    places: list[Place] = [single[1] for _, single in received if single is not None]
    singles = len(places) == len(received) and all(single is not None for _, single in sent)
    if round_.reductions or round_.scales or not singles or not all(p.is_target for p in places):
        return None
    return ShortRound(
        tuple(
            _Receive(message.peer, p.shard, p.region, message.parts[0].shape, p.is_contiguous)
            for (message, _), p in zip(received, places, strict=True)
        ),
        tuple(
            _Send(peer, single[1].shard, single[1].region)
            for peer, single in sent
            if single is not None and not single[1].is_target
        ),
        tuple(
            _Copy(target.shard, target.region, source.shard, source.region)
            for _, source, target in round_.copies
        ),
    )


def run_short(
    round_: ShortRound,
    shards: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    flight: Flight,
) -> None:
    """Fills the outputs, which are contiguous and, as the shards, where messages leave."""
    staged: list[torch.Tensor | None] = []  # None: it lands where it belongs
    for peer, shard, region, shape, is_direct in round_.receives:
        target = outputs[shard]
        if is_direct:
            landing = target if region is None else target[region]
            staged.append(None)
        else:
            landing = target.new_empty(shape)
            staged.append(landing)
        flight.receive(peer, landing)
    for peer, shard, region in round_.sends:
        source = shards[shard]
        flight.send(peer, (source if region is None else source[region]).contiguous())
    flight.launch()
    for to_shard, to_region, from_shard, from_region in round_.copies:
        target, source = outputs[to_shard], shards[from_shard]
        source = source if from_region is None else source[from_region]
        (target if to_region is None else target[to_region]).copy_(source)
    for number, buffer in enumerate(staged):
        if buffer is not None:
            flight.land(number)
            _, shard, region, _, _ = round_.receives[number]
            target = outputs[shard]
            (target if region is None else target[region]).copy_(buffer)
    flight.finish()
