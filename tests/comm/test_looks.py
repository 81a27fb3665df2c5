"""The watch without processes: what ranks that wait see when they look, and when they give up."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise._torch_compat import HashStore
from shardwise.comm import board, watch
from shardwise.comm.marks import Mark, mark_of
from shardwise.comm.ranks import GroupRanks
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence


class Group:
    """A rank's end of a group, of which nothing is asked but to close."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.is_closed = False

    def recv(self, *message: object) -> Any:
        self.is_closed = True
        return SimpleNamespace(wait=lambda timeout: None)


class Ranks:
    """Three or more, which look when they are told to, and wait since a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 3) -> None:
        self.now = 0.0
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(board, "group_store", lambda group: group.store)
        monkeypatch.setattr(watch, "_watch_over", lambda watch: None)
        store, members = HashStore(), GroupRanks(tuple(range(num_ranks)))
        self.groups: list[Any] = [Group(store) for _ in members]
        self.watches = [
            watch.Watch(self.groups[rank], members, rank, name="some") for rank in members
        ]

    def wait(self, rank: int) -> None:
        self.watches[rank]._waits_since = self.now

    def closed(self, now: float) -> list[int]:
        """The ranks that have closed their connections once all have looked, and looked again."""
        self.now = now
        for one in self.watches * 2:
            one.look()
        return [rank for rank, group in enumerate(self.groups) if group.is_closed]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def _marks(sizes: Sequence[int]) -> list[Mark]:
    specs = [shardwise.chunk(dim, ranks=range(3)) for dim in (0, 1)]
    rows, columns = ([spec.layout((size, 2)) for size in sizes] for spec in specs)
    plans = [plan_reshard(*ends, itemsize=4) for ends in zip(rows, columns, strict=True)]
    return [mark_of([(plan, torch.float32)]) for plan in plans]


def test_messages_are_compared_by_their_number_on_a_link(ranks: Ranks) -> None:
    marks = _marks(range(1, 200))
    assert len({mark.tag for mark in marks}) == len(marks)
    first, second, third = ranks.watches
    for mark in marks[:100]:
        first.sent[1].add(mark)
        first.received[1].add(mark)
        first.sent[2].add(mark)
    for mark in marks[:90]:  # behind, and in the same
        second.sent[0].add(mark)
        second.received[0].add(mark)
    second._write_down()
    assert first._found() is None
    for mark in (*marks[:70], *marks[71:101]):  # one call less than the first
        third.received[0].add(mark)
    third._write_down()
    here, there = (mark.words.short for mark in marks[70:72])
    start = f"ranks do not move the same: rank 0: {here}; rank 2:"
    assert first._found() == f"{start} something else"
    first._write_down()
    assert third._found() == f"ranks do not move the same: rank 2: {there}; rank 0: {here}"
    assert first._found() == f"{start} {there}"
    assert second._found() is None
    for mark in marks[100:]:
        first.sent[2].add(mark)
    assert first._found() is None  # nothing is known of messages that long ago
    first._write_down()
    assert third._found() is None


def test_what_is_written_down_stays_as_long_as_nothing_is_added(ranks: Ranks) -> None:
    """A rank that waits for one that is slow would fill the store with the same, twice a second."""
    (mark,) = _marks([3])
    one, written = ranks.watches[0], []
    ranks.groups[0].store = SimpleNamespace(
        set=lambda key, text: written.append(key), add=lambda key, number: number
    )
    for count in (1, 2):
        one.sent[1].add(mark)
        one._write_down()
        one._write_down()
        assert written == ["some/messages/0 for 1"] * count


def test_who_waits_where_nothing_went_wrong_asks_the_store_for_few_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of ranks may wait for one that is late, and all look twice a second."""
    ranks = Ranks(monkeypatch, 32)
    store, asked = ranks.groups[0].store, Counter[str]()

    def counted(name: str) -> Any:
        def ask(*args: Any) -> Any:
            asked[name] += 1
            return getattr(store, name)(*args)

        return ask

    ranks.groups[0].store = SimpleNamespace(
        **{name: counted(name) for name in ("add", "check", "get", "set")}
    )
    (mark,) = _marks([3])
    for rank in range(31):
        ranks.wait(rank)
        for peer in {*range(32)} - {rank}:  # of whom the last has not come
            ranks.watches[rank].received[peer].add(mark)
            ranks.watches[rank].sent[peer].add(mark)
    for one in ranks.watches[:31]:
        one._write_down()
    ranks.watches[0]._found()
    asked.clear()
    ranks.now = 1.5 * watch._PATIENCE
    for _ in range(10):
        ranks.watches[0].look()
    assert sum(asked.values()) <= 10 * 2 * 3  # a check and a get, of three kinds of news
    ranks.watches[31].tell(ValueError("rows"))
    for _ in range(10):
        ranks.watches[0].look()
    assert asked["check"] < 200  # the texts of all once, and again after its own
    assert ranks.closed(1.6 * watch._PATIENCE) == list(range(31))


def test_nobody_closes_while_a_rank_that_comes_late_may_be_sending(ranks: Ranks) -> None:
    ranks.watches[1].tell(ValueError("rows"))
    ranks.wait(0)
    assert ranks.closed(0.8 * watch._PATIENCE) == []
    ranks.wait(2)
    assert ranks.closed(1.2 * watch._PATIENCE) == []  # rank 2 does not know yet
    assert ranks.closed(1.9 * watch._PATIENCE) == [0, 2]


def test_those_who_never_come_are_not_waited_for(ranks: Ranks) -> None:
    ranks.watches[1].tell(ValueError("rows"))
    ranks.wait(0)
    assert ranks.closed(1.9 * watch._PATIENCE) == []
    assert ranks.closed(2.0 * watch._PATIENCE) == [0]


def test_those_who_know_of_a_failure_from_each_other_see_that_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 4)
    ranks.watches[3].tell(ValueError("rows"))
    for rank in (0, 1):
        ranks.wait(rank)
    assert ranks.closed(1.2 * watch._PATIENCE) == []  # rank 2 has not come
    ranks.watches[3].comes()
    assert ranks.closed(1.5 * watch._PATIENCE) == []
    assert ranks.closed(4.0 * watch._PATIENCE) == []
    ranks.watches[3].tell(ValueError("columns"))
    assert ranks.closed(5.0 * watch._PATIENCE) == [0, 1]


def test_a_wait_that_ended_well_is_forgotten(ranks: Ranks) -> None:
    """Rank 0 may be sending when another rank raises, and is to be waited for like any other."""

    def comes_late() -> None:
        assert ranks.closed(1.2 * watch._PATIENCE) == []
        ranks.watches[1].comes()

    ranks.watches[1].tell(ValueError("rows"))
    message: Any = SimpleNamespace(wait=comes_late)
    ranks.watches[0].wait([(1, message)])
    ranks.watches[1].tell(ValueError("columns"))
    ranks.wait(2)
    assert ranks.closed(ranks.now + 1.9 * watch._PATIENCE) == []
    assert ranks.closed(ranks.now + 0.1 * watch._PATIENCE) == [2]


def test_no_wait_ends_while_the_watching_thread_has_its_group(ranks: Ranks) -> None:
    """It would hold it last: its end may take minutes, in which that thread looks nowhere."""
    one, began, comes = ranks.watches[0], threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        comes.wait(60)

    waiting = threading.Thread(target=one.wait, args=[[(1, SimpleNamespace(wait=wait))]])
    was_waiting = []

    def check(keys: list[str]) -> bool:
        comes.set()
        waiting.join(0.2)
        was_waiting.append(waiting.is_alive())
        return False

    ranks.groups[0].store = SimpleNamespace(check=check)
    waiting.start()
    assert began.wait(60)
    ranks.now = watch._PATIENCE
    one.look()
    waiting.join()
    assert was_waiting
    assert all(was_waiting)
    assert one._waits_since is None
