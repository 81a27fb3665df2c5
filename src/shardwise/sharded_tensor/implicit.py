"""Communication that a torch function does and the user did not write: allowed, told or refused."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardwise.call_site import user_level
from shardwise.errors import ArgumentValueError, OpError
from shardwise.settings import Setting
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.transfer import plan_reshard
from shardwise.transfer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout
    from shardwise.settings import Change
    from shardwise.sharded_tensor.state import State

__all__ = [
    "ImplicitComm",
    "ImplicitCommWarning",
    "announce",
    "announce_move",
    "implicit_comm",
    "settle",
]

ImplicitComm = Literal["allow", "warn", "error"]  # what happens when data move unasked
_POLICY: Setting[ImplicitComm] = Setting("shardwise_implicit_comm", lambda: "warn")
# File, line and function of what was told. [Note: told once]
_TOLD: Setting[set[tuple[str, int, Any]]] = Setting("shardwise_told", set)
_MOST_KEPT = 4096  # notebooks and `exec` make lines without end


class ImplicitCommWarning(UserWarning):
    """A torch function moved tensors to do its work."""


def implicit_comm(policy: ImplicitComm) -> Change[ImplicitComm]:
    """Sets what happens when a torch function has to move its tensors: allow, warn or error.

    That is when operands are not where the function needs them, or when it has no sharded rule and
    gathers them. Sums and statistics that a function exchanges as part of its own work are not
    meant. "warn" (the default) warns once per function and line of code, on the first rank that has
    any of the tensors; "error" raises on all. In a `with` statement, for its block only.
    """
    if policy not in get_args(ImplicitComm):
        raise ArgumentValueError(
            "implicit_comm", expected=f"one of {', '.join(get_args(ImplicitComm))}", got=policy
        )
    return _POLICY.change(policy)


def announce(
    func: Any, moved: Sequence[Layout], nbytes: int, rank: int, *, gathers: bool = False
) -> None:
    """Says, by the policy, that a function moves tensors of these layouts."""
    policy = _POLICY.get()
    if policy == "allow":
        return
    verb = "gathers" if gathers else "moves"
    what = (
        f"{function_name(func)} {verb} its tensors ({'; '.join(map(str, moved))}): "
        f"{format_bytes(nbytes)} between ranks"
    )
    fix = (
        "There is no sharded rule for this call. Work on st.local_shards(), write one with "
        'custom_sharded_op_impl, or accept it: shardwise.implicit_comm("allow").'
        if gathers
        else "Bring the operands together first, by shardwise.reshard(x, to) or the output_plan of "
        'the module that they come from; or accept it: shardwise.implicit_comm("allow").'
    )
    if policy == "error":
        raise OpError(what, rank=rank, fix=fix)
    # All ranks call, with the same layouts: one of them tells it for all.
    if rank == min((layout.ranks[0] for layout in moved if layout.ranks), default=rank):
        _warn_once(func, f"{what}. {fix}")


def _warn_once(func: Any, text: str) -> None:
    """Warns of the line of the user's code that is being run, unless that was done.

    [Note: told once] Python keeps what it has shown by text, which differs with the shapes, and
    forgets it whenever anybody changes a filter, as torch does in the middle of its functions. So
    we keep lines ourselves, for filters that show a warning once; others see all.
    """
    level = user_level()
    frame = sys._getframe(level - 1)
    module, line = frame.f_globals.get("__name__", ""), frame.f_lineno
    shows_once = _action(text, module, line) in ("default", "module", "once")
    told, site = _TOLD.get(), (frame.f_code.co_filename, line, func)
    if shows_once and site in told:
        return
    warnings.warn(text, ImplicitCommWarning, stacklevel=level)
    if shows_once:  # a warning that is an error, or ignored, was not shown
        if len(told) >= _MOST_KEPT:
            told.clear()
        told.add(site)


def _action(text: str, module: str, line: int) -> str:
    """What the first of Python's filters that fits does with the warning."""
    for action, message, category, where, at in warnings.filters:
        if issubclass(ImplicitCommWarning, category) and at in (0, line):
            patterns = ((message, text), (where, module))
            if all(pattern is None or pattern.match(given) for pattern, given in patterns):
                return action
    return "default"


def announce_move(func: Any, state: State, layout: Layout) -> None:
    """Says, by the policy, that a function brings a tensor to `layout`, if anything is sent."""
    nbytes = plan_reshard(state.layout, layout, state.dtype.itemsize).total_bytes
    if nbytes:
        announce(func, [state.layout], nbytes, state.rank)


def settle(func: Any, state: State) -> State:
    """The same tensor with nothing pending, of which a function says that it reduces it."""
    if state.layout.pending is None:
        return state
    announce_move(func, state, state.layout.bar)
    return reshard_state(state, state.layout.bar)
