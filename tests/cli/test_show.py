from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from shardwise.cli import main

Run = Callable[..., "Done"]


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: status, standard output, standard error."""

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return Done(int(stop.value.code or 0), *capsys.readouterr())

    return call


def test_show_draws_a_layout_in_80_plain_columns(run: Run) -> None:
    done = run("show", "--shape", "8,6", "--spec", "chunk(0)", "--world-size", "4")
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    for rank in range(4):
        assert f" {rank} " in done.out
    assert "48 B" in done.out


def test_show_prints_entries_for_programs(run: Run) -> None:
    done = run("show", "--shape", "4,2", "--spec", "partial('max')", "--world-size", "2", "--json")
    assert json.loads(done.out) == {
        "shape": [4, 2],
        "pending": "max",
        "bytes_per_rank": {"0": 32, "1": 32},
        "entries": [
            {"start": [0, 0], "stop": [4, 2], "rank": rank, "term": rank} for rank in range(2)
        ],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "8,x", "--spec", "chunk(0)"], "--shape: expected sizes such as 8,6"),
        (["--shape", "8", "--spec", "chunk(1)"], "Invalid sharding dim: expected -1 to 0"),
        (["--shape", "8", "--spec", "chonk(0)"], "got chonk"),
        (["--shape", "8", "--spec", "chunk(0)", "--dtype", "int999"], "--dtype: expected"),
    ],
)
def test_a_wrong_argument_gets_one_line(run: Run, words: list[str], message: str) -> None:
    done = run("show", *words)
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert message in done.err


def test_help_teaches_by_example(run: Run) -> None:
    done = run("show", "--help")
    assert 'shardwise show --shape 8,6 --spec "chunk(0)"' in done.out
    assert run("--version").out.startswith("shardwise 0.")


def test_the_installed_command_draws_plainly_in_a_pipe() -> None:
    command = [sys.executable, "-c", "from shardwise.cli import main; main()"]
    words = ["show", "--shape", "3", "--spec", "replicate()"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=120, check=True
    )
    assert "0-3" in done.stdout
    assert "\x1b" not in done.stdout
