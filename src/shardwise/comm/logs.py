"""The package's logger, `shardwise`: INFO tells of long work, DEBUG of each exchange.

It says nothing until the program asks for it, by `logging.basicConfig(level=...)` or a handler.
"""

from __future__ import annotations

import logging

__all__ = ["LOG", "logs_exchanges", "logs_phases"]

LOG = logging.getLogger("shardwise")  # levels and handlers are the program's
LOG.addHandler(logging.NullHandler())


def logs_phases() -> bool:
    """Whether long work is to be told of."""
    return LOG.isEnabledFor(logging.INFO)


def logs_exchanges() -> bool:
    """Whether each exchange is to be told of."""
    return LOG.isEnabledFor(logging.DEBUG)
