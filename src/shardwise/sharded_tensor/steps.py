"""Long work in steps, so that what a step has moved can be given up before the next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HasBytes", "in_steps"]

_STEPS = 32  # about as many exchanges


class HasBytes(Protocol):
    """Something of a global size, which is the same on every rank."""

    @property
    def nbytes(self) -> int:
        """How much it adds to a step."""


Item = TypeVar("Item", bound=HasBytes)


def in_steps(
    items: Sequence[Item], *, least: int = 1, most: int | None = None
) -> deque[list[Item]]:
    """Neighbours together, about `_STEPS` times, of `least` bytes or more; alike on every rank.

    No step of several items has more than `most` bytes.
    """
    limit = max(sum(item.nbytes for item in items) // _STEPS, least)
    if most is not None:
        limit = min(limit, most)
    steps: deque[list[Item]] = deque()
    size = 0
    for item in items:
        if not steps or size + item.nbytes > limit:
            steps.append([])
            size = 0
        steps[-1].append(item)
        size += item.nbytes
    return steps
