"""What was found to be missing or too much when state was loaded."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["IncompatibleKeys"]


class IncompatibleKeys(NamedTuple):
    """As `Module.load_state_dict` returns it; names of an optimizer's state are among them."""

    missing_keys: list[str]
    unexpected_keys: list[str]
