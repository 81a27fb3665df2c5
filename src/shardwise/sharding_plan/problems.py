"""What is wrong with a plan, in words: names that are near, entries that collide, all in one."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from shardwise.errors import PlanClashError, ShardingPlanError, ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["all_in_one", "claimed_twice", "clash", "is_pattern", "nearest", "quoted", "starred"]

_MOST_NEAREST = 3
_MOST_SHOWN = 20  # problems in one message


def is_pattern(key: str) -> bool:
    """Whether a key has signs that fnmatch reads."""
    return any(sign in key for sign in "*?[")


def starred(name: str) -> str:
    """The name with `*` for the numbers in it: `layers.*.weight` for `layers.3.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def clash(by: str, path: str, sharder: str) -> PlanClashError:
    """An error about an entry inside the submodule `path`, which another entry's Sharder shards."""
    return PlanClashError(
        f"{by} should not conflict with the submodule tree",
        got=f"an entry inside {path!r}, which {sharder} shards",
        fix="Leave it to the Sharder, or shard all of it by specs.",
    )


def claimed_twice(what: str, entries: Sequence[str]) -> ShardingPlanError:
    """An error about a tensor or submodule that several entries are for."""
    return ShardingPlanError(
        f"{what} is claimed by {len(entries)} entries",
        expected="one",
        got=", ".join(entries),
        fix="Make the patterns narrower.",
    )


def nearest(key: str, names: list[str], prefix: str) -> str:
    """Names like the key, for a message; those that differ in numbers only count as one."""
    start = len(prefix) + 1 if prefix else 0
    short = [name[start:] for name in names if name != prefix]
    if is_pattern(key):
        short = [starred(name) for name in short]
    near = difflib.get_close_matches(key, dict.fromkeys(short), n=_MOST_NEAREST, cutoff=0.4)
    return f"Nearest: {quoted(near)}." if near else f"It has: {quoted(list(dict.fromkeys(short)))}."


def quoted(names: Sequence[str]) -> str:
    """The first names, in quotes."""
    shown = ", ".join(map(repr, names[:_MOST_NEAREST]))
    return (shown or "none") + (", ..." if len(names) > _MOST_NEAREST else "")


def all_in_one(problems: Sequence[ShardwiseError], model: str) -> ShardwiseError:
    """One error with all messages, of the type of the first."""
    kind: Callable[[str], ShardwiseError] = type(problems[0])
    messages = list(dict.fromkeys(map(str, problems)))
    head = f"the plan does not fit the {model}"
    if len(messages) == 1:
        return kind(f"{head}: {messages[0]}")
    lines = [f"  {number}. {one}" for number, one in enumerate(messages[:_MOST_SHOWN], 1)]
    if len(messages) > _MOST_SHOWN:
        lines.append(f"  and {len(messages) - _MOST_SHOWN} more")
    return kind("\n".join([f"{head}, {len(messages)} problems:", *lines]))
