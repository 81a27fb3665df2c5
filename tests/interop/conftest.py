"""The end of the tests of other libraries' tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.testing import local_run

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """After the last test, ends the ranks: DTensor's caches keep the process group of every mesh.

    Each of these has a thread that wakes a hundred times a second, beside all later tests.
    """
    if nextitem is None or nextitem.path.parent != HERE:
        pool = local_run._pool
        pool._end(list(pool._ranks))
