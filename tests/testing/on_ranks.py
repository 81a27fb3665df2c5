"""What the tests of `run_local` share: functions for ranks, and how long a hang may last."""

from __future__ import annotations

import os
import time

__all__ = ["HANG_GUARD", "busy", "pid_of"]

# Nothing is asserted to be fast. This bound only tells "ended early" from "waited for the timeout
# of 60 s or for gloo's own".
HANG_GUARD = 30.0


def pid_of(rank: int) -> int:
    """The process of a rank."""
    return os.getpid()


def busy(seconds: float = HANG_GUARD) -> None:
    """Stays in Python code, but never for good: a test that fails to end it still ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
