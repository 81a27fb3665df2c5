"""Torch functions that have rules: the quick way, and the way to all others.

[Note: the quick way] Most calls find all operands where they are needed, one local piece of each.
They look their decision up by the kinds of the operands ([Note: kinds] in `kinds.py`), call torch
once and wrap the result. What the key leaves out may not matter to the decision. `deciding.py`
makes decisions that are not known yet, `carrying_out.py` does what is not quick.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise._torch_compat import (
    refuse_address,
    replayed_views,
)
from shardwise.comm.agreement import agree
from shardwise.comm.checks import DEBUGGERS, is_debugging
from shardwise.comm.differentiable import exchange
from shardwise.comm.tracing import TRACES, doing
from shardwise.ops import COMPOSITES, RULES
from shardwise.sharded_tensor.carrying_out import run_pieces
from shardwise.sharded_tensor.deciding import Known, decide, needs_grad
from shardwise.sharded_tensor.dispatch import (
    RUNNERS,
    Runner,
    function_name,
    handles,
)
from shardwise.sharded_tensor.distributing import digest
from shardwise.sharded_tensor.entering_once import enter_once
from shardwise.sharded_tensor.kinds import kind_of
from shardwise.sharded_tensor.plain_inputs import check_plain, promoted
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import (
    ASTRAY,
    ShardedTensor,
    check_usable,
    check_writable,
    compute_by_gathering,
    make_wrapper,
    show_written,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.comm.differentiable import Exchange
    from shardwise.ops import Rule
    from shardwise.sharded_tensor.deciding import Found
    from shardwise.sharded_tensor.kinds import Kind

__all__ = ["compare_calls"]

_NoDispatch: Any = torch._C.DisableTorchFunctionSubclass
_Tensor: Any = torch.Tensor
_STRIDED = torch.strided
_NOTHING = nullcontext()
_MOST_KEPT = 4096  # decisions of a group
_NUMBERS = frozenset({int, float, complex})
_MAY_BE_PLAIN = (torch.Tensor, list, tuple)  # arguments that are plain tensors, or have some
# Arguments that are themselves in a key, and those of which it has the parts.
_PLAIN = _NUMBERS | {bool, str, type(None), EllipsisType, torch.dtype}
_OF_PARTS = frozenset({tuple, list, slice, torch.Size})


def _runner(rule: Rule, func: Any) -> Runner:
    """What `func` gives by its rule."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], known: Known | None) -> Any:
        if known is None:
            return _run(rule, func, args, kwargs)
        found = [arg._state for arg in args if type(arg) is ShardedTensor]
        return _carry_out(known, rule, func, args, kwargs, found, [])

    return Runner(_nothing_known if rule.reads_grad else _quick_way(rule, func), run)


def _nothing_known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The quick way of functions of which the arguments do not say what to do."""


def _quick_way(rule: Rule, func: Any) -> Callable[..., Any]:
    """What `func` gives if it is quick and known, else what is known. [Note: the quick way]

    One long function, since calls cost what small sums cost.
    """
    reads_numbers = rule.reads_numbers

    def quickly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as `Runner` says
        key: list[Any] = [func]  # as in `_run`
        here: list[Any] = []
        first: Any = None
        is_from_rows = False
        with _NoDispatch():  # so that torch does not ask us about wrappers' own attributes
            for arg in args:
                kind = type(arg)
                if kind is ShardedTensor:
                    state = arg._state
                    if state.is_special or arg.grad_fn is not None:
                        if arg.grad_fn is not None or state.is_freed or state.view_of:
                            return None
                        is_from_rows = True
                    key.append(state.kind)
                    here.append(state.carriers[0])
                    if first is None:
                        first = state
                elif kind in _PLAIN:
                    key.append(kind)
                    key.append(None if kind in _NUMBERS and not reads_numbers else arg)
                    here.append(arg)
                elif kind in _OF_PARTS:
                    tensors: list[Found] = []
                    _note(arg, key, tensors, reads_numbers=reads_numbers)
                    if tensors:
                        return None
                    here.append(arg)
                else:
                    return None
            if first is None or first.kind is None or TRACES:
                return None
            if kwargs:
                for name, arg in kwargs.items():
                    if type(arg) not in _PLAIN:
                        return None
                    key.append(name)
                    _note(arg, key, [], reads_numbers=reads_numbers)
            try:
                known: Known | None = first.kind.decisions.get(tuple(key))
            except TypeError:  # as in `_run`
                return None
            if known is None or (DEBUGGERS and is_debugging()):
                return None
            found = known.quickly
            if found is None:
                return known
            entering, like, local, is_in_place, is_view, layout = found
            if entering:
                _enter(entering, args, here)
            if local is not None:
                piece = local(here[0])
            else:
                piece = func(*here, **kwargs) if kwargs else func(*here)
            if is_view and not piece.numel():
                with replayed_views(True):  # [Note: views of nothing] in `carrying_out.py`
                    piece = func(*here, **kwargs) if local is None else local(here[0])
            if is_in_place:
                if torch.is_grad_enabled():
                    show_written(args[0])
                return args[0]
            if piece is here[0]:
                return args[0]
            out = known.made
            if out is None or piece.dtype is not out.dtype:
                out = known.made = kind_of(layout, piece, first.members)
            requires_grad = piece.requires_grad
            made: ShardedTensor = make_wrapper(  # as `wrap`
                ShardedTensor,
                out.shape,
                None,
                None,
                None,
                out.dtype,
                _STRIDED,
                out.device,
                False,
                requires_grad,
            )
            refuse_address(made)
            made._state = state = State(
                layout,
                (piece,),
                first.rank,
                first.members,
                None if like is None else args[like]._state.spec,
                first.process_group,
                out,
            )
            if is_from_rows:
                state.is_from_rows = state.is_special = True
            if is_view and first.beside:
                state.beside = first.beside
            if requires_grad:
                made._backward_hooks = ASTRAY
            return made

    return quickly


def _run(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives by its rule."""
    key: list[Any] = [func]
    found: list[Found] = []
    here: list[Any] = []  # the arguments of the quick way; those in `kwargs` make it a long one
    first: Any = None
    has_plain = False
    with _NoDispatch():
        for arg in args:
            if type(arg) is ShardedTensor:
                state = arg._state
                if state.is_special or arg.grad_fn is not None:
                    check_usable(arg)
                key.append(state.kind or _noted_kind(state))
                found.append(state)
                here.append(state.carriers[0])
                if first is None:
                    first = state
            else:
                here.append(_note(arg, key, found, reads_numbers=rule.reads_numbers))
                has_plain = has_plain or isinstance(arg, _MAY_BE_PLAIN)
    if kwargs:
        for name, arg in kwargs.items():
            key.append(name)
            _note(arg, key, found, reads_numbers=rule.reads_numbers)
            has_plain = has_plain or isinstance(arg, _MAY_BE_PLAIN)
    if has_plain:
        given = _with_rows(rule, args, kwargs, found)
        if given is not None:
            return _run(rule, func, *given)
        check_plain(func, found)
    if first is None:
        first = next(one for one in found if isinstance(one, State))
    if rule.reads_grad:
        key.append(needs_grad(found))
    decisions: dict[Any, Known] = first.comm.decisions
    try:
        known = decisions.get(tuple(key))
    except TypeError:  # an argument that has no hash; no rule knows what it means
        return compute_by_gathering(func, args, kwargs)
    if known is None:
        known = decide(rule, func, args, kwargs, found)
        if len(decisions) >= _MOST_KEPT:
            decisions.clear()
        decisions[tuple(key)] = known
    return _carry_out(known, rule, func, args, kwargs, found, here)


def _carry_out(
    known: Known,
    rule: Rule,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Sequence[Found],
    here: list[Any],
) -> Any:
    """What a call gives, by what is known of it; `here` are the arguments, if it is quick."""
    decision = known.decision
    if decision is None:
        if rule.otherwise is not None:
            return rule.otherwise(*args, **kwargs)
        return compute_by_gathering(func, args, kwargs)
    if is_debugging():
        compare_calls(func, found)
    if not known.is_quick:
        with doing(function_name(func)) if TRACES else _NOTHING:
            return run_pieces(known, decision, func, args, kwargs, found)
    if known.entering:
        with doing(function_name(func)) if TRACES else _NOTHING:
            _enter(known.entering, args, here)
    if decision.is_in_place:
        check_writable(args[0], func)
    states = [one for one in found if isinstance(one, State)]
    first = states[0]
    piece = func(*here, **kwargs) if decision.local is None else decision.local(here[0])
    if decision.is_view and not piece.numel():
        with replayed_views(True):  # [Note: views of nothing] in `carrying_out.py`
            piece = func(*here, **kwargs) if decision.local is None else decision.local(here[0])
    if decision.is_in_place:
        if torch.is_grad_enabled():
            show_written(args[0])
        return args[0]
    if piece is here[0]:
        return args[0]
    spec = None if known.like is None else found[known.like].spec  # type: ignore[union-attr]  # `like` is sharded
    made = State(
        decision.outputs[0], (piece,), first.rank, first.members, spec, first.process_group
    )
    if any([state.is_from_rows for state in states]):
        made.is_from_rows = made.is_special = True
    if decision.is_view:
        if first.view_of:  # [Note: lost views] in `state.py`
            made.view_of, made.is_special = first.view_of, True
        if first.beside:
            made.beside = first.beside
    return wrap(made)


def _noted_kind(state: State) -> Kind | None:
    """The kind of a tensor of a group, which the state keeps; None of all others."""
    if state.members is not None:
        state.kind = kind_of(state.layout, state.carriers[0], state.members)
    return state.kind


def _enter(
    entering: Sequence[tuple[int, Exchange]], args: tuple[Any, ...], here: list[Any]
) -> None:
    """Puts operands in place of which others have to stand, for the sake of their gradients."""
    if not torch.is_grad_enabled():
        return
    for place, job in entering:
        piece, operand = here[place], args[place]
        if not piece.requires_grad:
            continue
        if job.source_devices[0] != piece.device:
            device = (piece.device,)
            job = replace(job, source_devices=device, target_devices=device)
        if isinstance(operand, ShardedTensor):
            (here[place],) = enter_once(operand._state, job)
        else:
            (here[place],) = exchange(job, (piece,))


def _note(arg: Any, key: list[Any], found: list[Found], *, reads_numbers: bool) -> Any:
    """Adds to `key` what of an argument matters, and to `found` the tensors in it.

    Returns what takes its place in the quick way.
    """
    kind = type(arg)
    if kind in _PLAIN:
        # The type too, since 1 == 1.0 == True.
        key += (kind, None if kind in _NUMBERS and not reads_numbers else arg)
    elif kind is slice:
        key += (kind, *map(_whole_or_none, (arg.start, arg.stop, arg.step)))
    elif isinstance(arg, torch.Tensor):
        if isinstance(arg, ShardedTensor):
            check_usable(arg)
            found.append(arg._state)
            key.append(arg._state.kind or _noted_kind(arg._state))
            return arg._state.carriers[0]
        else:
            found.append(arg)
            key += (arg.shape, arg.dtype)
    elif isinstance(arg, list | tuple):
        key += (list if isinstance(arg, list) else tuple, len(arg))  # x[[0, 1]] is not x[0, 1]
        before = len(found)
        listed = [_note(one, key, found, reads_numbers=reads_numbers) for one in arg]
        if len(found) > before:
            return listed if isinstance(arg, list) else tuple(listed)
    else:
        is_number = isinstance(arg, np.number)
        key += (kind, None if is_number and not reads_numbers else arg)
    return arg


def _whole_or_none(end: Any) -> int | None:
    """An end of a slice, which has no hash itself."""
    return end if end is None or type(end) is int else operator.index(end)


def _with_rows(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[Found]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with a plain tensor taken as this rank's rows, if it is; else None."""
    if rule.takes_rows is None:
        return None
    place, name = rule.takes_rows
    is_named = place >= len(args)
    x = kwargs.get(name) if is_named else args[place]
    if type(x) is not torch.Tensor or (rows := promoted(x, found)) is x:
        return None
    if is_named:
        return args, kwargs | {name: rows}
    return (*args[:place], rows, *args[place + 1 :]), kwargs


def compare_calls(func: Any, found: Sequence[Found]) -> None:
    """All ranks call the same function on the same tensors; plain ones are compared by data."""
    first = next(one for one in found if isinstance(one, State))
    values = {
        "layouts": [one.layout for one in found if isinstance(one, State)],
        "dtypes": [one.dtype for one in found],
        "requires_grad": needs_grad(found),
        "plain tensors": [
            (tuple(one.shape), digest(one)) for one in found if isinstance(one, torch.Tensor)
        ],
    }
    agree(function_name(func), values, group=first.comm, hot=True)


# -- the table -------------------------------------------------------------------------------------


def _named(func: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """The composite, under whose name a trace lists what its parts send."""

    @wraps(run)
    def handler(*args: Any, **kwargs: Any) -> Any:
        with doing(function_name(func)) if TRACES else _NOTHING:
            return run(*args, **kwargs)

    return handler


for _function, _rule in RULES.items():
    RUNNERS[_function] = _runner(_rule, _function)
for _function, _composite in COMPOSITES.items():
    handles(_function)(_named(_function, _composite.run))
