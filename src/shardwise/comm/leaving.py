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

if TYPE_CHECKING:
    from shardwise.comm.communicator import Flight
    from shardwise.comm.marks import Mark

__all__ = ["Left", "land_quietly"]


@dataclass(slots=True)
class Left:
    """What of an exchange this rank has yet to do."""

    num_rounds: int  # whose messages have not left
    mark: Mark | None  # by which they go
    flight: Flight | None = None  # of the last one that was begun


def land_quietly(flight: Flight | None) -> None:
    """Waits for what flies, if something does; what the rank is about to raise says more."""
    if flight is not None:
        with suppress(Exception):
            flight.finish()
