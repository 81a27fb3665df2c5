"""Links between ranks of one host: [Note: links], with all ranks in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from shardwise.comm import host_links
from shardwise.comm.host_links import MOST_RANKS, WORD_BYTES, HostLinks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")


def _made(num_ranks: int) -> list[HostLinks]:
    return [HostLinks(position, num_ranks) for position in range(num_ranks)]


def _step(ranks: list[HostLinks]) -> list[bytes]:
    """Everybody hears everybody's word."""
    words = [rank.word() for rank in ranks]
    for rank in ranks:
        rank.said(words)
    return words


def _offered(num_ranks: int) -> list[HostLinks]:
    """All ranks' links after all steps."""
    ranks = _made(num_ranks)
    for _ in range(3):
        assert {len(word) for word in _step(ranks)} == {WORD_BYTES}
    assert {rank.word() for rank in ranks} == {b""}
    return ranks


def _name(rank: HostLinks) -> bytes:
    """Of the socket under which it listens, as any user of the host sees it."""
    name = host_links._address(rank._secret)
    assert name[1:] in Path("/proc/net/unix").read_bytes()
    assert rank._secret.hex().encode() not in name
    return name


@pytest.mark.parametrize("num_ranks", [2, 3, MOST_RANKS])
def test_everybody_hears_everybody(num_ranks: int) -> None:
    ranks = _offered(num_ranks)
    assert all(rank.are_up for rank in ranks)
    for number in (1, 2, 7):
        for position, rank in enumerate(ranks):
            rank.tell(number, bytes([position, number]))
        for position, rank in enumerate(ranks):
            expected = {at: bytes([at, number]) for at in range(num_ranks) if at != position}
            assert rank.hear(number, 10) == expected


def test_a_rank_may_be_one_exchange_ahead() -> None:
    first, second = _offered(2)
    first.tell(1, b"a")
    second.tell(1, b"b")
    assert first.hear(1, 10) == {1: b"b"}
    first.tell(2, b"c")
    assert second.hear(1, 10) == {0: b"a"}
    second.tell(2, b"d")
    assert second.hear(2, 10) == {0: b"c"}
    assert first.hear(2, 10) == {1: b"d"}


def test_what_an_exchange_left_behind_is_passed_over() -> None:
    first, second = _offered(2)
    for number in (1, 2, 3):
        second.tell(number, bytes([number]))
    assert first.hear(3, 10) == {1: b"\3"}


def test_those_who_do_not_come_in_time_are_missing() -> None:
    first, second, third = _offered(3)
    third.tell(1, b"here")
    began = time.monotonic()
    assert first.hear(1, 0.2) == {2: b"here"}
    assert time.monotonic() - began >= 0.2
    second.tell(1, b"late")
    assert first.hear(1, 0.2) == {1: b"late"}  # of the third, this was heard before


def test_a_rank_that_waits_is_woken() -> None:
    first, second = _offered(2)
    timer = threading.Timer(0.1, second.tell, (1, b"at last"))
    timer.start()
    assert first.hear(1, 30) == {1: b"at last"}
    timer.join()


@pytest.mark.parametrize("gone", [1, 2])
def test_the_end_of_any_rank_is_seen_while_others_are_waited_for(gone: int) -> None:
    ranks = _offered(3)
    timer = threading.Timer(0.1, ranks[gone].close)
    timer.start()
    began = time.monotonic()
    assert ranks[0].hear(1, 60) == {}
    assert time.monotonic() - began < 30
    assert ranks[0].gone == {gone}
    timer.join()


def test_the_end_of_a_rank_is_seen_at_once() -> None:
    first, second, third = _offered(3)
    third.tell(1, b"here")
    second.close()
    began = time.monotonic()
    assert first.hear(1, 60) == {2: b"here"}
    first.tell(2, b"anybody?")
    assert first.hear(2, 60) == {}  # nor is the third waited for
    assert time.monotonic() - began < 30


def test_a_rank_that_comes_late_does_not_take_what_was_left_for_a_meeting() -> None:
    """The digest of a rank that has given up is still there to be read."""
    first, second = _offered(2)
    first.tell(1, b"a")
    assert first.hear(1, 0.01) == {}
    first.close()
    second.tell(1, b"b")
    assert second.hear(1, 60) == {}


@pytest.mark.parametrize("closes", ["the rank", "the fork"])
def test_a_fork_of_a_rank_neither_keeps_its_links_nor_ends_them(closes: str) -> None:
    """Workers of a data loader have the sockets of the rank that forked them."""
    first, second = _offered(2)
    lives, ends = os.pipe()
    ready, closed = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork has not
        fork = os.fork()
    if fork == 0:
        os.close(ends)
        if closes == "the fork":
            first.close()
        os.write(closed, b"!")
        os.read(lives, 1)  # until the test ends
        os._exit(0)
    try:
        os.read(ready, 1)
        first.tell(1, b"a")
        if closes == "the rank":
            first.close()
        second.tell(1, b"b")
        assert second.hear(1, 10) == ({} if closes == "the rank" else {0: b"a"})
    finally:
        for one in (lives, ends, ready, closed):
            os.close(one)
        os.waitpid(fork, 0)


def test_a_rank_that_cannot_be_reached_keeps_all_from_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = _made(3)
    words = [rank.word() for rank in ranks]
    words[1] = words[1][:1] + bytes(range(1, 17))  # rank 1 is elsewhere
    for rank in ranks:
        rank.said(words)
    assert [word[1] for word in _step(ranks)] == [1, 1, 0]
    assert {rank.word() for rank in ranks} == {b""}
    assert not any(rank.are_up for rank in ranks)
    monkeypatch.setattr(sys, "platform", "darwin")
    ranks = _made(2)
    _step(ranks)
    assert {rank.word() for rank in ranks} == {b""}


@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_that_was_interrupted_keeps_all_from_links(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _made(3)
    for _ in range(step):
        _step(ranks)
    words = [rank.word() for rank in ranks]
    follow = ("_connect", "_accept")[step]

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks[1], follow, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks[1].said(words)
    for rank in ranks:
        rank.said(words)
    _step(ranks)
    assert {rank.word() for rank in ranks} == {b""}
    assert not any(rank.are_up for rank in ranks)


def test_ranks_that_are_not_in_the_same_step_have_no_links() -> None:
    ranks = _made(2)
    words = _step(ranks)
    words = [words[0], ranks[1].word()]  # the first has heard nothing
    for rank in ranks:
        rank.said(words)
    assert {rank.word() for rank in ranks} == {b""}


def test_strangers_are_not_let_in() -> None:
    ranks = _made(2)
    words = [rank.word() for rank in ranks]
    strangers = []
    for name in map(_name, ranks):
        for said in (b"", b"\1" * 18, name[:18]):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            strangers.append(stranger)
            stranger.connect(name)
            if said:
                stranger.send(said)
    for rank in ranks:
        rank.said(words)
    for _ in range(2):
        _step(ranks)
    for position, rank in enumerate(ranks):
        rank.tell(1, bytes([position]))
    assert [rank.hear(1, 10) for rank in ranks] == [{1: b"\1"}, {0: b"\0"}]
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_strangers_keep_busy_has_no_links() -> None:
    ranks = _made(2)
    words = [rank.word() for rank in ranks]
    strangers = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            strangers[-1].setblocking(False)
            strangers[-1].connect(_name(ranks[0]))
    assert 0 < len(strangers) < 100
    for rank in ranks:
        rank.said(words)
    assert [word[1] for word in _step(ranks)] == [1, 0]
    assert {rank.word() for rank in ranks} == {b""}
    for stranger in strangers:
        stranger.close()


def test_a_rank_without_a_descriptor_for_a_link_says_so_in_time() -> None:
    ranks = _made(3)
    words = [rank.word() for rank in ranks]
    for rank in ranks:
        rank.said(words)
    words = [rank.word() for rank in ranks]
    for rank in ranks[1:]:
        rank.said(words)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        ranks[0].said(words)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [word[1] for word in _step(ranks)] == [0, 1, 1]
    assert {rank.word() for rank in ranks} == {b""}
    assert not any(rank.are_up for rank in ranks)


def test_a_wait_may_be_longer_than_the_kernel_counts() -> None:
    first, second = _offered(2)
    second.tell(1, b"here")
    assert first.hear(1, 1e9) == {1: b"here"}


def test_links_that_are_dropped_leave_no_socket_open() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HostLinks(0, 2).word()
        _offered(3)
        gc.collect()
    assert not [one for one in caught if issubclass(one.category, ResourceWarning)]
