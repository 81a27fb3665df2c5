"""Carrying out what the rules of `shardwise.ops` decide.

[Note: the quick way] Most calls find all operands where they are needed, one local piece of each.
They look their decision up by the identity of the layouts, call torch once and wrap the result.
What the key leaves out may not matter to the decision.

[Note: phantoms] A rank that holds nothing of the result has no kernel to run, but must be in the
graph ([Note: every rank is in every graph] in `comm/differentiable.py`), and must know the dtype of
the result. So it calls the function on tensors without elements that come from its operands.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise._torch_compat import active_transform
from shardwise.comm.agreement import agree
from shardwise.comm.checks import is_debugging
from shardwise.comm.differentiable import Exchange, exchange
from shardwise.comm.tracing import TRACES, doing
from shardwise.errors import ArgumentTypeError
from shardwise.ops import COMPOSITES, RULES, Call, Operand
from shardwise.ops.work import bytes_moved
from shardwise.sharded_tensor.dispatch import CUSTOM, RUNNERS, function_name, handles
from shardwise.sharded_tensor.distributing import digest
from shardwise.sharded_tensor.implicit import announce
from shardwise.sharded_tensor.plain_inputs import check_plain, promoted
from shardwise.sharded_tensor.resharding import check_one_group, replicated, reshard_state
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import (
    ASTRAY,
    ShardedTensor,
    check_usable,
    check_writable,
    compute_by_gathering,
    make_wrapper,
    set_hooks,
    show_requires_grad,
    wrap,
)
from shardwise.sharding_spec.custom_ops import CUSTOM_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout
    from shardwise.ops import Decision, Need, Rule, Then

__all__ = ["compare_calls"]

_NoDispatch: Any = torch._C.DisableTorchFunctionSubclass
_has_modes: Any = torch._C._is_torch_function_mode_enabled
_Tensor: Any = torch.Tensor
_grad_fn = _Tensor.grad_fn.__get__
_NOTHING = nullcontext()
_MOST_KEPT = 4096  # decisions of a group
_NUMBERS = frozenset({int, float, complex})
_PLAIN = _NUMBERS | {bool, str, type(None), torch.dtype}  # arguments that are themselves in a key
_Found = State | torch.Tensor  # an operand: the state of a sharded tensor, or a plain one


class _Known(NamedTuple):
    """A decision, and what it takes to carry it out on this rank."""

    decision: Decision | None  # None: the rule does not cover the call
    is_quick: bool  # [Note: the quick way]
    is_slow_with_grad: bool  # since gradients of operands are summed or moved
    like: int | None  # the operand whose layout is the output's, and which so has its spec
    operands: tuple[Operand, ...]  # they hold the layouts, so that the ids in the key stay theirs
    slots: tuple[tuple[Any, ...], ...]  # where each operand stands: (0,), (0, 2), ("other",)
    moved_bytes: int  # between all ranks, to bring operands where they are needed
    # Of a quick call: the operands whose gradients are summed or moved, and by what. Else nothing.
    entering: tuple[tuple[int, Exchange], ...] = ()
    is_always_quick: bool = False  # also with gradients; and gives a new tensor
    output: Any = None  # the layout of the decision's first
    like_argument: int | None = None  # the position of `like` among the arguments


def _runner(rule: Rule, func: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What `func` gives by its rule.

    It tries the quick way for what it knows already, if that makes a new tensor; else it is `_run`.
    One long function, since calls cost what small sums cost.
    """
    reads_numbers, is_simple = rule.reads_numbers, not rule.reads_grad

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or not is_simple:
            return _run(rule, func, args, kwargs)
        key: list[Any] = [func]  # as in `_run`
        here: list[Any] = []
        first: Any = None
        # Under the guard torch does not ask us about the wrappers' own attributes.
        with _NoDispatch():
            for arg in args:
                kind = type(arg)
                if kind is ShardedTensor:
                    state = arg._state
                    if state.is_special or _grad_fn(arg) is not None:
                        break
                    carrier = state.carriers[0]
                    key.append(id(state.layout))
                    key.append(carrier.dtype)
                    here.append(carrier)
                    if first is None:
                        first = state
                    elif state.members is not first.members:
                        break
                elif kind in _PLAIN:
                    key.append(kind)
                    key.append(None if kind in _NUMBERS and not reads_numbers else arg)
                    here.append(arg)
                else:
                    break
            else:
                members = first.members
                known = None if members is None else members.decisions.get(tuple(key))
                if known is not None and known.is_always_quick and not is_debugging():
                    piece = func(*here)
                    if piece is here[0]:
                        return args[0]
                    like, layout = known.like_argument, known.output
                    spec = None if like is None else args[like]._state.spec
                    requires_grad = piece.requires_grad
                    made = make_wrapper(
                        ShardedTensor,
                        layout.shape,
                        dtype=piece.dtype,
                        device=piece.device,
                        requires_grad=requires_grad,
                    )
                    made._state = State(
                        layout, (piece,), first.rank, members, spec, first.process_group
                    )
                    if requires_grad:
                        set_hooks(made, ASTRAY)
                    return made
        return _run(rule, func, args, kwargs)

    return run


def _run(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives by its rule."""
    key: list[Any] = [func]
    found: list[_Found] = []
    here: list[Any] = []  # the arguments of the quick way; those in `kwargs` make it a long one
    first: Any = None
    is_from_rows = has_plain = False
    with _NoDispatch():
        for arg in args:
            if type(arg) is ShardedTensor:
                state = arg._state
                if state.is_special or _grad_fn(arg) is not None:
                    check_usable(arg)
                carrier = state.carriers[0]
                key.append(id(state.layout))
                key.append(carrier.dtype)
                found.append(state)
                here.append(carrier)
                if first is None:
                    first = state
                elif state.members is not first.members:
                    key.append(state.members)  # perhaps of another group, which is refused
                is_from_rows |= state.is_from_rows
            else:
                here.append(_note(arg, key, found, reads_numbers=rule.reads_numbers))
                has_plain = has_plain or isinstance(arg, torch.Tensor)
    if kwargs:
        for name, arg in kwargs.items():
            key.append(name)
            _note(arg, key, found, reads_numbers=rule.reads_numbers)
            has_plain = has_plain or isinstance(arg, torch.Tensor)
    if has_plain:
        given = _with_rows(rule, args, kwargs, found)
        if given is not None:
            return _run(rule, func, *given)
        check_plain(func, found)
    if first is None:
        first = next(one for one in found if isinstance(one, State))
    if rule.reads_grad:
        key.append(_needs_grad(found))
    decisions: dict[Any, _Known] = first.comm.decisions
    try:
        known = decisions.get(tuple(key))
    except TypeError:  # an argument that has no hash; no rule knows what it means
        return compute_by_gathering(func, args, kwargs)
    if known is None:
        known = _decide(rule, func, args, kwargs, found)
        if len(decisions) >= _MOST_KEPT:
            decisions.clear()
        decisions[tuple(key)] = known
    decision, is_quick, is_slow_with_grad, like = known[:4]
    if decision is None:
        return compute_by_gathering(func, args, kwargs)
    if is_debugging():
        compare_calls(func, found)
    if not is_quick:
        with doing(function_name(func)) if TRACES else _NOTHING:
            return _run_pieces(known, decision, func, args, kwargs, found)
    if is_slow_with_grad and _needs_grad(found):
        with doing(function_name(func)) if TRACES else _NOTHING:
            _enter(known, found, here, first)
    if decision.is_in_place:
        check_writable(args[0], func)
        func(*here, **kwargs)
        if torch.is_grad_enabled():
            show_requires_grad(args[0])
        return args[0]
    piece = func(*here, **kwargs)
    if piece is here[0]:
        return args[0]
    spec = None if like is None else found[like].spec  # type: ignore[union-attr]
    made = State(
        decision.outputs[0], (piece,), first.rank, first.members, spec, first.process_group
    )
    if is_from_rows:
        made.is_from_rows = made.is_special = True
    return wrap(made)


def _enter(known: _Known, found: Sequence[_Found], here: list[Any], first: State) -> None:
    """Puts operands in place of which others have to stand, for the sake of their gradients."""
    for k, job in known.entering:
        one = found[k]
        if not one.requires_grad:
            continue
        (place,) = known.slots[k]
        device = here[place].device
        if job.source_devices != (device,):
            job = replace(job, source_devices=(device,), target_devices=(device,))
        (here[place],) = exchange(job, (here[place],))


def _note(arg: Any, key: list[Any], found: list[_Found], *, reads_numbers: bool) -> Any:
    """Adds to `key` what of an argument matters, and to `found` the tensors in it.

    Returns what takes its place in the quick way.
    """
    if isinstance(arg, torch.Tensor):
        if isinstance(arg, ShardedTensor):
            check_usable(arg)
            found.append(arg._state)
            key += (id(arg._state.layout), arg._state.dtype)
            return arg._state.carriers[0]
        else:
            found.append(arg)
            key += (arg.shape, arg.dtype)
    elif isinstance(arg, list | tuple):
        key.append(len(arg))
        for one in arg:
            _note(one, key, found, reads_numbers=reads_numbers)
    else:
        # The type too, since 1 == 1.0 == True.
        is_number = type(arg) in _NUMBERS or isinstance(arg, np.number)
        key += (type(arg), None if is_number and not reads_numbers else arg)
    return arg


def _with_rows(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[_Found]
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


def _needs_grad(found: Sequence[_Found]) -> bool:
    return torch.is_grad_enabled() and any([one.requires_grad for one in found])


# -- deciding --------------------------------------------------------------------------------------


def _decide(
    rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[_Found]
) -> _Known:
    states = [one for one in found if isinstance(one, State)]
    check_one_group(function_name(func), states)
    members, rank = states[0].comm, states[0].rank
    ranks = tuple(sorted(members.ranks))
    operands = tuple(_operand(one, ranks) for one in found)
    slots: list[tuple[Any, ...]] = []
    left = iter(operands)

    def replaced(value: Any, slot: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            slots.append(slot)
            return next(left)
        if isinstance(value, list | tuple):
            return tuple(replaced(one, (*slot, k)) for k, one in enumerate(value))
        return value

    seen = tuple(replaced(arg, (k,)) for k, arg in enumerate(args))
    named = {name: replaced(arg, (name,)) for name, arg in kwargs.items()}
    needs_grad = rule.reads_grad and _needs_grad(found)
    decision = rule.decide(Call(func, seen, named, operands, ranks, rank, needs_grad))
    if decision is None:
        return _Known(None, False, False, None, operands, tuple(slots), 0)
    if rule.asks_torch:
        _ask_torch(func, args, kwargs, slots, found)
    pairs = list(zip(operands, decision.needs, strict=True))
    has_one_piece = all(
        operand.is_plain or len(operand.layout.boxes_of(rank)) == 1 for operand, _ in pairs
    )
    stays = all(
        need.layout.is_replicated if operand.is_plain else need.layout == operand.layout
        for operand, need in pairs
    )
    is_quick = (
        decision.is_one_call
        and has_one_piece
        and stays
        and decision.finish is None
        and decision.then is None
        and len(decision.outputs) == 1
        and all(len(slot) == 1 and isinstance(slot[0], int) for slot in slots)
    )
    like = [k for k, operand in enumerate(operands) if operand.layout == decision.outputs[0]]
    like = [k for k in like if not operands[k].is_plain]
    is_slow_with_grad = any(
        need.work is not None or need.layout != operand.layout for operand, need in pairs
    )
    return _Known(
        decision,
        is_quick,
        is_slow_with_grad,
        like[0] if like else None,
        operands,
        tuple(slots),
        sum(bytes_moved(operand, need) for operand, need in pairs),
        _entering(pairs, members, states[0].device) if is_quick else (),
        is_quick and not is_slow_with_grad and not decision.is_in_place,
        decision.outputs[0],
        slots[like[0]][0] if like else None,
    )


def _entering(
    pairs: Sequence[tuple[Operand, Need]], members: Communicator, device: torch.device
) -> tuple[tuple[int, Exchange], ...]:
    """[Note: the quick way] with gradients: here nothing moves on the way there."""
    return tuple(
        (k, Exchange(operand.layout, need.layout, (device,), (device,), members, work=need.work))
        for k, (operand, need) in enumerate(pairs)
        if need.work is not None or need.layout != operand.layout
    )


def _ask_torch(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: Sequence[tuple[Any, ...]],
    found: Sequence[_Found],
) -> None:
    """Raises what torch raises of these dtypes, on all ranks.

    Those that hold nothing call it on tensors without elements, of which many a kernel takes any.
    """
    shapes = [one.layout.shape if isinstance(one, State) else one.shape for one in found]
    ones = [
        torch.ones([min(size, 2) for size in shape], dtype=one.dtype, device=one.device)
        for one, shape in zip(found, shapes, strict=True)
    ]
    with torch.no_grad():
        result = _call(func, args, kwargs, slots, ones)
    if result is NotImplemented:  # of `x == None`; for a TypeError torch says so itself
        raise ArgumentTypeError(function_name(func), got=" and ".join(map(_kind, args)))


def _kind(value: object) -> str:
    return type(value).__name__


def _operand(one: _Found, ranks: tuple[int, ...]) -> Operand:
    if isinstance(one, State):
        return Operand(one.layout, one.dtype)
    return Operand(replicated(tuple(one.shape), ranks), one.dtype, is_plain=True)


def compare_calls(func: Any, found: Sequence[_Found]) -> None:
    """All ranks call the same function on the same tensors; plain ones are compared by data."""
    first = next(one for one in found if isinstance(one, State))
    values = {
        "layouts": [one.layout for one in found if isinstance(one, State)],
        "dtypes": [one.dtype for one in found],
        "requires_grad": _needs_grad(found),
        "plain tensors": [
            (tuple(one.shape), digest(one)) for one in found if isinstance(one, torch.Tensor)
        ],
    }
    agree(function_name(func), values, group=first.comm, hot=True)


# -- carrying out ----------------------------------------------------------------------------------


def _run_pieces(
    known: _Known,
    decision: Decision,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Sequence[_Found],
) -> Any:
    first = next(one for one in found if isinstance(one, State))
    rank = first.rank
    if known.moved_bytes:
        announce(
            func,
            [
                o.layout
                for o, n in zip(known.operands, decision.needs, strict=True)
                if bytes_moved(o, n)
            ],
            known.moved_bytes,
            rank,
        )
    if decision.is_in_place:
        check_writable(args[0], func)
    pieces = [_pieces(one, need, first) for one, need in zip(found, decision.needs, strict=True)]

    def invoke(*tensors: torch.Tensor) -> Any:
        return _call(func, args, kwargs, known.slots, tensors)

    if decision.is_in_place:
        if decision.outputs[0].boxes_of(rank):
            decision.kernel(pieces, invoke)
        else:
            _write_into_tie(pieces, known.operands, invoke)
        if torch.is_grad_enabled():
            show_requires_grad(args[0])
        return args[0]
    ndims = [len(operand.shape) for operand in known.operands]
    made = _made(
        decision.outputs,
        lambda: decision.kernel(pieces, invoke),
        lambda: _ties(decision.phantom or invoke, pieces, ndims),
        first,
    )
    if decision.finish is not None:
        made = [reshard_state(one, to) for one, to in zip(made, decision.finish, strict=True)]
    if decision.then is not None:
        made = _afterwards(decision.then, made)
    if known.like is not None and made[0].layout == known.operands[known.like].layout:
        made[0].spec = found[known.like].spec  # type: ignore[union-attr]
    is_from_rows = any(isinstance(one, State) and one.is_from_rows for one in found)
    for one in made:
        one.is_from_rows = one.is_special = is_from_rows
    tensors = [wrap(one) for one in made]
    if decision.pack is not None:
        return decision.pack(tensors)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _pieces(one: _Found, need: Need, first: State) -> Sequence[torch.Tensor]:
    """The local pieces of an operand where it is needed: one per entry of the work, or a tie."""
    rank = first.rank
    entries = need.layout if need.work is None else need.work
    if isinstance(one, torch.Tensor):
        has_grad = one.requires_grad and torch.is_grad_enabled()
        if not has_grad and need.layout.pending is None:  # of a sum it would be every term
            boxes = entries.boxes_of(rank)
            return [one if box.shape == one.shape else one[box.slices()] for box in boxes] or [
                one.new_empty(0)
            ]
        ranks = tuple(sorted(first.comm.ranks))
        one = first.with_carriers([one], layout=replicated(tuple(one.shape), ranks), spec=None)
    if need.layout == one.layout and need.work is None:
        return one.carriers
    devices = (one.device,) * len(need.layout.boxes_of(rank))
    job = Exchange(one.layout, need.layout, one.devices, devices, first.comm, work=need.work)
    return exchange(job, one.carriers)


def _made(
    layouts: Sequence[Layout],
    compute: Callable[[], list[list[torch.Tensor]]],
    ties: Callable[[], list[torch.Tensor]],
    first: State,
) -> list[State]:
    """What a kernel computes, in these layouts, with ties for what this rank has none of."""
    has_output = [bool(layout.boxes_of(first.rank)) for layout in layouts]
    outputs = compute() if any(has_output) else [[] for _ in layouts]
    if not all(has_output):
        outputs = [held or [tie] for held, tie in zip(outputs, ties(), strict=True)]
    return [
        first.with_carriers(held, layout=layout, spec=None)
        for held, layout in zip(outputs, layouts, strict=True)
    ]


def _afterwards(then: Then, made: Sequence[State]) -> list[State]:
    """What is computed of outputs once they are where they are needed."""
    first = made[0]
    pieces = [_pieces(one, need, first) for one, need in zip(made, then.needs, strict=True)]
    return _made(
        then.outputs,
        lambda: then.kernel(pieces),
        lambda: _ties(then.phantom, pieces, [1] * len(pieces)),
        first,
    )


def _ties(
    phantom: Callable[..., Any], pieces: Sequence[Sequence[torch.Tensor]], ndims: Sequence[int]
) -> list[torch.Tensor]:
    """What a rank that has none of an output carries in its place. [Note: phantoms]"""
    results = phantom(*[_phantom(held[0], ndim) for held, ndim in zip(pieces, ndims, strict=True)])
    listed = list(results) if isinstance(results, tuple | list) else [results]
    return [result.reshape(-1)[:0] for result in listed]


def _write_into_tie(
    pieces: Sequence[Sequence[torch.Tensor]],
    operands: Sequence[Operand],
    invoke: Callable[..., Any],
) -> None:
    """What an in-place function does on a rank that holds nothing of its target.

    The tie is written as the others' shards are: it comes to depend on what the function reads,
    counts a version, and raises what they raise.
    """
    tie, ndim = pieces[0][0], len(operands[0].shape)
    others = [
        _phantom(held[0], len(operand.shape))
        for held, operand in zip(pieces[1:], operands[1:], strict=True)
    ]
    invoke(tie.view((0,) * ndim) if ndim else tie, *others)


def _phantom(piece: torch.Tensor, ndim: int) -> torch.Tensor:
    if ndim == 0:
        return piece.sum(dtype=piece.dtype)
    return piece.reshape(-1)[:0].view((0,) * ndim)


def _call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: Sequence[tuple[Any, ...]],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """The function on these tensors in place of the operands."""
    given, named = list(args), dict(kwargs)
    for slot, tensor in zip(slots, tensors, strict=True):
        home: Any = given if isinstance(slot[0], int) else named
        for step in slot[:-1]:
            home[step] = list(home[step])
            home = home[step]
        home[slot[-1]] = tensor
    return func(*given, **named)


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


# -- operators -------------------------------------------------------------------------------------


def _operator(name: str, func: Any) -> Callable[[Any, Any], Any]:
    """An arithmetic operator of which torch makes `func`.

    For two tensors that are where they belong it is the quick way without asking torch for it,
    which is a quarter of the time of a small sum.
    """
    ask_torch = getattr(torch.Tensor, name)

    def operate(self: Any, other: Any) -> Any:
        if type(other) is not ShardedTensor or type(self) is not ShardedTensor:
            return ask_torch(self, other)
        if _has_modes() or active_transform() is not None:
            return ask_torch(self, other)
        a, b = self._state, other._state
        x, y = a.carriers[0], b.carriers[0]
        members = a.members
        known = members and members.decisions.get(
            (func, id(a.layout), x.dtype, id(b.layout), y.dtype)
        )
        if not known or not known.is_always_quick or members is not b.members or is_debugging():
            return ask_torch(self, other)
        with _NoDispatch():
            is_past = _grad_fn(self) is not None or _grad_fn(other) is not None
        if is_past or a.is_special or b.is_special or func in CUSTOM or func in CUSTOM_FUNCTIONS:
            return ask_torch(self, other)
        spec = a.spec if known.like == 0 else b.spec
        return wrap(State(known.output, (func(x, y),), a.rank, members, spec, a.process_group))

    operate.__name__ = name
    return operate


for _name, _function in (
    ("__add__", _Tensor.add),
    ("__sub__", _Tensor.sub),
    ("__mul__", _Tensor.mul),
    ("__truediv__", _Tensor.div),
):
    setattr(ShardedTensor, _name, _operator(_name, _function))
