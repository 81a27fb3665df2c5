"""The processes of ranks: kept for later calls, replaced, and ended with their caller."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.on_ranks import HANG_GUARD, busy, pid_of

from shardwise.errors import RankFailure
from shardwise.testing.local_run import run_local
from shardwise.testing.rpc_workers import rpc_workers

if TYPE_CHECKING:
    from pathlib import Path


# ---- kept and replaced ----


def test_a_later_call_finds_the_same_processes() -> None:
    first = run_local(pid_of, 2)
    assert run_local(pid_of, 2) == first
    assert os.getpid() not in first
    larger = run_local(pid_of, 4)
    assert larger[:2] == first
    assert len(set(larger)) == 4


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    kept, killed = run_local(pid_of, 2)
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + HANG_GUARD
    while killed in {process.pid for process in multiprocessing.active_children()}:
        assert time.monotonic() < end
    after = run_local(pid_of, 2)
    assert after[0] == kept
    assert after[1] != killed


def test_a_replaced_rank_finds_the_package_imported() -> None:
    with pytest.raises(RankFailure, match="division by zero"):
        run_local(lambda rank: 1 / 0, 1)
    assert run_local(lambda rank: "shardwise.modules" in sys.modules, 1) == [True]


def _rpc_worker(rank: int, rendezvous: str, world_size: int) -> int:
    with rpc_workers(rendezvous, rank, world_size):
        return os.getpid()


def test_ranks_that_have_run_rpc_are_not_lent_again(tmp_path: Path) -> None:
    """torch's counts of RPC go on in a process: one of two groups would wait for one of one."""
    earlier = run_local(_rpc_worker, 2, str(tmp_path / "two"), 2)
    later = run_local(_rpc_worker, 3, str(tmp_path / "three"), 3)
    assert set(earlier).isdisjoint(later)


def test_what_a_call_leaves_in_a_cycle_is_gone_before_the_next() -> None:
    """A process group that ended in a fork of the rank, a DataLoader's worker, would crash it."""

    class Held:
        pass

    def leave(rank: int) -> None:
        held: Any = Held()
        held.itself = held
        sys.left = weakref.ref(held)  # type: ignore[attr-defined]  # seen by the next call

    def find(rank: int) -> bool:
        return sys.left() is None  # type: ignore[attr-defined]  # as above

    run_local(leave, 2)
    assert run_local(find, 2) == [True, True]


def test_an_interrupt_ends_the_busy_ranks_and_reaches_the_caller() -> None:
    def interrupt(rank: int, caller: int) -> None:
        if rank == 0:
            os.kill(caller, signal.SIGINT)
        busy()

    before = run_local(pid_of, 2)
    # A shell's background jobs ignore interrupts.
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_local(interrupt, 2, os.getpid())
    finally:
        signal.signal(signal.SIGINT, was)
    assert not set(run_local(pid_of, 2)) & set(before)


def test_an_interrupt_that_reaches_the_ranks_is_left_to_the_caller() -> None:
    assert run_local(lambda rank: os.kill(os.getpid(), signal.SIGINT), 2) == [None, None]


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    def start(rank: int, folder: Path) -> None:
        process = subprocess.Popen(["sleep", "60"])
        (folder / "pid").write_text(str(process.pid))
        busy()

    with pytest.raises(RankFailure, match="still running after 3 s"):
        run_local(start, 1, tmp_path, timeout=3)
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + HANG_GUARD
    while _is_running(child):
        assert time.monotonic() < end


def _is_running(pid: int) -> bool:
    """Whether it runs; an ended process that nobody has waited for yet does not."""
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False
    )
    return found.stdout.strip()[:1] not in ("", "Z")


# ---- the caller's end ----


def _output_of(script: str, tmp_path: Path) -> tuple[int, list[int]]:
    """Exit status and printed numbers, once all processes that hold the script's stdout ended."""
    path = tmp_path / "script.py"
    path.write_text(script)
    # A caller that is killed leaves its rendezvous behind; here, in a folder pytest removes.
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, text=True, env=environ
    )
    with process:
        try:
            output, _ = process.communicate(timeout=HANG_GUARD)
        finally:
            process.kill()
    return process.returncode, [int(word) for word in output.split()]


UNGUARDED = """
import multiprocessing, os
from shardwise.testing.local_run import run_local

print(*run_local(lambda rank: os.getpid(), 2), flush=True)
multiprocessing.set_start_method("spawn")  # raises if run_local has settled it

child = os.fork()
if child == 0:
    print(*run_local(lambda rank: rank + 10, 1), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_a_script_needs_no_guard_may_fork_and_takes_its_ranks_along(tmp_path: Path) -> None:
    status, (first, second, from_fork) = _output_of(UNGUARDED, tmp_path)
    assert (status, from_fork) == (0, 10)
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


KILLED = """
import os, signal, subprocess, time
from shardwise.testing.local_run import run_local

def kill_the_caller(rank, caller):
    print(rank)
    subprocess.Popen(["sleep", "60"])
    os.kill(caller, signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass

run_local(kill_the_caller, 1, os.getpid())
"""


@pytest.mark.long
def test_busy_ranks_and_their_children_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    # One that outlives the caller keeps stdout open, and reading it runs into the guard.
    assert _output_of(KILLED, tmp_path) == (-signal.SIGKILL, [0])


INTERRUPTED = """
import os, signal, threading, time
from multiprocessing import forkserver
from shardwise.testing.local_run import run_local

def interrupt():
    while forkserver._forkserver._forkserver_pid is None:
        time.sleep(0.01)
    time.sleep(0.3)  # it is importing torch now
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
threading.Thread(target=interrupt).start()
try:
    run_local(lambda rank: time.sleep(60), 2)  # still busy, should the thread be late
except KeyboardInterrupt:
    print(*run_local(lambda rank: rank + 10, 2))
"""


@pytest.mark.long
def test_a_call_works_after_an_interrupt_of_the_very_first(tmp_path: Path) -> None:
    assert _output_of(INTERRUPTED, tmp_path) == (0, [10, 11])
