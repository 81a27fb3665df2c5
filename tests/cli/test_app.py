"""What all commands share: help, one line for what goes wrong, any terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.cli.running import run_command

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory. Take a smaller shape"),
        (RecursionError(), "--spec is nested too deeply"),
        (OverflowError("int too large"), "too large to draw: int too large"),
    ],
)
def test_running_out_of_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("shardwise.sharding_spec.parse_spec", fail)
    done = run_command("show", "--shape", "8", "--spec", "chunk(0)")
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err


def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_command("demo", "--folder", tmp_path / "file")
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert done.err.endswith("file: File exists. Pass another path.\n")


def test_the_command_alone_prints_its_help_and_no_more() -> None:
    done = run_command()
    assert (done.status, done.err) == (2, "")
    assert 'shardwise show --shape 8,6 --spec "grid([2, 2])"' in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def installed(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from shardwise.cli import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | variables,
    )


@pytest.mark.parametrize(
    ("words", "columns", "status"),
    [
        (["show", "--help"], 80, 0),
        (["show", "--help"], 30, 0),
        (["show", "--shape", "8,6", "--spec", "chunk(0)  # \u2192"], 80, 0),
        (["show", "--shape", "\xe9", "--spec", "chunk(0)"], 80, 2),
        (["sh\xf3w"], 80, 2),
    ],
)
def test_an_ascii_terminal_is_enough(words: list[str], columns: int, status: int) -> None:
    done = installed(*words, LC_ALL="C", PYTHONIOENCODING="ascii", COLUMNS=f"{columns}")
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    assert (done.stdout + done.stderr).isascii()


def test_the_installed_command_draws_plainly_in_a_pipe() -> None:
    done = installed("show", "--shape", "3", "--spec", "replicate()")
    assert done.returncode == 0, done.stderr
    assert "0-3" in done.stdout
    assert "\x1b" not in done.stdout
