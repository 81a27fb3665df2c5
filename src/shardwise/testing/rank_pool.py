"""The caller's side of the rank processes: starting, lending, watching and ending them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardwise import processes
from shardwise.errors import RankFailure
from shardwise.testing.rank_process import (
    STACKS_SIGNAL,
    Closed,
    Raised,
    Returned,
    SourceFile,
    Step,
    Task,
    end_with_parent,
    serve,
)
from shardwise.words import headline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

__all__ = ["Exited", "RankHandle", "RankPool", "is_rank_process", "stacks_of"]

_NAME = "shardwise rank"
_PRELOADED = ("shardwise.sharded_tensor", "shardwise.modules")  # what most functions need
_START_LIMIT = 120.0  # torch's first import, from a cold disk
_END_LIMIT = 5.0
_SERVER_PAUSE = 0.2  # for a fork server that died to be seen as dead
_STACKS_LIMIT = 1.0  # until a rank begins to write its stacks ...
_STACKS_PAUSE = 0.05  # ... and after which silence they are complete


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank process that ended without an answer."""

    story: str


@dataclass(slots=True, eq=False)
class RankHandle:
    """One rank process, as its caller holds it."""

    process: BaseProcess
    connection: Connection[Any, Any]
    stacks: Connection[Any, Any]  # faulthandler's raw text, no messages
    imported: set[SourceFile] = field(default_factory=set)  # by its calls so far
    is_spent: bool = False  # as its last call said

    @property
    def sources(self) -> tuple[Connection[Any, Any], int]:
        """What to wait on: one of them is ready when the rank spoke or ended."""
        return self.connection, self.process.sentinel

    def send(self, message: Task | Step) -> None:
        """Send; that a rank is gone is noticed when its answer is read."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Returned | Raised | Closed | Step | Exited:
        """The rank's next message, or its end. Call it when one of `sources` is ready."""
        try:
            # A process that answered and then ended has still answered.
            if self.connection.poll():
                message = self.connection.recv()
                assert isinstance(message, Returned | Raised | Closed | Step)
                if isinstance(message, Closed):
                    self.imported.update(message.imported)
                    self.is_spent = message.is_spent
                return message
        except (EOFError, OSError):
            pass
        self.process.join(_END_LIMIT)
        return Exited(_last_words(self.process.exitcode, self.read_stacks(wait=0.0)))

    def is_stale(self) -> bool:
        """Whether a new process would do better: a module it has imported was edited, say."""
        return self.is_spent or any(SourceFile.now(file.path) != file for file in self.imported)

    def kill(self) -> None:
        """End the rank and the processes it started."""
        # Not for a rank that is gone: its number may be another's by now.
        if self.process.is_alive() and self.process.pid is not None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # one that had no time to lead a group

    def read_stacks(self, wait: float) -> str:
        """What faulthandler wrote; empty if it does not begin within `wait` seconds."""
        text = b""
        while self.stacks.poll(_STACKS_PAUSE if text else wait):
            chunk = os.read(self.stacks.fileno(), 1 << 16)
            if not chunk:
                break
            text += chunk
        return _readable(text.decode(errors="replace"))


def stacks_of(ranks: Sequence[RankHandle]) -> list[str]:
    """Stacks of each of these running ranks; interrupts none of them."""
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, STACKS_SIGNAL)
    return [rank.read_stacks(wait=_STACKS_LIMIT) or "(no stacks came)" for rank in ranks]


def is_rank_process() -> bool:
    """Whether this process is a rank of some caller's pool."""
    return multiprocessing.current_process().name.startswith(_NAME)


class RankPool:
    """Rank processes of one caller, started when first needed and kept for later calls.

    They are forked from a server that has torch and this package imported, so that the first call
    pays for the import and a replaced rank costs milliseconds. They are not daemonic, which would
    forbid a rank to have children (a DataLoader's workers); see `end_with_parent` for how they end.
    """

    def __init__(self, start_method: Literal["forkserver", "spawn"]) -> None:
        self.owner = os.getpid()
        self._start_method: Literal["forkserver", "spawn"] = start_method
        self._lock = threading.Lock()
        self._ranks: dict[int, RankHandle] = {}
        atexit.register(self._end_at_exit)

    @contextmanager
    def lend(self, world_size: int) -> Iterator[tuple[RankHandle, ...]]:
        """Ranks `0 .. world_size - 1`, idle; one borrower at a time.

        If the borrower raises, these ranks are ended: they may hold half of a collective or
        dead connections, and a fork is cheaper than finding out.
        """
        with self._lock:
            try:
                self._start_missing(world_size)
                yield tuple(self._ranks[rank] for rank in range(world_size))
            except BaseException:
                self._end(range(world_size))
                raise

    def _start_missing(self, world_size: int) -> None:
        alive = {rank for rank, handle in self._ranks.items() if handle.process.is_alive()}
        # A new process, and not a second import in the old one: what a module registered with
        # torch or with other modules cannot be taken back.
        stale = {rank for rank in alive if rank < world_size and self._ranks[rank].is_stale()}
        self._end(sorted(stale))
        missing = sorted(set(range(world_size)) - (alive - stale))
        for rank in missing:
            self._ranks[rank] = _start(_context(self._start_method), rank)
        for rank in missing:
            handle = self._ranks[rank]
            ready = handle.connection.poll(_START_LIMIT)
            first = handle.receive() if ready else Exited("did not start")
            if first is not Step.READY:
                raise RankFailure(
                    "process of run_local",
                    rank=rank,
                    expected=f"a start within {_START_LIMIT:.0f} s",
                    got=first.story if isinstance(first, Exited) else first,
                    fix="Its stderr says why.",
                )

    def _end(self, ranks: Sequence[int]) -> None:
        handles = [self._ranks.pop(rank) for rank in ranks if rank in self._ranks]
        for handle in handles:
            handle.kill()
        for handle in handles:
            handle.process.join(_END_LIMIT)
            handle.connection.close()
            handle.stacks.close()

    def _end_at_exit(self) -> None:
        if os.getpid() == self.owner:  # a fork of the owner runs its atexit functions, too
            self._end(list(self._ranks))


def _context(
    start_method: Literal["forkserver", "spawn"],
) -> ForkServerContext | SpawnContext:
    if start_method == "spawn":
        return multiprocessing.get_context("spawn")
    # Python has one fork server per process. A caller that uses it, too, shares ours: its
    # processes find torch imported, and if it came first, ours find what it preloaded instead
    # (then each rank imports torch itself).
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", serve.__module__, *_PRELOADED])
    return context


def _start(context: ForkServerContext | SpawnContext, rank: int) -> RankHandle:
    connection, far_connection = context.Pipe()
    stacks, far_stacks = context.Pipe(duplex=False)
    with far_connection, far_stacks:
        try:
            process = _started(context, rank, far_connection, far_stacks)
        except (EOFError, OSError):
            # The fork server was ended, say by a ^C while it imported torch. multiprocessing
            # starts another.
            time.sleep(_SERVER_PAUSE)
            try:
                process = _started(context, rank, far_connection, far_stacks)
            except (EOFError, OSError) as error:
                raise RankFailure(
                    "process of run_local",
                    rank=rank,
                    expected="to be started",
                    got=headline(error),
                    fix="The stderr of this process may say why; are there too many processes?",
                ) from error
    return RankHandle(process, connection, stacks)


def _started(
    context: ForkServerContext | SpawnContext, rank: int, *connections: Connection[Any, Any]
) -> BaseProcess:
    process = context.Process(target=serve, args=connections, name=f"{_NAME} {rank}")
    processes.start(process)
    return process


def _last_words(code: int | None, stacks: str) -> str:
    if code is not None and code < 0:
        try:
            end = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            end = f"was ended by signal {-code}"
    else:
        end = f"exited with code {code}"
    return f"{end} without answering" + (f"\n{stacks}" if stacks else "")


def _readable(stacks: str) -> str:
    """The dump without what is the same in every rank: its watcher thread, its outer frames."""
    blocks = [b for b in stacks.split("\n\n") if f" in {end_with_parent.__name__}" not in b]
    return "\n\n".join(_above_serve(block) for block in blocks).strip()


def _above_serve(block: str) -> str:
    lines = block.splitlines()
    own_file = f'"{serve.__code__.co_filename}"'
    outer = (i for i, line in enumerate(lines) if own_file in line)
    return "\n".join(lines[: next(outer, len(lines))])
