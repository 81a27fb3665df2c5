"""What raises in a torch function on one rank is heard by those that wait for it in that function.

[Note: who raised] in `comm/watch.py`. Nothing is done here while nothing raises.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardwise._torch_compat import StopRecomputation, tree_leaves
from shardwise.comm.agreement import tell_all
from shardwise.comm.process_group import communicator
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.usable import state_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.sharded_tensor.state import State

__all__ = ["ALONE", "raised_in", "tell_of_arguments", "tell_others"]

# What a rank may ask by itself: nobody waits for it if it raises, and callers may just be trying.
_ALONE_NAMES = (
    "numpy tolist storage untyped_storage _typed_storage storage_offset storage_type data_ptr "
    "__array__ __dlpack__ __dlpack_device__ __bool__ is_nonzero __len__ __format__ __repr__ "
    "item __float__ __int__ __complex__ __index__ "
    "is_contiguous is_pinned is_shared is_inference __deepcopy__ __reduce_ex__ "
    "_has_compatible_shallow_copy_type "
    "__get__"  # of any attribute, as `hasattr` asks for it
)
ALONE = frozenset(_ALONE_NAMES.split())
_NOT_EQUAL = ("eq", "ne", "__eq__", "__ne__")  # torch takes a TypeError of theirs for an answer
_SIGNALS = (StopIteration, StopRecomputation)  # not that anything is wrong


def raised_in(func: Any, args: Sequence[Any], kwargs: dict[str, Any], problem: Exception) -> None:
    """`problem` leaves the torch function `func` here, perhaps on no other rank."""
    name = getattr(func, "__name__", "")
    is_answer = name in _NOT_EQUAL and isinstance(problem, TypeError)
    if name in ALONE or is_answer or isinstance(problem, _SIGNALS):
        return
    for value in tree_leaves((args, kwargs)):
        state = state_or_none(value)
        if state is not None and state.members is not None:
            tell_others(state, problem, function_name(func))
            return


def tell_of_arguments(
    what: str, problem: Exception, values: Iterable[object], *, process_group: Any, hot: bool
) -> None:
    """`problem` leaves `what` here, whose arguments are too wrong to say for which group it is.

    It may be the one that was given, that of the first sharded tensor among the values, or else the
    default group: perhaps another, so that this rank waits for nobody there. `hot` as in `agree`.
    """
    members = None
    if process_group is not None:
        with suppress(Exception):  # perhaps it is none
            members = communicator(process_group)
    if members is None:
        hot = hot or process_group is not None  # of which others have named another, or none
        states = (state_or_none(value) for value in values)
        members = next((state.members for state in states if state is not None), None)
    if members is not None:
        tell_all(what, problem, members, hot=hot)
        return
    with suppress(Exception):  # perhaps there is none
        tell_all(what, problem, communicator(None))


def tell_others(first: State, problem: Exception, what: str) -> None:
    """`problem` leaves `what` here, which is called for the tensor of that state."""
    if first.members is not None and not isinstance(problem, _SIGNALS):
        tell_all(what, problem, first.members)
