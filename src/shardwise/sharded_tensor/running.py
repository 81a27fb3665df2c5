"""Carrying out what the rules of `shardwise.ops` decide.

[Note: the quick way] Most calls find all operands where they are needed, one local piece of each.
They look their decision up by the identity of the layouts, call torch once and wrap the result.
What the key leaves out may not matter to the decision.

[Note: phantoms] A rank that holds nothing of the result has no kernel to run, but must be in the
graph ([Note: every rank is in every graph] in `comm/differentiable.py`), and must know the dtype of
the result. So it calls the function on tensors without elements that come from its operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.comm.agreement import agree
from shardwise.comm.checks import should_check
from shardwise.comm.differentiable import Exchange, exchange
from shardwise.errors import OpError
from shardwise.ops import COMPOSITES, RULES, Call, Operand
from shardwise.sharded_tensor.dispatch import function_name, handles, sharded_arguments
from shardwise.sharded_tensor.implicit import announce
from shardwise.sharded_tensor.resharding import check_one_group, replicated, reshard_state
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    check_writable,
    compute_by_gathering,
    show_requires_grad,
    wrap,
)
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops import Decision, Need, Rule

__all__ = ["compare_operands"]

_MOST_KEPT = 4096  # decisions of a group
_NUMBERS = frozenset({int, float, complex})
_Found = State | torch.Tensor  # an operand: the state of a sharded tensor, or a plain one


class _Known(NamedTuple):
    """A decision, and what it takes to carry it out on this rank."""

    decision: Decision | None  # None: the rule does not cover the call
    operands: tuple[Operand, ...]  # they hold the layouts, so that the ids in the key stay theirs
    slots: tuple[tuple[Any, ...], ...]  # where each operand stands: (0,), (0, 2), ("other",)
    is_quick: bool  # [Note: the quick way]
    is_slow_with_grad: bool  # since gradients of operands are summed or moved
    like: int | None  # the operand whose layout is the output's, and which so has its spec
    moved_bytes: int  # between all ranks, to bring operands where they are needed


def _run(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives by its rule."""
    key: list[Any] = [func]
    found: list[_Found] = []
    for arg in args:
        if isinstance(arg, ShardedTensor):
            state = arg._state
            found.append(state)
            key += (id(state.layout), state.carriers[0].dtype)
        else:
            _note(arg, key, found, reads_numbers=rule.reads_numbers)
    for name, arg in kwargs.items():
        key.append(name)
        _note(arg, key, found, reads_numbers=rule.reads_numbers)
    first = next(one for one in found if isinstance(one, State))
    decisions = first.comm.decisions
    try:
        known = decisions.get(tuple(key))
    except TypeError:  # an argument that has no hash; no rule knows what it means
        return compute_by_gathering(func, args, kwargs)
    if known is None:
        known = _decide(rule, func, args, kwargs, found)
        if len(decisions) >= _MOST_KEPT:
            decisions.clear()
        decisions[tuple(key)] = known
    decision = known.decision
    if decision is None:
        return compute_by_gathering(func, args, kwargs)
    if should_check(hot=True):
        compare_operands(func, found)
    if not known.is_quick or (known.is_slow_with_grad and _needs_grad(found)):
        return _run_pieces(known, decision, func, args, kwargs, found)
    here = [arg._state.carriers[0] if isinstance(arg, ShardedTensor) else arg for arg in args]
    if decision.is_in_place:
        check_writable(args[0], func)
        func(*here, **kwargs)
        show_requires_grad(args[0])
        return args[0]
    piece = func(*here, **kwargs)
    return args[0] if piece is here[0] else _wrapped(known, piece, first, found)


def _note(arg: Any, key: list[Any], found: list[_Found], *, reads_numbers: bool) -> None:
    """Adds to `key` what of an argument matters, and to `found` the tensors in it."""
    if isinstance(arg, torch.Tensor):
        if isinstance(arg, ShardedTensor):
            found.append(arg._state)
            key += (id(arg._state.layout), arg._state.dtype)
        else:
            found.append(arg)
            key += (arg.shape, arg.dtype)
    elif isinstance(arg, list | tuple):
        key.append(len(arg))
        for one in arg:
            _note(one, key, found, reads_numbers=reads_numbers)
    else:
        # The type too, since 1 == 1.0 == True.
        key += (type(arg), arg if reads_numbers or type(arg) not in _NUMBERS else None)


def _needs_grad(found: Sequence[_Found]) -> bool:
    return torch.is_grad_enabled() and any([one.requires_grad for one in found])


def _wrapped(known: _Known, piece: torch.Tensor, first: State, found: Sequence[_Found]) -> Any:
    assert known.decision is not None
    like = known.like
    spec = None if like is None else found[like].spec  # type: ignore[union-attr]
    made = State(
        known.decision.outputs[0], (piece,), first.rank, first.members, spec, first.process_group
    )
    made.is_from_rows = any([isinstance(one, State) and one.is_from_rows for one in found])
    return wrap(made)


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
    decision = rule.decide(Call(func, seen, named, operands, ranks, rank))
    if decision is None:
        return _Known(None, operands, tuple(slots), False, False, None, 0)
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
        and len(decision.outputs) == 1
        and all(len(slot) == 1 and isinstance(slot[0], int) for slot in slots)
    )
    like = [k for k, operand in enumerate(operands) if operand.layout == decision.outputs[0]]
    like = [k for k in like if not operands[k].is_plain]
    return _Known(
        decision,
        operands,
        tuple(slots),
        is_quick,
        any(need.work is not None or need.layout != operand.layout for operand, need in pairs),
        like[0] if like else None,
        sum(_bytes_between(operand, need) for operand, need in pairs),
    )


def _operand(one: _Found, ranks: tuple[int, ...]) -> Operand:
    if isinstance(one, State):
        return Operand(one.layout, one.dtype)
    return Operand(replicated(tuple(one.shape), ranks), one.dtype, is_plain=True)


def _bytes_between(operand: Operand, need: Need) -> int:
    if operand.layout == need.layout:
        return 0
    return plan_reshard(operand.layout, need.layout, operand.dtype.itemsize).total_bytes


def compare_operands(func: Any, found: Sequence[_Found]) -> None:
    """All ranks call the same function on the same layouts; in debug mode."""
    first = next(one for one in found if isinstance(one, State))
    values = {
        "operands": [
            (str(one.layout), one.layout.fingerprint, one.dtype)
            if isinstance(one, State)
            else ("plain", tuple(one.shape), one.dtype)
            for one in found
        ],
        "requires_grad": _needs_grad(found),
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
                if _bytes_between(o, n)
            ],
            known.moved_bytes,
            rank,
        )
    if decision.is_in_place:
        check_writable(args[0], func)
    pieces = [_pieces(one, need, first) for one, need in zip(found, decision.needs, strict=True)]

    def invoke(*tensors: torch.Tensor) -> Any:
        return _call(func, args, kwargs, known.slots, tensors)

    has_output = [bool(layout.boxes_of(rank)) for layout in decision.outputs]
    outputs: list[list[torch.Tensor]] = []
    if any(has_output):
        outputs = decision.kernel(pieces, invoke)
    if decision.is_in_place:
        show_requires_grad(args[0])
        return args[0]
    if not all(has_output):
        ties = _ties(decision, pieces, known.operands, invoke)
        given = outputs or [[] for _ in ties]
        outputs = [held or [tie] for held, tie in zip(given, ties, strict=True)]
    made = [
        first.with_carriers(held, layout=layout, spec=None)
        for held, layout in zip(outputs, decision.outputs, strict=True)
    ]
    if decision.finish is not None:
        made = [reshard_state(one, to) for one, to in zip(made, decision.finish, strict=True)]
    if known.like is not None and made[0].layout == known.operands[known.like].layout:
        made[0].spec = found[known.like].spec  # type: ignore[union-attr]
    is_from_rows = any(isinstance(one, State) and one.is_from_rows for one in found)
    for one in made:
        one.is_from_rows = is_from_rows
    tensors = [wrap(one) for one in made]
    if decision.pack is not None:
        return decision.pack(tensors)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _pieces(one: _Found, need: Need, first: State) -> Sequence[torch.Tensor]:
    """The local pieces of an operand where it is needed: one per entry of the work, or a tie."""
    rank = first.rank
    entries = need.layout if need.work is None else need.work
    if isinstance(one, torch.Tensor):
        if not (one.requires_grad and torch.is_grad_enabled()):
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


def _ties(
    decision: Decision,
    pieces: Sequence[Sequence[torch.Tensor]],
    operands: Sequence[Operand],
    invoke: Callable[..., Any],
) -> list[torch.Tensor]:
    """What a rank that has none of an output carries in its place. [Note: phantoms]"""
    phantoms = [
        _phantom(held[0], len(operand.shape))
        for held, operand in zip(pieces, operands, strict=True)
    ]
    results = (decision.phantom or invoke)(*phantoms)
    listed = list(results) if isinstance(results, tuple | list) else [results]
    return [result.reshape(-1)[:0] for result in listed]


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


def _handler(rule: Rule, func: Any) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return _run_into(kwargs.pop("out"), func, args, kwargs)
        return _run(rule, func, args, kwargs)

    return handler


def _run_into(out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function with `out=`: computed where it is best, then written where `out` is."""
    outs = out if isinstance(out, list | tuple) else (out,)
    tensors = sharded_arguments((args, outs), kwargs, torch.Tensor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise OpError(
            f"{function_name(func)}: functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad",
            fix="Use the result, or call it under torch.no_grad().",
        )
    result = func(*args, **kwargs)
    results = result if isinstance(result, list | tuple) else (result,)
    for target, value in zip(outs, results, strict=True):
        if target.shape != value.shape:
            raise OpError(
                f"out of {function_name(func)}",
                expected=f"a tensor of shape {tuple(value.shape)}",
                got=tuple(target.shape),
            )
        target.copy_(value)
    return out


for _function, _rule in RULES.items():
    handles(_function)(_handler(_rule, _function))
for _function, _composite in COMPOSITES.items():
    handles(_function)(_composite.run)
