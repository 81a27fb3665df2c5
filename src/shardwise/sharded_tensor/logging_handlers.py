"""The seed's table of log handlers, by destination; programs put their own into it."""

from __future__ import annotations

import logging

__all__ = ["_log_handlers"]

# Destination -> handler.
_log_handlers: dict[str, logging.Handler] = {"default": logging.NullHandler()}
