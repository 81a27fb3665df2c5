"""Work on many items by several processes, each of which takes the next one when it is done.

[Note: jobs] A job is a new process that gets the work once and then numbers of items, over a pipe,
and tells how far it is and what came out. It is ended when there is nothing more to do, when
another job fails, and on ^C; it ends by itself when the pipe is gone, since then its caller is.
"""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardwise import processes
from shardwise.errors import CheckpointError, ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["in_processes"]

_NAME = "shardwise job"
_END_LIMIT = 5.0  # seconds for a process whose pipe is closed to be gone

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Advanced:
    amount: int


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    result: Result


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


def in_processes(
    work: Callable[[int, Callable[[int], None]], Result],
    numbers: Sequence[int],
    jobs: int,
    advance: Callable[[int], None],
) -> list[Result]:
    """`work(number, advance)` of each number, by so many processes. [Note: jobs]

    `work` and what it returns are pickled. One job is this process. What a job raises is raised
    here; whatever happens, no job lives on.
    """
    if jobs == 1 or multiprocessing.current_process().daemon:  # which may have no children
        return [work(number, advance) for number in numbers]
    started: list[_Job] = []
    try:
        for _ in range(min(jobs, len(numbers))):
            started.append(_Job.start(work, torch.get_num_threads() // jobs))
        found = _shared_out(started, numbers, advance)
    finally:
        for job in started:
            job.end()
    return [found[number] for number in numbers]


def _shared_out(
    jobs: Sequence[_Job], numbers: Sequence[int], advance: Callable[[int], None]
) -> dict[int, Any]:
    """What each number's job returned."""
    found: dict[int, Any] = {}
    waiting = iter(numbers)
    busy = {job.connection: (job, number) for job, number in zip(jobs, waiting, strict=False)}
    for job, number in busy.values():
        job.take(number)
    while busy:
        for connection in wait(list(busy)):
            job, number = busy[connection]  # type: ignore[index]  # we wait for nothing else
            match job.hear():
                case _Advanced(amount):
                    advance(amount)
                case _Raised(error):
                    raise error
                case _Done(result):
                    found[number] = result
                    del busy[job.connection]
                    for following in waiting:
                        busy[job.connection] = job, following
                        job.take(following)
                        break
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A process, as its caller holds it."""

    process: BaseProcess
    connection: Connection[Any, Any]

    @classmethod
    def start(cls, work: Any, threads: int) -> _Job:
        """A process that waits for numbers."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])  # so that torch is imported once
        connection, far = context.Pipe()
        process = context.Process(
            target=_serve, args=(far, work, max(threads, 1)), name=_NAME, daemon=True
        )
        with far:
            processes.start(process)
        return cls(process, connection)

    def take(self, number: int) -> None:
        """Has it work on a number."""
        with suppress(OSError):  # it is gone: `hear` says so
            self.connection.send(number)

    def hear(self) -> Any:
        """What it says next; raises if it is gone."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_END_LIMIT)
            raise CheckpointError(
                f"{_NAME}, process {self.process.pid}",
                expected="its files to be written",
                got=_last_words(self.process.exitcode),
                fix="Is there enough memory for so many jobs? Take fewer, or a smaller max_bytes.",
            ) from None

    def end(self) -> None:
        """It has nothing to do that is still wanted."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def _last_words(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with status {code}"


def _serve(connection: Connection[Any, Any], work: Any, threads: int) -> None:
    """The process's side: works on the numbers that come until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the caller's, who ends its jobs
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number = connection.recv()
            try:
                answer: object = _Done(work(number, lambda done: connection.send(_Advanced(done))))
            except BrokenPipeError:
                raise
            except Exception as error:  # the caller wants to know
                answer = _Raised(_fit_to_travel(error))
            connection.send(answer)


def _fit_to_travel(error: Exception) -> Exception:
    """What others raise may not be pickled, or not be made again of what was."""
    if isinstance(error, ShardwiseError | OSError):
        return error
    return CheckpointError(f"{_NAME} failed: {type(error).__name__}: {error}")
