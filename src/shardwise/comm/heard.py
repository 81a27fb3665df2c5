"""Which groups know of an exception that one of their ranks has raised, noted on it.

An exception goes through several calls on its way out, one inside of another, each of which would
tell the others of it; they want to hear of it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardwise.comm.ranks import GroupRanks

__all__ = ["How", "is_heard", "note_heard"]

# By a notice, which only those find that wait in an exchange of data, or by all ranks at once.
How = Literal["a notice", "all"]
_NAME = "_shardwise_heard"


def note_heard(problem: BaseException, ranks: GroupRanks, how: How) -> None:
    """The group of these ranks knows of it."""
    vars(problem).setdefault(_NAME, set()).add((ranks.ranks, how))


def is_heard(problem: BaseException, ranks: GroupRanks, how: How) -> bool:
    """Whether it was noted."""
    return (ranks.ranks, how) in vars(problem).get(_NAME, ())
