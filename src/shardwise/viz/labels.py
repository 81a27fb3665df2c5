"""What is written in a box: `0`, replicas `0,1`, pending addends `0+1` or `0,1 + 2,3`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardwise.words import rank_runs, run_text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NUM_LEVELS", "box_label"]

T = TypeVar("T")

NUM_LEVELS = 4  # how far labels can be shortened
_MOST_SPELLED_OUT = 16


def box_label(ranks_by_term: Sequence[Sequence[int]], level: int) -> str:
    """Label of a box; each level is shorter, from everything (0) to the first rank (3).

    >>> [box_label([[0, 8, 16, 24, 32]], level) for level in range(NUM_LEVELS)]
    ['0,8,16,24,32', '0,8,…,32', '0,…,32', '0…']
    """
    first = ranks_by_term[0][0]
    if level == NUM_LEVELS - 1:
        alone = len(ranks_by_term) == 1 and len(ranks_by_term[0]) == 1
        return f"{first}" if alone else f"{first}…"
    if level == 0 and len(ranks_by_term) > _MOST_SPELLED_OUT:
        level = 1
    replicas = any(len(ranks) > 1 for ranks in ranks_by_term)
    shown = _elide(ranks_by_term, level)
    names = ["…" if ranks is None else _name_ranks(ranks, level) for ranks in shown]
    return (" + " if replicas else "+").join(names)


def _name_ranks(ranks: Sequence[int], level: int) -> str:
    """Ascending ranks as `0-7`, `0,2,4` or, cut short, `0,2,…,14`."""
    if len(ranks) > _MOST_SPELLED_OUT:
        if ranks[-1] - ranks[0] == len(ranks) - 1:
            return f"{ranks[0]}-{ranks[-1]}"
        return ",".join("…" if rank is None else f"{rank}" for rank in _elide(ranks, max(level, 1)))
    return ",".join(
        "…" if run is None else run_text(run) for run in _elide(rank_runs(ranks), level)
    )


def _elide(items: Sequence[T], level: int) -> list[T | None]:
    """All items, or the first (level 1: two) and the last with None for those between."""
    head = 2 if level == 1 else 1
    if level == 0 or len(items) <= head + 1:
        return list(items)
    return [*items[:head], None, items[-1]]
