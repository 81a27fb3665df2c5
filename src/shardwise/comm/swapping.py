"""Messages between ranks whose sizes follow from data, and not from layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.comm.tracing import Recording, is_watched, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.comm.communicator import Communicator

__all__ = ["gather_ragged", "swap"]


def swap(
    members: Communicator,
    receives: Sequence[tuple[int, torch.Tensor]],
    sends: Sequence[tuple[int, torch.Tensor]],
    *,
    op: str,
    total: Callable[[], int],
) -> None:
    """Fills and sends contiguous buffers, each with its peer; empty ones are left out.

    They are on the wire's device. Every rank of the group calls it. `op` is its name in a trace,
    for which `total` is asked: the bytes between all ranks.
    """
    if len(members.ranks) == 1:
        return
    receives = [(peer, buffer) for peer, buffer in receives if buffer.numel()]
    sends = [(peer, buffer) for peer, buffer in sends if buffer.numel()]
    recording = None
    if is_watched():
        sizes = [sum(b.nbytes for _, b in messages) for messages in (sends, receives)]
        recording = Recording(op, members, (sizes[0], sizes[1], total()))
    flight = members.flight()
    for peer, buffer in receives:
        flight.receive(peer, buffer)
    for peer, buffer in sends:
        flight.send(peer, buffer)
    flight.launch()
    flight.finish()
    if recording is not None:
        recording.end()


def gather_ragged(values: torch.Tensor, members: Communicator) -> list[torch.Tensor]:
    """Everybody's tensor of (n, ...) of one dtype, in order of group rank; lengths may differ."""
    if len(members.ranks) == 1:
        return [values]
    wire = members.wire_device
    mine = torch.tensor([len(values)], device=wire)
    lengths = mine.new_empty(len(members.ranks))
    with recorded("exchange row counts", members, 8):
        members.all_gather(lengths, mine)
    inner = values.shape[1:]
    found = [
        torch.empty((length, *inner), dtype=values.dtype, device=wire)
        for length in lengths.tolist()
    ]
    sent = values.to(wire).contiguous()
    found[members.ranks.group_rank(members.rank)] = sent
    peers = [rank for rank in members.ranks if rank != members.rank]
    swap(
        members,
        [(rank, found[members.ranks.group_rank(rank)]) for rank in peers],
        [(rank, sent) for rank in peers],
        op="gather rows",
        total=lambda: sum(one.nbytes for one in found) * len(peers),
    )
    return [one.to(values.device) for one in found]
