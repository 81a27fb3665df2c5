"""`shardwise bench` measures, and tells what DTensor cannot do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.running import Run

WORDS = ("bench", "--ranks", "2", "--side", "64", "--repeats", "1")


def test_a_table_of_80_columns(run: Run) -> None:
    done = run(*WORDS)
    assert done.status == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[-1] == "cannot"  # DTensor has no other order of ranks


def test_json(run: Run) -> None:
    found = json.loads(run(*WORDS, "--json").out)
    assert found["ranks"] == 2
    assert found["milliseconds"]["rows to columns"]["DTensor"] > 0
    assert "DTensor" not in found["milliseconds"]["rows to rows of other sizes"]


def test_one_rank_has_nowhere_to_send(run: Run) -> None:
    done = run("bench", "--ranks", "1")
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
