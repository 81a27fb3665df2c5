"""How much ranks compare before they act: `set_check`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Literal, get_args

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.settings import Setting

if TYPE_CHECKING:
    from shardwise.settings import Change

__all__ = [
    "DEBUGGERS",
    "CheckMode",
    "Checks",
    "check_timeout",
    "is_debugging",
    "set_check",
    "should_check",
]

CheckMode = Literal["always", "debug", "never"]  # how much ranks compare
_MODES: tuple[CheckMode, ...] = get_args(CheckMode)
_MODE_VARIABLE = "SHARDWISE_CHECK"
_TIMEOUT_VARIABLE = "SHARDWISE_CHECK_TIMEOUT"
# What has asked for "debug": while it is empty, ops need not call `is_debugging`. But the first has
# to, which reads the environment.
DEBUGGERS: list[str] = []


@dataclass(frozen=True, slots=True)
class Checks:
    """What is compared between ranks, and for how long ranks wait for each other to do so."""

    mode: CheckMode
    timeout: float  # seconds


def set_check(mode: CheckMode, *, timeout: float | None = None) -> Change[Checks]:
    """Sets how much ranks compare before they act; in a `with` statement, for its block only.

    "always" (the default) compares the arguments of calls that create or shard tensors, "debug"
    those of every reshard and op too, "never" none. A difference raises the same error on every
    rank; a rank that has not come after `timeout` seconds (60; None keeps what was set) is named
    on those that wait for it. The mode must be the same on all ranks. A process starts with the
    environment variables SHARDWISE_CHECK and SHARDWISE_CHECK_TIMEOUT.

    >>> with set_check("debug", timeout=10):
    ...     check_timeout()
    10.0
    """
    now = _CHECKS.get()
    checked = _checked_mode(mode, "mode of set_check")
    if timeout is None:
        return _CHECKS.change(replace(now, mode=checked))
    return _CHECKS.change(Checks(checked, _checked_timeout(timeout, "timeout of set_check")))


def should_check(*, hot: bool) -> bool:
    """Whether to compare here; `hot` calls, such as ops, are compared in "debug" only."""
    mode = _CHECKS.get().mode
    return mode == "debug" or (mode == "always" and not hot)


def is_debugging() -> bool:
    """The same for `hot` calls, said quicker."""
    held = _CHECKS._context.get() or _CHECKS._process
    return (_CHECKS.get() if held is None else held[0]).mode == "debug"


def check_timeout() -> float:
    """How many seconds to wait for ranks that have not come."""
    return _CHECKS.get().timeout


def _from_environment() -> Checks:
    mode = os.environ.get(_MODE_VARIABLE, "always")
    seconds = os.environ.get(_TIMEOUT_VARIABLE, "60")
    try:
        timeout: object = float(seconds)
    except ValueError:
        timeout = seconds
    return Checks(
        _checked_mode(mode, f"environment variable {_MODE_VARIABLE}"),
        _checked_timeout(timeout, f"environment variable {_TIMEOUT_VARIABLE}"),
    )


def _checked_mode(mode: object, what: str) -> CheckMode:
    for known in _MODES:
        if mode == known:
            if known == "debug" and not DEBUGGERS:
                DEBUGGERS.append(what)
            return known
    raise ArgumentValueError(what, expected=f"one of {', '.join(_MODES)}", got=repr(mode))


def _checked_timeout(timeout: object, what: str) -> float:
    expected = "a number of seconds above 0"
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise ArgumentTypeError(what, expected=expected, got=repr(timeout))
    seconds = float(timeout)
    if not seconds > 0 or math.isinf(seconds):  # nan is not above 0
        raise ArgumentValueError(what, expected=expected, got=seconds)
    return seconds


_CHECKS: Setting[Checks] = Setting("shardwise_checks", _from_environment)
