"""The command line in this process."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple
from unittest import mock

from shardwise.cli import main

__all__ = ["Done", "run_command"]


class Done(NamedTuple):
    """What became of a command."""

    status: int
    out: str
    err: str


def run_command(*words: object) -> Done:
    """Status, standard output, standard error of `shardwise *words`."""
    out, err = StringIO(), StringIO()
    status: object = 0
    argv = mock.patch.object(sys, "argv", ["shardwise", *map(str, words)])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    return Done(int(str(status or 0)), out.getvalue(), err.getvalue())
