"""`shardwise bench` measures, and tells what DTensor cannot do."""

from __future__ import annotations

import json

from tests.cli.running import run_command

WORDS = ("bench", "--ranks", "2", "--side", "64", "--repeats", "1")


def test_a_table_of_80_columns() -> None:
    done = run_command(*WORDS)
    assert done.status == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[-1] == "cannot"  # DTensor has no other order of ranks


def test_json() -> None:
    found = json.loads(run_command(*WORDS, "--json").out)
    assert found["ranks"] == 2
    assert found["milliseconds"]["rows to columns"]["DTensor"] > 0
    assert "DTensor" not in found["milliseconds"]["rows to rows of other sizes"]


def test_one_rank_has_nowhere_to_send() -> None:
    done = run_command("bench", "--ranks", "1")
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
