"""Every failure of a rank is told in full, and the next call works; wrong calls are refused."""

from __future__ import annotations

import functools
import math
import os
import pickle
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch.distributed as dist
from tests.testing.on_ranks import HANG_GUARD, busy, pid_of

from shardwise.errors import ArgumentTypeError, ArgumentValueError, RankFailure
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from collections.abc import Callable


class TwoPartError(Exception):
    """Pickles, and cannot be unpickled: a real habit of real exception classes."""

    def __init__(self, part: str, other: str) -> None:
        super().__init__(f"{part} and {other}")


class MuteError(Exception):
    """An exception whose own text is a bug."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def _failure_of(
    fn: Callable[[int], object], world_size: int, *, timeout: float = 60.0
) -> RankFailure:
    """The failure of this call, after proof that the pool still works."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_local(fn, world_size, timeout=timeout)
    assert time.monotonic() - began < HANG_GUARD
    assert run_local(lambda rank: dist.get_world_size(), world_size) == [world_size] * world_size
    return caught.value


# ---- failures ----


def test_a_rank_that_raises_is_told_with_those_that_wait_for_it() -> None:
    def raise_in_one(rank: int) -> None:
        if rank == 1:
            raise ValueError("no luck")
        dist.barrier()

    failure = _failure_of(raise_in_one, 2)
    assert list(failure.failures) == [1, 0]
    assert failure.failures[1].startswith("rank 1 raised ValueError: no luck\nTraceback")
    assert "in raise_in_one" in failure.failures[1]
    waiting = "rank 0 was still running (waiting for the failed rank?) and was ended\n"
    assert failure.failures[0].startswith(waiting)
    assert "in raise_in_one" in failure.failures[0]
    assert all(story in str(failure) for story in failure.failures.values())
    assert isinstance(failure.__cause__, ValueError)


def test_every_failing_rank_shows_its_traceback() -> None:
    def raise_in_two(rank: int) -> None:
        if rank == 0:
            raise KeyError("left")
        if rank == 2:
            raise LookupError("right")

    failure = _failure_of(raise_in_two, 3)
    assert sorted(failure.failures) == [0, 2]
    assert "raise_in_two, world_size=3): 2 of 3 ranks failed" in str(failure)
    assert "rank 0 raised KeyError: 'left'\nTraceback" in str(failure)
    assert "rank 2 raised LookupError: right\nTraceback" in str(failure)
    assert str(failure).endswith("rank 1 returned")


def test_an_exception_that_cannot_be_rebuilt_is_still_told() -> None:
    def raise_two_parts(rank: int) -> None:
        raise TwoPartError("salt", "pepper")

    failure = _failure_of(raise_two_parts, 1)
    assert "rank 0 raised TwoPartError: salt and pepper" in str(failure)
    assert failure.__cause__ is None


def test_an_exception_without_a_text_is_still_told() -> None:
    def raise_mute(rank: int) -> None:
        if rank == 1:
            raise MuteError

    failure = _failure_of(raise_mute, 2)
    begin = "rank 1 raised MuteError: (its text raised RuntimeError)\nTraceback"
    assert failure.failures[1].startswith(begin)
    assert "in raise_mute" in failure.failures[1]


def test_a_failure_can_be_pickled() -> None:
    failure = RankFailure("it failed", failures={1: "rank 1 raised"})
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.failures) == ("it failed", {1: "rank 1 raised"})


@pytest.mark.parametrize(
    ("end", "story"),
    [
        (lambda: os._exit(3), "rank 1 exited with code 3 without answering"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 1 was ended by SIGKILL without answering",
        ),
    ],
)
def test_a_rank_that_exits_is_told_before_those_that_fail_by_it(
    end: Callable[[], None], story: str
) -> None:
    failure = _failure_of(lambda rank: end() if rank == 1 else dist.barrier(), 2)
    assert failure.failures[1] == story
    assert list(failure.failures) == [1, 0]


def test_a_system_exit_counts_as_raised() -> None:
    failure = _failure_of(lambda rank: sys.exit(4) if rank == 1 else None, 2)
    assert failure.failures[1].startswith("rank 1 raised SystemExit: 4\nTraceback")
    assert list(failure.failures) == [1]


def test_a_crash_shows_where_it_happened() -> None:
    def crash(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    story = _failure_of(crash, 1).failures[0]
    assert story.startswith("rank 0 was ended by SIGSEGV without answering\n")
    assert " in crash" in story


def test_a_hang_ends_with_the_stacks_of_the_hung_ranks() -> None:
    def hang_in_two_ways(rank: int) -> None:
        if rank == 0:
            busy()
        if rank == 1:
            dist.barrier()

    failure = _failure_of(hang_in_two_ways, 3, timeout=4)
    assert sorted(failure.failures) == [0, 1]
    for rank, frame in ((0, " in busy"), (1, " in barrier")):
        story = failure.failures[rank]
        assert story.startswith(f"rank {rank} was still running after 4 s and was ended\n")
        assert frame in story
        assert " in hang_in_two_ways" in story
        assert "end_with_parent" not in story
    assert str(failure).endswith("rank 2 returned")


def test_a_result_that_cannot_be_pickled_names_rank_and_type() -> None:
    failure = _failure_of(lambda rank: threading.Lock() if rank == 1 else None, 2)
    assert "rank 1 returned a lock that cannot be pickled: TypeError: cannot" in str(failure)


def test_a_process_group_that_cannot_begin_is_the_ranks_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RankFailure, match="rank 1 raised RuntimeError") as caught:
        run_local(pid_of, 2)
    assert "init_process_group" in str(caught.value)


def test_arguments_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="expected values that can be pickled, got TypeErr"):
        run_local(lambda rank, lock: None, 2, threading.Lock())


def test_arguments_that_fail_to_pickle_without_a_text_are_refused() -> None:
    class Mute:
        def __reduce__(self) -> str:
            raise MuteError

    with pytest.raises(ArgumentTypeError, match="got MuteError: "):
        run_local(lambda rank, mute: None, 2, Mute())


# ---- wrong calls ----


def test_a_world_size_may_be_any_integer() -> None:
    assert run_local(lambda rank: dist.get_world_size(), np.int64(2)) == [2, 2]


@pytest.mark.parametrize("timeout", [None, "60", True, 1j])
def test_a_timeout_of_the_wrong_type_is_refused(timeout: float) -> None:
    with pytest.raises(ArgumentTypeError, match="timeout of run_local: expected a number of sec"):
        run_local(pid_of, 1, timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, -math.inf])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ArgumentValueError, match=f"seconds above 0, got {float(timeout)}"):
        run_local(pid_of, 1, timeout=timeout)


def test_a_function_already_called_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="fn of run_local: expected a function, got 5"):
        run_local(5, 1)  # type: ignore[arg-type]  # the point of the test


def test_arguments_that_do_not_fit_the_function_are_refused() -> None:
    def keyword_only(rank: int, *, scale: int) -> int:
        return rank * scale

    call = r"called as fn\(rank, \*args\): expected to take the rank and 1 more"
    with pytest.raises(ArgumentTypeError, match=call) as caught:
        run_local(pid_of, 2, 10)  # type: ignore[arg-type]  # the point of the test
    assert "too many positional arguments" in str(caught.value)
    with pytest.raises(ArgumentTypeError, match=r"missing a .*'scale'.*functools\.partial"):
        run_local(keyword_only, 2)  # type: ignore[arg-type]  # the point of the test
    assert run_local(functools.partial(keyword_only, scale=3), 2) == [0, 3]
    assert run_local(max, 2, 1) == [1, 1]  # a builtin without a signature


@pytest.mark.parametrize("world_size", [2.0, True, "2", None])
def test_a_world_size_of_the_wrong_type_is_refused(world_size: int) -> None:
    with pytest.raises(ArgumentTypeError, match="world_size of run_local: expected a whole number"):
        run_local(pid_of, world_size)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"expected at least 1 rank, got {world_size}"):
        run_local(pid_of, world_size)


def test_a_call_inside_a_rank_is_refused() -> None:
    failure = _failure_of(lambda rank: run_local(pid_of, 1), 1)
    assert "run_local was called inside a rank of run_local. Call it outside" in str(failure)
