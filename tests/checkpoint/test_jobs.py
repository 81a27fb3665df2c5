"""Several processes write what one writes, and none of them outlives its caller's call."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from tests.checkpoint.folders import model

from shardwise.checkpoint import convert, converting, save
from shardwise.checkpoint.jobs import in_processes
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.checkpoint.converting import Format


@pytest.fixture
def eager_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes for small work, too."""
    monkeypatch.setattr(converting, "_WORTH_A_JOB", 1)


@pytest.mark.usefixtures("eager_jobs")
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_the_files_are_the_same_for_any_number_of_jobs(tmp_path: Path, to: Format) -> None:
    save({"model": model(), "step": 5}, tmp_path / "saved")
    for jobs in (1, 2):
        path = tmp_path / str(jobs)
        convert(tmp_path / "saved", path, to=to, world_size=3, max_bytes=200, jobs=jobs)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / k).iterdir()} for k in "12")
    assert one == two


@pytest.mark.usefixtures("eager_jobs")
def test_what_a_job_raises_ends_the_convert_and_leaves_nothing(tmp_path: Path) -> None:
    save({"model": model()}, tmp_path / "saved")
    os.truncate(tmp_path / "saved" / "model.safetensors", 1000)
    with pytest.raises(DamagedError, match=r"file 'model.safetensors' .* expected"):
        convert(tmp_path / "saved", tmp_path / "out", world_size=2, jobs=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def _tell_and_wait(number: int, advance: Callable[[int], None]) -> None:
    advance(os.getpid())
    threading.Event().wait()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "interrupted"])
def test_no_job_lives_on(kill: bool) -> None:
    """A job is killed from outside, or ^C comes, while all of them work."""
    jobs: list[int] = []

    def advance(process: int) -> None:
        jobs.append(process)
        if len(jobs) == 2 and kill:
            os.kill(jobs[0], signal.SIGKILL)
        elif len(jobs) == 2:
            raise KeyboardInterrupt

    with pytest.raises((CheckpointError, KeyboardInterrupt)) as raised:
        in_processes(_tell_and_wait, range(3), 2, advance)
    assert isinstance(raised.value, CheckpointError) == kill
    assert ("expected its files to be written, got it was ended by SIGKILL" in str(raised)) == kill
    assert len(set(jobs)) == 2
    assert not any(map(_is_alive, jobs))
