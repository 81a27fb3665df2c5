"""Work that other threads do while the first goes on with what comes next.

A batch of thousands of small tensors is mostly copies, for which torch lets go of Python's lock, so
two or three threads are quicker than one. So it is with a large copy beside messages, since gloo
sends all that it can before it returns. Only where this process has cores to spare.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Aside", "has_spare_cores"]

_CORES_PER_THREAD = 4  # with less, other ranks and the threads of gloo need them
_MOST_THREADS = 2  # more would not be quicker


class Aside:
    """Calls that other threads make, of which none waits for another; or this one, if it must.

    `is_large` says that they are worth waking a thread.
    """

    def __init__(self, *, is_large: bool) -> None:
        # Also how many calls may wait or run beside a new one: each holds memory.
        self._num_threads = _num_threads() if is_large else 0
        self._is_inference = torch.is_inference_mode_enabled()
        self._threads_of_torch = torch.get_num_threads()
        self._calls: list[Future[None]] = []

    @property
    def is_alone(self) -> bool:
        """Whether no other thread makes the calls."""
        return not self._num_threads

    def call(self, function: Callable[[], object]) -> None:
        """The call is made before `catch_up` returns."""
        if self.is_alone:
            function()
        else:
            self.catch_up(behind=self._num_threads)
            try:
                call = _pool(self._num_threads).submit(self._run, function)
            except RuntimeError:  # no thread can be had, as when the process ends
                function()
            else:
                self._calls.append(call)

    def catch_up(self, *, behind: int = 0) -> None:
        """Waits for all calls but the last `behind`; raises what one of them raised."""
        while len(self._calls) > behind:
            self._calls.pop(0).result()

    def _run(self, function: Callable[[], object]) -> None:
        if torch.get_num_threads() != self._threads_of_torch:  # every thread has its own
            torch.set_num_threads(self._threads_of_torch)
        with torch.inference_mode(self._is_inference):  # the same
            function()


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The threads of this process, which start when they are needed and then stay."""
    return ThreadPoolExecutor(num_threads, "shardwise aside")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # whose threads stay with the parent


def has_spare_cores() -> bool:
    """Whether something else runs, such as the threads of gloo, while this thread does."""
    return _num_threads() > 0


def _num_threads() -> int:
    return min(_num_cores() // _CORES_PER_THREAD, _MOST_THREADS)


@cache
def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
