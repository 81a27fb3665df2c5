"""Sorting, and what is picked from a sorted dim: it has to be whole, all others stay cut."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pattern import decide_along
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []

_SORTED = "input dim descending stable"
_PICKED = "input dim keepdim"


def _decide(call: Call, *, names: str, keeps_size: bool) -> Decision | None:
    given = known_arguments(call, names)
    if given is None or len(call.operands) != 1:
        return None
    if len(outlines(call)) == 1 and not keeps_size:
        return None  # the median of all elements
    keeps = keeps_size or bool(given.get("keepdim", False))
    return decide_along(call, [given.get("dim", -1)], keeps=keeps)


for _name, _names in (
    ("sort", _SORTED),
    ("argsort", _SORTED),
    ("median", _PICKED),
    ("nanmedian", _PICKED),
    ("mode", _PICKED),
    ("kthvalue", "input k dim keepdim"),
):
    _decided = partial(_decide, names=_names, keeps_size=_names == _SORTED)
    register(Rule(_name, _decided), functions_named([_name]))
