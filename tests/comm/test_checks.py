"""set_check: three modes, a timeout, the environment, and blocks."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import TYPE_CHECKING

import pytest

import shardwise
from shardwise.comm import checks
from shardwise.comm.checks import check_timeout, set_check, should_check
from shardwise.errors import ArgumentTypeError, ArgumentValueError, ShardwiseError

if TYPE_CHECKING:
    from types import ModuleType

    from shardwise.comm.checks import CheckMode


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a new process has it, before the first use."""
    monkeypatch.delenv("SHARDWISE_CHECK", raising=False)
    monkeypatch.delenv("SHARDWISE_CHECK_TIMEOUT", raising=False)
    spec = importlib.util.spec_from_file_location("fresh_checks", checks.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mode", "cold", "hot"),
    [("always", True, False), ("debug", True, True), ("never", False, False)],
)
def test_hot_calls_are_checked_in_debug_only(mode: CheckMode, cold: bool, hot: bool) -> None:
    with set_check(mode):
        assert (should_check(hot=False), should_check(hot=True)) == (cold, hot)


def test_a_block_restores_mode_and_timeout() -> None:
    before = should_check(hot=True), check_timeout()
    with shardwise.set_check("debug", timeout=7):
        assert (should_check(hot=True), check_timeout()) == (True, 7.0)
        with set_check("never"):
            assert (should_check(hot=False), check_timeout()) == (False, 7.0)
        assert should_check(hot=True)
    assert (should_check(hot=True), check_timeout()) == before


def test_without_a_block_the_setting_stays() -> None:
    outer = set_check("always")
    with outer:  # whatever happens here ends here
        set_check("debug", timeout=3)
        assert (should_check(hot=True), check_timeout()) == (True, 3.0)


def test_the_default_is_always_and_a_minute(fresh: ModuleType) -> None:
    assert (fresh.should_check(hot=False), fresh.should_check(hot=True)) == (True, False)
    assert fresh.check_timeout() == 60.0


def test_a_process_starts_with_its_variables(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CHECK", "debug")
    monkeypatch.setenv("SHARDWISE_CHECK_TIMEOUT", "2.5")
    assert (fresh.should_check(hot=True), fresh.check_timeout()) == (True, 2.5)
    fresh.set_check("never")
    assert (fresh.should_check(hot=False), fresh.check_timeout()) == (False, 2.5)


def test_a_wrong_mode_in_the_environment_is_named_at_the_first_use(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CHECK", "sometimes")
    expected = r"variable SHARDWISE_CHECK: expected one of always, debug, never, got 'sometimes'"
    with pytest.raises(ArgumentValueError, match=expected):
        fresh.should_check(hot=False)


@pytest.mark.parametrize("seconds", ["soon", "0", "inf", ""])
def test_a_wrong_timeout_in_the_environment_is_named_at_the_first_use(
    seconds: str, fresh: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CHECK_TIMEOUT", seconds)
    with pytest.raises(ShardwiseError, match="variable SHARDWISE_CHECK_TIMEOUT: expected a number"):
        fresh.check_timeout()


@pytest.mark.parametrize("mode", ["sometimes", "", None, True])
def test_a_wrong_mode_is_refused(mode: CheckMode) -> None:
    with pytest.raises(ArgumentValueError, match="mode of set_check: expected one of always, deb"):
        set_check(mode)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf])
def test_a_timeout_out_of_range_is_refused(timeout: float) -> None:
    with pytest.raises(ArgumentValueError, match="timeout of set_check: expected a number of sec"):
        set_check("always", timeout=timeout)
    with pytest.raises(ArgumentTypeError, match="got '60'"):
        set_check("always", timeout="60")  # type: ignore[arg-type]  # the point of the test
