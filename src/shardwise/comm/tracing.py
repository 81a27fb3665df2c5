"""What ranks send each other while a block runs: `with shardwise.trace() as t:`.

Nothing is recorded, and next to nothing is spent, while nobody looks: every place that sends asks
`is_watched()`, which is so for the log at DEBUG, too. An exchange is one event, whatever it is
lowered to.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Self

import torch.distributed as dist

from shardwise.call_site import call_site
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.logs import LOG, logs_exchanges
from shardwise.transfer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.comm.communicator import Communicator

__all__ = [
    "TRACES",
    "Event",
    "Recording",
    "Trace",
    "current_op",
    "doing",
    "is_watched",
    "recorded",
    "trace",
]


class Event(NamedTuple):
    """One exchange, as this rank saw it."""

    op: str  # the torch function that asked for it, or our own
    site: str  # the line of the user's code, "train.py:12"
    sent: int  # bytes, by this rank
    received: int
    total: int  # by all ranks
    ranks: tuple[int, ...]  # of the group
    seconds: float


TRACES: list[Trace] = []  # those that run; of all simulated ranks of this process
_OP: ContextVar[str | None] = ContextVar("shardwise_op", default=None)


class Trace:
    """What was sent while it ran. Its text is a table, with equal lines together."""

    def __init__(self, *, show: bool) -> None:
        self.events: list[Event] = []
        self.rank: int | None = None
        self._show = show

    def __enter__(self) -> Self:
        self.rank = _rank_here()
        TRACES.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        TRACES.remove(self)
        if self._show and self._is_first:
            print(self)

    @property
    def _is_first(self) -> bool:
        """Whether it is the lowest rank of a group that it saw; of nothing, rank 0 tells."""
        rank = self.rank or 0
        return any(rank == min(event.ranks) for event in self.events) or not (self.events or rank)

    @property
    def total_bytes(self) -> int:
        """Bytes between all ranks."""
        return sum(event.total for event in self.events)

    @property
    def sent(self) -> int:
        """Bytes that this rank sent."""
        return sum(event.sent for event in self.events)

    @property
    def received(self) -> int:
        """Bytes that this rank received."""
        return sum(event.received for event in self.events)

    def __str__(self) -> str:
        if not self.events:
            here = "" if self.rank is None else f"rank {self.rank}: "
            return f"{here}nothing was sent"
        groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            groups[event.op, event.site].append(event)
        rows: list[tuple[str, ...]] = [
            ("op", "at", "times", "sent", "received", "all ranks", "ranks", "ms")
        ]
        for (op, site), events in groups.items():
            rows.append((op, site, *_summed(events)))
        if len(groups) > 1:
            rows.append(("together", "", *_summed(self.events)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [
            "  ".join(
                text.ljust(width) if k < 2 else text.rjust(width)
                for k, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([f"rank {self.rank or 0} sent and received:", *aligned])


def _summed(events: Sequence[Event]) -> tuple[str, ...]:
    return (
        str(len(events)),
        format_bytes(sum(event.sent for event in events)),
        format_bytes(sum(event.received for event in events)),
        format_bytes(sum(event.total for event in events)),
        str(max(len(event.ranks) for event in events)),
        f"{1e3 * sum(event.seconds for event in events):.1f}",
    )


def trace(*, show: bool = True) -> Trace:
    """Records every communication of a block: op, line of code, bytes, ranks, seconds.

    At the end of the block the lowest rank of those that communicated prints a table, unless `show`
    is False (of several groups, each one's); every rank has its own `events`. What backward sends
    is listed under the line that called it.

    >>> import shardwise
    >>> def columns(rank):
    ...     x = shardwise.sharded_tensor.ones(shardwise.chunk(0), 4, 4)
    ...     with shardwise.trace(show=False) as t:
    ...         shardwise.reshard(x, shardwise.chunk(1))
    ...     return [(event.op, event.sent, event.total) for event in t.events]
    >>> shardwise.run_local(lambda rank: columns(rank), 2)
    [[('reshard', 16, 32)], [('reshard', 16, 32)]]
    """
    return Trace(show=show)


def is_watched() -> bool:
    """Whether exchanges are to be recorded: for a trace, or for the log."""
    return bool(TRACES) or LOG.isEnabledFor(logging.DEBUG)  # `logs_exchanges`, said quicker


def current_op() -> str | None:
    """The torch function that is being carried out, if it said so."""
    return _OP.get()


@contextmanager
def doing(op: str) -> Iterator[None]:
    """What is sent in this block is sent for `op`, unless a function around it has said so."""
    token = _OP.set(_OP.get() or op)
    try:
        yield
    finally:
        _OP.reset(token)


class Recording:
    """An exchange that is under way while somebody looks."""

    def __init__(self, op: str, members: Communicator, sizes: tuple[int, int, int]) -> None:
        self._op, self._members, self._sizes = op, members, sizes
        self._site = call_site()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Adds the exchange, which is over, to the traces that run, and to the log."""
        sent, received, total = self._sizes
        seconds = time.perf_counter() - self._began
        op = _OP.get() or self._op
        ranks = tuple(self._members.ranks)
        event = Event(op, self._site, sent, received, total, ranks, seconds)
        for running in TRACES:
            if running.rank in (None, self._members.rank):
                running.events.append(event)
        if logs_exchanges():
            _log(event, self._members.rank)


def _log(event: Event, rank: int) -> None:
    LOG.debug(
        "[rank %d] %s at %s: sent %s, received %s of %s between %d ranks, %.3f ms",
        rank,
        event.op,
        event.site,
        format_bytes(event.sent),
        format_bytes(event.received),
        format_bytes(event.total),
        len(event.ranks),
        1e3 * event.seconds,
    )


@contextmanager
def recorded(op: str, members: Communicator, nbytes: int) -> Iterator[None]:
    """A small exchange in which each rank sends `nbytes` to each other one."""
    peers = len(members.ranks) - 1
    if not peers or not is_watched():
        yield
        return
    mine = nbytes * peers
    recording = Recording(op, members, (mine, mine, mine * len(members.ranks)))
    yield
    recording.end()


def _rank_here() -> int | None:
    """The rank of this thread or process; None without a process group."""
    simulated = simulated_rank.get()
    if simulated is not None:
        return simulated.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None
