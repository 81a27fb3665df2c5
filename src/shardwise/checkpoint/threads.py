"""Reading by several threads, where a rank has processors that no other rank uses."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardwise.comm.communicator import Communicator

__all__ = ["in_threads", "num_threads"]

_MOST = 4  # threads of a rank: more do not read faster

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_threads(members: Communicator) -> int:
    """How many processors there are for each rank on this machine, as far as can be known."""
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", len(members.ranks)))  # torchrun sets it
    return min(max(len(os.sched_getaffinity(0)) // max(neighbours, 1), 1), _MOST)


def in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> Iterator[Result]:
    """`work` of each item, in their order, by so many threads; raises what the first one raises."""
    if threads == 1 or len(items) < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
