"""The seed's way to the logger of this package."""

from __future__ import annotations

import logging

from shardwise.sharded_tensor.logging_handlers import _log_handlers

__all__ = ["_get_logging_handler", "_get_or_create_logger"]

_NAME = "shardwise.sharded_tensor"
_FORMAT = (
    "%(asctime)s %(filename)s:%(lineno)s %(levelname)s p:%(processName)s t:%(threadName)s: "
    "%(message)s"
)


def _get_or_create_logger() -> logging.Logger:
    """The package's logger, with the default handler of `logging_handlers`: by default none.

    Level and propagation are left to the program, as is usual for a library.
    """
    logger = logging.getLogger(_NAME)
    handler, _ = _get_logging_handler()
    if handler.formatter is None:
        handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)  # once, however often it is asked for
    return logger


def _get_logging_handler(destination: str = "default") -> tuple[logging.Handler, str]:
    """The handler of a destination, and the name of its class."""
    handler = _log_handlers[destination]
    return handler, type(handler).__name__
