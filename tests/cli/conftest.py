"""What the tests of commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.running import run_command

if TYPE_CHECKING:
    from tests.cli.running import Run


@pytest.fixture
def run() -> Run:
    """A command in this process: status, standard output, standard error."""
    return run_command
