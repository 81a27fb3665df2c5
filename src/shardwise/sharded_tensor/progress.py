"""Progress bars for long work: on a group's first rank, and only where a person looks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.comm.communicator import Communicator

__all__ = ["bytes_bar", "progress_bar"]


@contextmanager
def progress_bar(
    what: str, total_bytes: int, members: Communicator, *, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes just done.

    `show` None: on the group's first rank if its stderr is a terminal. False: never.
    """
    is_first = members.rank == next(iter(members.ranks))
    with bytes_bar(what, total_bytes, show=show if is_first else False) as advance:
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
