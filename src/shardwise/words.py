"""Counts, ranks, long texts and errors as people read them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "dtype_name",
    "headline",
    "plural",
    "rank_runs",
    "ranks_text",
    "run_text",
    "shortened",
]

_RUNS_SHOWN = 8


def plural(count: int, noun: str) -> str:
    """`1 rank`, `4,000 ranks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def dtype_name(dtype: object) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def shortened(text: str, *, most: int = 80) -> str:
    """The text, or its beginning and `...`: at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def headline(error: BaseException) -> str:
    """Type and first line of an exception, even of one that cannot tell its text.

    >>> headline(ValueError("no luck\\nat all")), headline(MemoryError())
    ('ValueError: no luck', 'MemoryError')
    """
    try:
        lines = str(error).splitlines()
    except Exception as broken:
        lines = [f"(its text raised {type(broken).__name__})"]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def rank_runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks, three or more neighbours together, others one by one.

    >>> rank_runs([0, 1, 2, 4, 5])
    [[0, 1, 2], [4], [5]]
    """
    runs: list[list[int]] = []
    # Neighbours have the same distance to their position in the list.
    for _, numbered in groupby(enumerate(ranks), lambda at: at[1] - at[0]):
        run = [rank for _, rank in numbered]
        runs += [run] if len(run) > 2 else [[rank] for rank in run]
    return runs


def run_text(run: Sequence[int]) -> str:
    """`0-2`, or `4` of one rank."""
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a message, in ascending order, of which long lists are shortened.

    >>> ranks_text([2]), ranks_text([4, 0, 1, 2, 6]), ranks_text([])
    ('rank 2', 'ranks 0-2, 4, 6', 'no ranks')
    """
    if not ranks:
        return "no ranks"
    runs = rank_runs(sorted(ranks))
    hidden = sum(map(len, runs[_RUNS_SHOWN:]))
    shown = ", ".join(map(run_text, runs[:_RUNS_SHOWN])) + (f" and {hidden} more" if hidden else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
