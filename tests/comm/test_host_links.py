"""Links between ranks of one host: [Note: links], with all ranks in this process."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings

import pytest

from shardwise.comm.host_links import MOST_RANKS, HostLinks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")


def _offered(num_ranks: int) -> list[HostLinks]:
    """All ranks' links after both steps, whatever came of them."""
    ranks = [HostLinks(position, num_ranks) for position in range(num_ranks)]
    for _ in range(2):
        told = [rank.to_say() for rank in ranks]
        assert len(set(map(len, told))) == 1
        for rank in ranks:
            rank.said(told)
    assert all(rank.to_say() == b"" for rank in ranks)
    return ranks


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


def test_a_rank_that_cannot_be_reached_keeps_all_from_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [HostLinks(position, 3) for position in range(3)]
    names = [rank.to_say() for rank in ranks]
    moved = [names[0], bytes(range(16)), names[2]]  # rank 1 is elsewhere
    for rank in ranks:
        rank.said(moved)
    told = [rank.to_say() for rank in ranks]
    assert told == [b"\1", b"\1", b"\0"]
    for rank in ranks:
        rank.said(told)
    assert not any(rank.are_up for rank in ranks)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not any(rank.are_up for rank in _offered(2))


def test_links_that_are_dropped_leave_no_socket_open() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HostLinks(0, 2).to_say()
        _offered(3)
        gc.collect()
    assert not [one for one in caught if issubclass(one.category, ResourceWarning)]
