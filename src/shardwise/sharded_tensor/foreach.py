"""Functions of lists of tensors on sharded ones: one call on the local pieces of all of them.

Optimizers live on these functions. So the usual case, in which all tensors of a position lie alike,
costs a few list comprehensions; see `Foreach` in `ops/foreach.py` for all else.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise._torch_compat import allow_foreach
from shardwise.comm.checks import should_check
from shardwise.errors import OpError
from shardwise.ops.foreach import FOREACH, FUSED, NAMED
from shardwise.sharded_tensor.dispatch import function_name, handles
from shardwise.sharded_tensor.implicit import announce_move
from shardwise.sharded_tensor.resharding import check_one_group, is_everywhere, reshard_state
from shardwise.sharded_tensor.running import compare_calls
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import ShardedTensor, show_written, wrap
from shardwise.sharded_tensor.usable import check_writable, states_of_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.ops.foreach import Foreach

__all__ = ["Column", "states_of"]


_ONLY_SHARDED = {ShardedTensor}


class Column(NamedTuple):
    """A list of tensors among the arguments, and the states of the sharded ones."""

    tensors: Sequence[torch.Tensor]
    states: list[State | None]
    is_sharded: bool  # all of them

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, are_values: bool = False) -> Column:
        """Raises if a sharded tensor of them cannot be used; `are_values` as in `states_of_all`."""
        kinds = set(map(type, tensors))
        if kinds == _ONLY_SHARDED or all([issubclass(kind, ShardedTensor) for kind in kinds]):
            states = states_of_all(tensors, are_values=are_values)  # type: ignore[arg-type]  # all are sharded
            return cls(tensors, states, is_sharded=True)  # type: ignore[arg-type]  # no None in it
        if not any([issubclass(kind, ShardedTensor) for kind in kinds]):
            return cls(tensors, [None] * len(tensors), is_sharded=False)
        there = [isinstance(tensor, ShardedTensor) for tensor in tensors]
        sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
        left = iter(states_of_all(sharded, are_values=are_values))
        return cls(tensors, [next(left) if one else None for one in there], is_sharded=False)

    def flat(self, positions: Sequence[int] | None, counts: Sequence[int]) -> list[torch.Tensor]:
        """The local pieces, one after another; a plain tensor stands beside each piece."""
        if self.is_sharded and positions is None:
            return list(chain.from_iterable([state.carriers for state in self.states]))  # type: ignore[union-attr]  # all are sharded
        found: list[torch.Tensor] = []
        for k, count in zip(_all(self, positions), counts, strict=True):
            state = self.states[k]
            found += [self.tensors[k]] * count if state is None else state.carriers
        return found

    @property
    def is_plain_numbers(self) -> bool:
        """Whether these are plain 0-d tensors without gradient, which fit beside any piece."""
        if any(self.states) or any([tensor.dim() for tensor in self.tensors]):
            return False
        return not (torch.is_grad_enabled() and any([t.requires_grad for t in self.tensors]))


def states_of(func: Any, columns: Sequence[Column]) -> list[State]:
    """All sharded tensors of the call; raises unless they have one group."""
    found = [state for column in columns for state in column.states if state is not None]
    if len({state.members for state in found}) > 1:
        check_one_group(function_name(func), found)
    return found


def _is_of_one_group(columns: Iterable[Column]) -> bool:
    """As `states_of` asks it, of sharded tensors and of lists that have none."""
    found: set[Any] = set()
    for column in columns:
        if column.is_sharded:
            found.update([state.members for state in column.states])  # type: ignore[union-attr]  # all are
        elif any(column.states):
            return False
    return len(found) <= 1


class _Call(NamedTuple):
    """A call of a list function: its arguments, and those of them that are lists of tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: dict[int, Column]  # by the id of the argument
    lead: Column  # the first
    singles: list[ShardedTensor]  # arguments that are sharded tensors, not lists

    @classmethod
    def of(
        cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_values: bool = False
    ) -> _Call:
        columns: dict[int, Column] = {}
        singles: list[ShardedTensor] = []
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, list | tuple):
                if arg and isinstance(arg[0], torch.Tensor) and id(arg) not in columns:
                    columns[id(arg)] = Column.of(arg, are_values=are_values)
            elif isinstance(arg, ShardedTensor):
                singles.append(arg)
        lead = next(iter(columns.values()))
        if singles or should_check(hot=True) or not _is_of_one_group(columns.values()):
            every = [*columns.values(), *([Column.of(singles)] if singles else [])]
            states = states_of(func, every)
            if should_check(hot=True):
                compare_calls(func, states)
        return cls(func, args, kwargs, columns, lead, singles)

    def has_number_each(self, arg: Any) -> bool:
        """Whether the argument is a tensor with a number for each position."""
        return isinstance(arg, torch.Tensor) and arg.dim() == 1 and self.func in FOREACH

    def on_pieces(self, positions: Sequence[int] | None, counts: Sequence[int]) -> Any:
        """The function on the local pieces at these positions (None: all), in one call."""
        is_one_each = sum(counts) == len(counts)

        def flat(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                column = self.columns.get(id(arg))
                if column is not None:
                    return column.flat(positions, counts)
                if not arg or (positions is None and is_one_each):
                    return arg
                places = _all(self.lead, positions)
                return [arg[k] for k, n in zip(places, counts, strict=True) for _ in range(n)]
            if isinstance(arg, ShardedTensor):
                return arg._state.carriers[0]
            if self.has_number_each(arg):
                chosen = arg if positions is None else arg[list(positions)]
                return chosen.repeat_interleave(torch.tensor(counts, device=arg.device))
            return arg

        return self.func(
            *[flat(arg) for arg in self.args],
            **{name: flat(arg) for name, arg in self.kwargs.items()},
        )

    def at(self, position: int, single: Callable[..., Any]) -> Any:
        """The function at one position."""

        def one(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return arg[position]
            return arg[position].item() if self.has_number_each(arg) else arg

        named = {name: one(arg) for name, arg in self.kwargs.items() if name in NAMED}
        others = [one(arg) for name, arg in self.kwargs.items() if name not in NAMED]
        return single(*[one(arg) for arg in self.args], *others, **named)


def _all(column: Column, positions: Sequence[int] | None) -> Sequence[int]:
    return range(len(column.tensors)) if positions is None else positions


def _counts(lead: Column, positions: Sequence[int] | None) -> list[int]:
    """How many local pieces each position has."""
    chosen = lead.states if positions is None else [lead.states[k] for k in positions]
    return [1 if state is None else len(state.carriers) for state in chosen]


def _run(one: Foreach, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What a list function gives."""
    call = _Call.of(func, args, kwargs)
    if one.is_in_place:
        _check_all_writable(call.lead, func)
    size = len(call.lead.tensors)
    if not one.is_elementwise or not _can_share(call):
        apart: Sequence[int] = range(size)
        together: Sequence[int] | None = []
    else:
        apart = () if _all_alike(call) else [k for k in range(size) if not _is_alike(call, k)]
        rest = set(apart)
        together = None if not rest else [k for k in range(size) if k not in rest]
    found: dict[int, Any] = {}
    if together is None or together:
        counts = _counts(call.lead, together)
        pieces = call.on_pieces(together, counts)
        if not one.is_in_place:
            made = _wrapped(call, pieces, together, counts)
            found.update(zip(_all(call.lead, together), made, strict=True))
    found.update({k: call.at(k, one.single) for k in apart})
    if one.is_in_place:
        if torch.is_grad_enabled():
            for tensor in call.lead.tensors:
                if isinstance(tensor, ShardedTensor):
                    show_written(tensor)
        return None
    return tuple(found[k] for k in range(size))


def _check_all_writable(column: Column, func: Any) -> None:
    if any([state is not None and state.is_special for state in column.states]):
        for tensor in column.tensors:
            check_writable(tensor, func)


def _can_share(call: _Call) -> bool:
    """Whether the arguments that are single tensors can stand beside every local piece."""
    for tensor in call.singles:
        state = tensor._state
        if state.layout.ndim or not is_everywhere(state) or _has_grad(state):
            return False
    plain = (arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, torch.Tensor))
    return not any(_has_grad(arg) for arg in plain)


def _has_grad(tensor: torch.Tensor | State) -> bool:
    """Whether its gradient is to be summed over the pieces that it stands beside."""
    return torch.is_grad_enabled() and tensor.requires_grad


def _all_alike(call: _Call) -> bool:
    """Whether `_is_alike` holds at all positions, if that is quickly seen."""
    if not call.lead.is_sharded:
        return False
    layouts = [state.layout for state in call.lead.states]  # type: ignore[union-attr]  # all are
    if any([layout.pending for layout in layouts]):
        return False
    for column in call.columns.values():
        if column is call.lead:
            continue
        if column.is_sharded:  # lists compare identity first
            if [state.layout for state in column.states] != layouts:  # type: ignore[union-attr]  # all are
                return False
        elif not column.is_plain_numbers:
            return False
    return True


def _is_alike(call: _Call, k: int) -> bool:
    """Whether each rank can compute its pieces of position `k` from what it has there."""
    lead = call.lead.states[k]
    for column in call.columns.values():
        state = column.states[k]
        if lead is None:
            if state is not None:
                return False
        elif state is None:
            if column.tensors[k].dim() or _has_grad(column.tensors[k]):
                return False
        elif state.layout != lead.layout or state.layout.pending is not None:
            return False
    return True


def _wrapped(
    call: _Call, pieces: Sequence[torch.Tensor], positions: Sequence[int] | None, counts: list[int]
) -> list[torch.Tensor]:
    """The results of positions, of their local pieces."""
    columns = call.columns.values()
    from_rows = any([s.is_from_rows for c in columns for s in c.states if s is not None])
    found: list[torch.Tensor] = []
    left = 0
    for k, count in zip(_all(call.lead, positions), counts, strict=True):
        held, left = pieces[left : left + count], left + count
        state = call.lead.states[k]
        if state is None:
            found += held
            continue
        made = State(
            state.layout, tuple(held), state.rank, state.members, state.spec, state.process_group
        )
        if from_rows:
            is_from_rows = any([one.is_from_rows for c in columns if (one := c.states[k])])
            made.is_from_rows = made.is_special = is_from_rows
        found.append(wrap(made))
    return found


# -- optimizers in one call ------------------------------------------------------------------------


def _run_fused(func: Any, *args: Any, **kwargs: Any) -> None:
    """What a fused optimizer does: one call on the local pieces, with their numbers of steps."""
    call = _Call.of(func, args, kwargs, are_values=True)  # parameters are leaves
    moved = [] if _all_alike(call) else _brought(call)
    columns = list(call.columns.values())
    for column in columns:
        _check_all_writable(column, func)
    call.on_pieces(None, _counts(call.lead, None))
    # torch counts no versions here. [Note: lost views] in `state.py`
    for column in columns:
        if written := [state.carriers[0] for state in column.states if state is not None]:
            torch.autograd.graph.increment_version(written)
    for tensor, state in moved:
        tensor.copy_(wrap(state))


def _brought(call: _Call) -> list[tuple[ShardedTensor, State]]:
    """Puts copies in place of tensors that do not lie like the parameter; to be copied back."""
    moved: list[tuple[ShardedTensor, State]] = []
    for column in call.columns.values():
        for k, (lead, state) in enumerate(zip(call.lead.states, column.states, strict=True)):
            tensor = column.tensors[k]
            if (lead is None) != (state is None) and tensor.dim():
                raise _mixed(call, k)
            if lead is None or state is None:
                continue
            if lead.layout.pending is not None:
                raise _pending(call, lead)
            if state.layout != lead.layout:
                assert isinstance(tensor, ShardedTensor)
                announce_move(call.func, state, lead.layout)
                column.states[k] = there = reshard_state(state, lead.layout)
                moved.append((tensor, there))
    return moved


def _mixed(call: _Call, k: int) -> OpError:
    return OpError(
        f"{function_name(call.func)} at position {k}",
        expected="a parameter and its state to be all sharded, or all plain",
        got=", ".join(type(column.tensors[k]).__name__ for column in call.columns.values()),
        fix="Make the optimizer after the parameters are sharded.",
    )


def _pending(call: _Call, state: State) -> OpError:
    return OpError(
        f"{function_name(call.func)} of a parameter with a pending {state.layout.pending}",
        rank=state.rank,
        got=str(state.layout),
        fix="Reduce it first: st = shardwise.reshard(st, shardwise.replicate()).",
    )


for _function, _foreach in FOREACH.items():
    handles(_function)(partial(_run, _foreach, _function))
for _function in FUSED:
    handles(_function)(partial(_run_fused, _function))
allow_foreach(ShardedTensor)
