"""What callers pass to the functions of this package, checked."""

from __future__ import annotations

from shardwise.arguments import whole_number
from shardwise.errors import ArgumentTypeError
from shardwise.geometry import Layout
from shardwise.transfer import TransferPlan

__all__ = ["check_drawable", "check_title", "number_or_none"]


def check_drawable(picture_of: object) -> None:
    """Raises unless there is a picture of it."""
    if not isinstance(picture_of, Layout | TransferPlan):
        raise ArgumentTypeError(
            "picture",
            expected="a Layout or a TransferPlan",
            got=type(picture_of).__name__,
            fix="Call spec.layout(shape), or plan_reshard(source, target, itemsize), first.",
        )


def check_title(title: object) -> None:
    """Raises unless it can stand above a picture, or there is none."""
    if title is not None and not isinstance(title, str):
        raise ArgumentTypeError("title", expected="a str or None", got=type(title).__name__)


def number_or_none(value: object, name: str) -> int | None:
    """A whole number from 1 on, or None."""
    return None if value is None else whole_number(value, name, least=1)
