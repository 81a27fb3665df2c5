"""Texts that ranks leave each other in a store: none is missed, whatever comes in between."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from shardwise._torch_compat import HashStore
from shardwise.comm import board
from shardwise.comm.board import Board

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = [0, 1]


class Group:
    """Something that has a store, and lives as long as somebody holds it."""

    def __init__(self, store: Any) -> None:
        self.store = store


@pytest.fixture(autouse=True)
def _groups_have_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "group_store", lambda group: group.store)


def _board(group: Any, rank: int) -> Board:
    return Board(group, rank, name="some")


def _instead_of(store: Any, **functions: Callable[..., Any]) -> Any:
    """The store with other functions of these names."""
    names = ("add", "check", "get", "set")
    return SimpleNamespace(**{name: functions.get(name, getattr(store, name)) for name in names})


def test_texts_for_all_and_for_one_are_read_until_they_are_taken_back() -> None:
    group = Group(HashStore())
    first, second = _board(group, 0), _board(group, 1)
    assert first.read("raised", RANKS) == {}
    second.write("raised", "one")
    second.write("messages", "two", reader=0)
    assert first.read("raised", RANKS) == {1: "one"}
    assert first.read("messages", RANKS, reader=0) == {1: "two"}
    assert first.read("messages", [0], reader=0) == {}  # not from those
    assert second.read("messages", RANKS, reader=1) == {}
    second.write("raised", "")
    assert first.read("raised", RANKS) == {}
    assert first.meaning("word") == ""
    second.explain("word", "what it means")
    assert first.meaning("word") == "what it means"


def test_a_text_that_comes_while_others_are_read_is_not_missed() -> None:
    """The number of news is that from before."""
    group = Group(HashStore())
    first, second = _board(group, 0), _board(group, 1)
    store = group.store
    first.write("raised", "something")

    def check(keys: list[str]) -> bool:
        found: bool = store.check(keys)
        if keys == ["some/raised/1"]:
            group.store = store
            second.write("raised", "in between")
        return found

    group.store = _instead_of(store, check=check)
    assert first.read("raised", RANKS) == {0: "something"}
    assert first.read("raised", RANKS) == {0: "something", 1: "in between"}


def test_what_was_written_half_is_written_again() -> None:
    group = Group(HashStore())
    first, second = _board(group, 0), _board(group, 1)
    store = group.store

    def fails(*_: object) -> None:
        raise RuntimeError("connection reset")

    for name in ("set", "add"):
        group.store = _instead_of(store, **{name: fails})
        second.write("raised", name)  # raises nothing
        group.store = store
        second.write("raised", name)
        assert first.read("raised", RANKS) == {1: name}
    group.store = _instead_of(store, set=fails)
    second.write("raised", "")
    group.store = store
    second.write("raised", "")
    assert first.read("raised", RANKS) == {}


def test_a_text_is_taken_back_in_one_thread_after_another_wrote_it() -> None:
    group = Group(HashStore())
    one, other = _board(group, 0), _board(group, 1)
    store, is_in, goes_on = group.store, threading.Event(), threading.Event()

    def add(key: str, number: int) -> int:
        is_in.set()
        assert goes_on.wait(60)
        added: int = store.add(key, number)
        return added

    group.store = _instead_of(store, add=add)
    tells = threading.Thread(target=one.write, args=["raised", "a mistake"])
    tells.start()
    assert is_in.wait(60)
    group.store = store
    comes = threading.Thread(target=one.write, args=["raised", ""])
    comes.start()
    goes_on.set()
    tells.join()
    comes.join()
    assert other.read("raised", RANKS) == {}


def test_looking_writes_nothing(tmp_path: Path) -> None:
    """A file store would grow with every look of every rank that waits."""
    path = tmp_path / "store"
    group = Group(dist.FileStore(str(path), 2))  # type: ignore[attr-defined]  # not in its stubs
    first, second = _board(group, 0), _board(group, 1)
    second.write("raised", "one")
    assert first.read("raised", RANKS) == {1: "one"}
    size = path.stat().st_size
    for _ in range(10):
        assert first.read("raised", RANKS) == {1: "one"}
        assert first.read("waits", RANKS) == {}
    assert path.stat().st_size == size


def test_a_group_that_is_gone_has_no_texts() -> None:
    group = Group(HashStore())
    one = _board(group, 0)
    one.write("raised", "one")
    del group
    one.write("raised", "two")
    assert one.read("raised", RANKS) == {}
    assert one.meaning("word") == ""
