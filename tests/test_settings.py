"""Setting: a value for the process, another for a block, and blocks that end in order."""

from __future__ import annotations

import threading

import pytest

from shardwise.settings import Setting


def _in_a_thread(setting: Setting[str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(setting.get()))
    thread.start()
    thread.join()
    return found[0]


def test_a_change_holds_for_the_process_and_its_threads() -> None:
    setting = Setting("s", lambda: "initial")
    assert setting.get() == "initial"
    setting.change("other")
    assert setting.get() == _in_a_thread(setting) == "other"


def test_a_change_for_a_block_ends_with_it_and_stays_in_its_thread() -> None:
    setting = Setting("s", lambda: "initial")
    with setting.change("inner"):
        assert setting.get() == "inner"
        assert _in_a_thread(setting) == "initial"
    assert setting.get() == "initial"


def test_a_block_that_raises_restores_too() -> None:
    setting = Setting("s", lambda: "initial")
    with pytest.raises(KeyError), setting.change("inner"):
        raise KeyError
    assert setting.get() == "initial"


def test_blocks_end_in_order() -> None:
    setting = Setting("s", lambda: 0)
    setting.change(1)
    with setting.change(2):
        with setting.change(3):
            assert setting.get() == 3
        assert setting.get() == 2
    assert setting.get() == 1


def test_a_change_inside_a_block_is_seen_at_once_and_ends_with_the_block() -> None:
    setting = Setting("s", lambda: 0)
    with setting.change(1):
        setting.change(2)
        assert setting.get() == 2
    assert setting.get() == 0


def test_a_change_can_be_entered_again() -> None:
    setting = Setting("s", lambda: 0)
    change = setting.change(1)
    with change:
        pass
    setting.change(5)
    with change, change:
        assert setting.get() == 1
    assert setting.get() == 5


def test_the_initial_value_is_asked_for_once_and_not_before_it_is_needed() -> None:
    asked: list[int] = []

    def initial() -> None:
        asked.append(1)

    setting = Setting("s", initial)
    assert asked == []
    assert setting.get() is None
    assert setting.get() is None
    assert asked == [1]


def test_an_initial_value_that_raises_can_be_replaced() -> None:
    def initial() -> int:
        raise ValueError("wrong")

    setting = Setting("s", initial)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            setting.get()
    with setting.change(1):
        assert setting.get() == 1
    setting.change(2)
    assert setting.get() == 2
