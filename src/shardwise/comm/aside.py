"""Work that other threads do while the first goes on with what comes next.

A batch of thousands of small tensors is mostly copies, for which torch lets go of Python's lock, so
two or three threads are quicker than one. They are started for large batches alone, and only where
this process has cores to spare.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Aside"]

_FEWEST_CALLS = 8  # that are worth a thread
_CORES_PER_THREAD = 4  # with less, other ranks and the threads of gloo need them
_MOST_THREADS = 2  # more would not be quicker


class Aside:
    """Calls that other threads make, of which none waits for another; or this one, if it must."""

    def __init__(self, num_calls: int) -> None:
        threads = min(_num_cores() // _CORES_PER_THREAD, _MOST_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        if threads and num_calls >= _FEWEST_CALLS:
            self._pool = ThreadPoolExecutor(threads, "shardwise aside")
        self._most_behind = threads  # calls that wait or run beside a new one: each holds memory
        self._is_inference = torch.is_inference_mode_enabled()
        self._calls: list[Future[None]] = []

    def call(self, function: Callable[[], object]) -> None:
        """The call is made before `catch_up` returns."""
        if self._pool is None:
            function()
        else:
            self.catch_up(behind=self._most_behind)
            self._calls.append(self._pool.submit(self._run, function))

    def catch_up(self, *, behind: int = 0) -> None:
        """Waits for all calls but the last `behind`; raises what one of them raised."""
        while len(self._calls) > behind:
            self._calls.pop(0).result()

    def _run(self, function: Callable[[], object]) -> None:
        with torch.inference_mode(self._is_inference):  # every thread has its own
            function()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
