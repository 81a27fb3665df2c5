"""What long work says of itself: a bar where a person looks, and lines in the log.

Both on the group's first rank only.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.comm.logs import LOG, logs_phases
from shardwise.comm.tracing import trace
from shardwise.transfer.units import format_bytes
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.comm.communicator import Communicator

__all__ = ["bytes_bar", "logged_phase", "progress_bar"]


@contextmanager
def progress_bar(
    what: str, total_bytes: int, members: Communicator, *, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes just done; the log hears of the whole.

    `show` None: on the group's first rank if its stderr is a terminal. False: never.
    """
    shown = show if _is_first(members) else False
    with (
        logged_phase(what, total_bytes, members),
        bytes_bar(what, total_bytes, show=shown) as advance,
    ):
        yield advance


@contextmanager
def bytes_bar(
    what: str, total_bytes: int, *, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A function to call, from any thread, with the number of bytes just done.

    `show` None: if stderr is a terminal. False: never.
    """
    if show is False or (show is None and not sys.stderr.isatty()):
        yield lambda _: None
        return
    # Imported here because most programs never show a bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.update(task, advance=done)


@contextmanager
def logged_phase(what: str, total_bytes: int, members: Communicator) -> Iterator[None]:
    """At INFO, a line when the block begins, and one with bytes and GB/s when it is over."""
    if not (logs_phases() and _is_first(members)):
        yield
        return
    LOG.info("%s %s on %s", what, format_bytes(total_bytes), plural(len(members.ranks), "rank"))
    began = time.perf_counter()
    with trace(show=False) as sent:
        yield
    seconds = time.perf_counter() - began
    LOG.info(
        "%s done in %.3f s: %s, %s between ranks, %.2f GB/s",
        what,
        seconds,
        plural(len(sent.events), "exchange"),
        format_bytes(sent.total_bytes),
        sent.total_bytes / seconds / 1e9,
    )


def _is_first(members: Communicator) -> bool:
    return members.rank == next(iter(members.ranks))
