"""Copies beside messages: which thread makes them, and when, and what must hold for any call."""

from __future__ import annotations

import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import shardwise
from shardwise.comm import aside, execute, short
from shardwise.comm.aside import Aside
from shardwise.comm.flights import PostedFlight
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import plan_reshard

SHAPE = (1200, 1200)  # of which a third of a third is copied, 625 KiB of float32


def _moved(rank: int, num_cores: int, large: int, with_inference: bool) -> tuple[list[str], bool]:
    """Which threads copied and what was sent, in order; whether the result is for inference."""
    rows, columns = (shardwise.chunk(dim).layout(SHAPE) for dim in (0, 1))
    plan, events = plan_reshard(rows, columns, 4), list[str]()
    full = assemble(rows, random_shards(rows))
    copy, send = short._copy, PostedFlight.send

    def noted_copy(copies: object, held: object) -> None:
        if copies:
            events.append(threading.current_thread().name.split("_")[0])
        copy(copies, held)  # type: ignore[arg-type]  # as they come

    def noted_send(flight: PostedFlight, peer: int, buffer: torch.Tensor) -> None:
        events.append("send")
        send(flight, peer, buffer)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(with_inference):
        patch.setattr(aside, "_num_cores", lambda: num_cores)
        patch.setattr(short, "_LARGE", large)
        patch.setattr(short, "_copy", noted_copy)
        patch.setattr(PostedFlight, "send", noted_send)
        for _ in range(3):
            events.clear()  # the first time the plan is not known, and goes another way
            (found,) = execute(plan, random_shards(rows)[rank])
            assert torch.equal(found, full[columns.boxes_of(rank)[0].slices()])
    return events, found.is_inference()


@pytest.mark.parametrize("with_inference", [False, True])
def test_large_copies_are_made_beside_sends(with_inference: bool) -> None:
    large = 600 << 10
    for events, is_inference in shardwise.run_local(_moved, 3, 4, large, with_inference):
        assert sorted(events) == ["send", "send", "shardwise aside"]
        assert is_inference == with_inference


@pytest.mark.parametrize(
    ("num_cores", "large", "expected"),
    [
        (3, 600 << 10, ["send", "send", "MainThread"]),
        (3, 700 << 10, ["MainThread", "send", "send"]),
        (16, 700 << 10, ["send", "send", "MainThread"]),
    ],
)
def test_others_are_made_while_messages_fly_or_before_if_small_where_there_are_few_cores(
    num_cores: int, large: int, expected: list[str]
) -> None:
    found = shardwise.run_local(_moved, 3, num_cores, large, False)
    assert found == [(expected, False)] * 3


def _interrupted(rank: int) -> None:
    """A send fails while the copy is under way: it is over when that is raised."""
    rows, columns = (shardwise.chunk(dim).layout(SHAPE) for dim in (0, 1))
    plan, held = plan_reshard(rows, columns, 4), random_shards(rows)[rank]
    for _ in range(2):
        execute(plan, held)
    began, ended, copy = threading.Event(), threading.Event(), short._copy

    def slow(*args: object) -> None:
        began.set()
        time.sleep(0.1)
        copy(*args)  # type: ignore[arg-type]  # as they come
        ended.set()

    def fail(*_: object) -> None:
        assert began.wait(30)
        raise ConnectionError("cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "_num_cores", lambda: 4)
        patch.setattr(short, "_LARGE", 600 << 10)
        patch.setattr(short, "_copy", slow)
        patch.setattr(PostedFlight, "send", fail)
        with pytest.raises(ConnectionError, match="cut"):
            execute(plan, held)
        assert ended.is_set()


def test_a_copy_is_over_when_an_exchange_raises() -> None:
    shardwise.run_local(_interrupted, 2)


def test_calls_are_made_when_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the process."""
    ended, found = ThreadPoolExecutor(1), list[int]()
    ended.shutdown()
    monkeypatch.setattr(aside, "_num_cores", lambda: 8)
    monkeypatch.setattr(aside, "_pool", lambda _: ended)
    calls = Aside(is_large=True)
    for number in range(3):
        calls.call(partial(found.append, number))
    calls.catch_up()
    assert found == [0, 1, 2]


def test_other_threads_take_as_many_of_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_num_cores", lambda: 4)
    before, found = torch.get_num_threads(), list[int]()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            calls = Aside(is_large=True)
            calls.call(lambda: found.append(torch.get_num_threads()))
            calls.catch_up()
    finally:
        torch.set_num_threads(before)
    assert found == [2, 1]


def test_what_another_thread_raises_reaches_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_num_cores", lambda: 8)
    calls = Aside(is_large=True)
    calls.call(lambda: 1)
    calls.call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls.catch_up()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stay with the parent; who waited for them would wait for ever."""
    monkeypatch.setattr(aside, "_num_cores", lambda: 8)

    def ask() -> int:
        calls, found = Aside(is_large=True), list[int]()
        calls.call(lambda: found.append(7))
        calls.catch_up()
        return found[0]

    assert ask() == 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process with threads forks
        child = os.fork()
    if child == 0:
        os._exit(ask())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
