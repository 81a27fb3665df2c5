"""`shardwise doctor`."""

from __future__ import annotations

import json

import pytest
from tests.cli.running import run_command

from shardwise.cli import doctor as doctor_module
from shardwise.errors import RankFailure


def test_doctor_tries_two_ranks() -> None:
    done = run_command("doctor")
    assert done.status == 0, done.out
    assert "2 ranks on cpu" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rank: int, kind: str) -> None:
        raise ValueError(f"rank {rank} has no {kind}")

    monkeypatch.setattr("shardwise.cli.doctor._on_a_rank", broken)
    monkeypatch.setenv("SHARDWISE_CHECK", "debug")
    monkeypatch.setattr("shardwise.cli.doctor._needed", lambda: ["a-package-that-nobody-has"])
    done = run_command("doctor", "--json")
    assert done.status == 1
    report = json.loads(done.out)
    found = {one["what"]: one for one in report["findings"]}
    assert not report["fine"]
    assert found["SHARDWISE_CHECK"]["found"] == "debug"
    assert found["a-package-that-nobody-has"] == {
        "what": "a-package-that-nobody-has",
        "found": "absent",
        "fine": False,
    }
    assert "has no cpu" in found["self test"]["found"]


@pytest.mark.parametrize(
    ("version", "is_tested"), [("2.13.0+cpu", True), ("2.11.1", True), ("2.12.0", False)]
)
def test_a_version_of_torch_that_nobody_ran_is_called_untested(
    version: str, is_tested: bool
) -> None:
    assert ("untested" not in doctor_module._torch_version(version).found) == is_tested


def test_a_failure_without_a_word_is_named_by_its_type() -> None:
    failure = RankFailure("1 of 2 ranks failed")
    assert doctor_module._last_line(failure) == "1 of 2 ranks failed"
    failure.__cause__ = MemoryError()
    assert doctor_module._last_line(failure) == "MemoryError"
