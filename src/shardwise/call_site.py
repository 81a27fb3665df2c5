"""Where in the user's code a call comes from."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["NOWHERE", "call_site", "user_level"]

# Modules that are not the user's; a simulated rank starts in `threading`.
_INNER = ("shardwise.", "torch.", "contextlib.", "functools.", "threading.")
NOWHERE = "?"  # no line is the user's: all of them are in torch's own modules


def _is_inner(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith(_INNER)


def user_level() -> int:
    """How far up the user's code is, as the caller would tell `warnings.warn` by `stacklevel`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inner(frame):
        level, frame = level + 1, frame.f_back
    return level


def call_site() -> str:
    """The innermost line of the user's code that is being run: "train.py:12"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    if frame is None:
        return NOWHERE
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
