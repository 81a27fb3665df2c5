"""Work that a second thread does while the first goes on with what comes next.

A batch of thousands of small tensors is mostly copies, for which torch lets go of Python's lock:
two threads take two thirds of the time of one. A thread is started for large batches alone, and
only where this process has cores to spare.
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
_FEWEST_CORES = 4  # with less, other ranks and the threads of gloo need them
_MOST_BEHIND = 2  # calls that wait or run at a time, because each holds memory


class Aside:
    """Calls that another thread makes, in their order; or this one, where that is not worth it."""

    def __init__(self, num_calls: int) -> None:
        is_worth_it = num_calls >= _FEWEST_CALLS and _num_cores() >= _FEWEST_CORES
        self._pool = ThreadPoolExecutor(1, "shardwise aside") if is_worth_it else None
        self._is_inference = torch.is_inference_mode_enabled()
        self._calls: list[Future[None]] = []

    def call(self, function: Callable[[], object]) -> None:
        """The call is made before `catch_up` returns."""
        if self._pool is None:
            function()
        else:
            self.catch_up(behind=_MOST_BEHIND - 1)
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
