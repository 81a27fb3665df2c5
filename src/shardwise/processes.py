"""Starting Python processes that run none of the caller's script."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

__all__ = ["start"]


def start(process: BaseProcess) -> None:
    """Starts a process of a fork server or a spawned one; no default is settled by it."""
    default = multiprocessing.get_start_method(allow_none=True)
    try:
        with _blank_main(), _existing_cwd():
            process.start()
    finally:
        # A start settles an open default, and the caller may still want to choose one.
        multiprocessing.set_start_method(default, force=True)


@contextmanager
def _blank_main() -> Iterator[None]:
    """Hides `__main__`, so that the process does not run the caller's script again.

    multiprocessing would, for names pickled by reference to `__main__`; here those travel by
    value, and a script needs no `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _existing_cwd() -> Iterator[None]:
    """Leaves a working folder that was removed; multiprocessing and torch's import need one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        gone = os.open(".", os.O_RDONLY)
        os.chdir(os.sep)
        try:
            yield
        finally:
            os.fchdir(gone)
            os.close(gone)
    else:
        yield
