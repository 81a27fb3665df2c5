"""What ranks want of a table comes to those who hold it, where they hold it."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.comm import communicator
from shardwise.comm.asking import ask
from shardwise.comm.simulate import simulate
from shardwise.errors import OutOfRangeError

TABLE = shardwise.chunk(0, sizes=[2, 4], ranks=[0, 1]).layout((6, 3))
META = torch.device("meta")


def test_row_numbers_are_on_the_tables_device_also_where_nothing_is_asked() -> None:
    """The wire's would do for a table on the CPU only."""

    def told(rank: int) -> list[tuple[int, str]]:
        rows = [torch.tensor([1, 3, 5])] if rank == 0 else []
        asked = ask(TABLE, ((0,),), rows, communicator(), device=META, adds=True, what="look up")
        return [(len(numbers), numbers.device.type) for numbers, _ in asked.told.values()]

    assert simulate(told, 2).results == [[], [(2, "meta")]]


def test_a_row_that_there_is_not_is_told_on_every_rank() -> None:
    def wrong(rank: int) -> str:
        rows = [torch.tensor([rank, 3 * rank + 3])]
        with pytest.raises(OutOfRangeError) as caught:
            ask(TABLE, ((0,), (1,)), rows, communicator(), device=META, adds=True, what="look up")
        return str(caught.value)

    said = "look up: index out of range in self: expected indices from 0 to 5, got others on rank 1"
    assert simulate(wrong, 2).results == [f"[rank {rank}] {said}" for rank in (0, 1)]
