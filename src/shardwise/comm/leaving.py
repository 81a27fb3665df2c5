"""What a rank owes the others when something fails in the middle of an exchange.

As long as some of its messages have not left, others wait for them: they are told, and the group
is over ([Note: who raised] in `watch.py`). Once all have left, nobody waits. Then what the others
send lands, although it is of no use: gloo reads nothing more on a connection with a message that
nobody waits for. So the group goes on.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.comm.heard import note_heard

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator, Flight
    from shardwise.comm.marks import Mark

__all__ = ["Left", "land_quietly", "tell_those_who_wait"]


@dataclass(slots=True)
class Left:
    """What of an exchange this rank has yet to do."""

    num_rounds: int  # whose messages have not left
    mark: Mark | None  # by which they go
    flight: Flight | None = None  # of the last one that was begun


def tell_those_who_wait(problem: Exception, members: Communicator, *, has_left: bool) -> None:
    """Something failed here; `has_left` if all messages of the exchange have."""
    if has_left:
        note_heard(problem, members.ranks, "all")  # so that it is told to nobody further up
    else:
        members.tell(problem)  # [Note: who raised] in `watch.py`


def land_quietly(flight: Flight | None) -> None:
    """Waits for what flies, if something does; what the rank is about to raise says more."""
    if flight is not None:
        with suppress(Exception):
            flight.finish()
