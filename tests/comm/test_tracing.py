"""A trace lists what ranks send each other, and costs nothing when there is none."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.comm.tracing import TRACES

ROWS, COLUMNS = (shardwise.chunk(dim, ranks=[0, 1], device="cpu") for dim in (0, 1))


def _traced(rank: int) -> None:
    x: Any = sharded_tensor.ones(ROWS, 4, 6, requires_grad=True)
    with shardwise.trace(show=False) as t:
        y = shardwise.reshard(x, COLUMNS)
        y.full_tensor().sum().backward()
    assert not TRACES or all(other.rank != rank for other in TRACES)
    ops = [event.op for event in t.events]
    assert ops == ["reshard", "reshard", "backward of reshard"]
    first, gathered, back = t.events
    assert (first.sent, first.received, first.total) == (24, 24, 48)
    assert (gathered.received, gathered.total) == (48, 96)  # the other rank's three columns
    assert back.total == 48  # the gather's way back sends nothing
    assert all(event.ranks == (0, 1) and event.seconds > 0 for event in t.events)
    assert all(event.site.startswith("test_tracing.py:") for event in t.events)
    assert t.total_bytes == 48 + 96 + 48
    assert (t.sent, t.received) == (24 + 48 + 24, 24 + 48 + 24)
    x.detach().reshard(COLUMNS)
    assert len(t.events) == 3  # over


def test_every_exchange_is_an_event() -> None:
    shardwise.run_local(_traced, 2)
    simulate(_traced, 2)


def _named(_: int) -> list[str]:
    x: Any = sharded_tensor.ones(ROWS, 4, 6, requires_grad=True)
    with shardwise.trace(show=False) as t, shardwise.implicit_comm("allow"):
        z: Any = x * shardwise.reshard(x, COLUMNS)
        gathered: Any = torch.renorm(z, 2, 0, 1.0)
        gathered.full_tensor().sum().backward()
        assert torch.equal(x, x.detach())
    return [event.op for event in t.events]


def test_events_have_the_names_of_functions() -> None:
    (first, second) = simulate(_named, 2).results
    assert first == second
    assert first[:2] == ["reshard", "torch.Tensor.mul"]
    assert "torch.renorm" in first
    assert "backward of torch.Tensor.mul" in first
    assert first[-1] == "compare results"


def _shown(_: int) -> None:
    x: Any = sharded_tensor.ones(ROWS, 4, 6)
    with shardwise.trace():
        for _k in range(3):
            shardwise.reshard(x, COLUMNS)
        shardwise.as_local_rows(torch.ones(2, 2))


def test_the_first_rank_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(_shown, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0 sent and received:"
    assert lines[1].split() == [
        "op",
        "at",
        "times",
        "sent",
        "received",
        "all",
        "ranks",
        "ranks",
        "ms",
    ]
    assert lines[2].split()[0] == "reshard"
    assert lines[2].split()[2:5] == ["3", "72", "B"]
    assert lines[3].startswith("exchange row counts")
    assert lines[4].startswith("together")
    assert len(lines) == 5
    with shardwise.trace():
        pass
    assert capsys.readouterr().out == "nothing was sent\n"


def _printed_in_groups(rank: int, groups: list[list[int]]) -> str:
    """The first line that this rank prints, of a trace around an exchange in each group."""
    made = [dist.new_group(ranks) for ranks in groups]
    with redirect_stdout(StringIO()) as out, shardwise.trace():
        for ranks, group in zip(groups, made, strict=True):
            if rank in ranks:
                rows, columns = (shardwise.chunk(dim, ranks=ranks, device="cpu") for dim in (0, 1))
                x: Any = sharded_tensor.ones(rows, 4, 6, process_group=group)
                shardwise.reshard(x, columns)
    return out.getvalue().partition("\n")[0]


@pytest.mark.parametrize(
    ("groups", "printed"),
    [
        ([], {0: "rank 0: nothing was sent"}),
        ([[1, 2]], {0: "rank 0: nothing was sent", 1: "rank 1 sent and received:"}),
        ([[0, 1], [2, 3]], {0: "rank 0 sent and received:", 2: "rank 2 sent and received:"}),
        (
            [[1, 2, 3], [2, 3]],
            {
                0: "rank 0: nothing was sent",
                1: "rank 1 sent and received:",
                2: "rank 2 sent and received:",
            },
        ),
        ([[0, 1], [1, 3]], {0: "rank 0 sent and received:", 1: "rank 1 sent and received:"}),
    ],
)
def test_the_lowest_rank_of_each_group_prints(
    groups: list[list[int]], printed: dict[int, str]
) -> None:
    lines = shardwise.run_local(_printed_in_groups, 4, groups)
    assert {rank: line for rank, line in enumerate(lines) if line} == printed
