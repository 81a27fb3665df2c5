"""Asking a rule, and noting what it takes to carry its decision out on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.differentiable import exchange_of
from shardwise.errors import ArgumentTypeError
from shardwise.ops import Call, Operand
from shardwise.ops.work import bytes_moved
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.resharding import check_one_group, replicated
from shardwise.sharded_tensor.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Exchange
    from shardwise.geometry import Layout
    from shardwise.ops import Decision, Need, Rule
    from shardwise.sharded_tensor.kinds import Kind

__all__ = ["Found", "Known", "call_with", "decide", "needs_grad"]

Found = State | torch.Tensor  # an operand: the state of a sharded tensor, or a plain one


# What a quick call that makes a tensor needs, in a plain tuple, which Python takes apart quickest:
# `entering` as in `Known`, which argument is `like` the result, the decision's `local`,
# `is_in_place` and `is_view`, the layout of the result.
Quickly = tuple[
    "tuple[tuple[int, Exchange], ...]",
    int | None,
    "Callable[[torch.Tensor], torch.Tensor] | None",
    bool,
    bool,
    "Layout",
]


@dataclass(slots=True)
class Known:
    """A decision, and what it takes to carry it out on this rank."""

    decision: Decision | None  # None: the rule does not cover the call
    is_quick: bool  # [Note: the quick way] in `running.py`
    like: int | None  # the operand whose layout is the output's, and which so has its spec
    operands: tuple[Operand, ...]  # they hold the layouts, so that the ids in the key stay theirs
    slots: tuple[tuple[Any, ...], ...]  # where each operand stands: (0,), (0, 2), ("other",)
    moved_bytes: int  # between all ranks, to bring operands where they are needed
    # Of a quick call: the arguments whose gradients are summed or moved, and by what.
    entering: tuple[tuple[int, Exchange], ...] = ()
    quickly: Quickly | None = None  # None: it is not quick
    # Whether pieces of all operands are made to follow from all, at first and after the exchange.
    # [Note: pieces of one graph] in `carrying_out.py`
    is_joined: bool = False
    is_joined_then: bool = False
    made: Kind | None = None  # of what a quick call gave last; autocast changes it


def decide(
    rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[Found]
) -> Known:
    """What the rule says of a call with these operands."""
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
            listed = [replaced(one, (*slot, k)) for k, one in enumerate(value)]
            return listed if isinstance(value, list) else tuple(listed)  # x[[0, 1]], x[0, 1]
        return value

    seen = tuple(replaced(arg, (k,)) for k, arg in enumerate(args))
    named = {name: replaced(arg, (name,)) for name, arg in kwargs.items()}
    has_grad = rule.reads_grad and needs_grad(found)
    decision = rule.decide(Call(func, seen, named, operands, ranks, rank, has_grad))
    if decision is None:
        return Known(None, False, None, operands, tuple(slots), 0)
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
    has_entering = any(_enters(*pair) for pair in pairs)
    is_joined, is_joined_then = _joins(decision, ranks)
    is_quick = (
        not is_joined
        and (decision.is_one_call or decision.local is not None)
        and has_one_piece
        and stays
        and decision.finish is None
        and decision.then is None
        and len(decision.outputs) == 1
        and all(isinstance(slot[0], int) for slot in slots)
        # What enters work is put in its place, and not in lists.
        and (not has_entering or all(len(slot) == 1 for slot in slots))
    )
    like = [k for k, operand in enumerate(operands) if operand.layout == decision.outputs[0]]
    like = [k for k in like if not operands[k].is_plain]
    first_like, output = like[0] if like else None, decision.outputs[0]
    entering = _entering(pairs, slots, members, states[0].device) if is_quick else ()
    local = None if decision.is_in_place else decision.local
    place = None if first_like is None else slots[first_like][0]
    return Known(
        decision,
        is_quick,
        first_like,
        operands,
        tuple(slots),
        sum(bytes_moved(operand, need) for operand, need in pairs),
        entering,
        (entering, place, local, decision.is_in_place, decision.is_view, output)
        if is_quick
        else None,
        is_joined,
        is_joined_then,
    )


def _joins(decision: Decision, ranks: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether pieces are made to follow from all, at first and after the exchange.

    Layouts alone say so, so that it is the same on all ranks. [Note: pieces of one graph]
    """

    def some_differ(layouts: Iterable[Layout]) -> bool:
        return not all(_is_one_each(layout, ranks) for layout in set(layouts))

    given = [need.work or need.layout for need in decision.needs]
    is_joined = (
        len(given) > 1
        and not (decision.is_of_all or decision.is_view or decision.is_in_place)
        and some_differ((*given, *decision.outputs))
    )
    then = decision.then
    if then is None:
        return is_joined, False
    given = [need.work or need.layout for need in then.needs] + [given[k] for k in then.operands]
    return is_joined, some_differ((*given, *then.outputs))


def _is_one_each(layout: Layout, ranks: tuple[int, ...]) -> bool:
    """Whether each of these ranks, and no other, has one box, and that has elements."""
    return (
        len(layout) == len(ranks)
        and layout.ranks == ranks
        and not any(box.is_empty for box in layout.boxes)
    )


def _enters(operand: Operand, need: Need) -> bool:
    """Whether the gradient of an operand that stays in its place is summed or moved."""
    return need.work is not None or need.layout != operand.layout


def _entering(
    pairs: Sequence[tuple[Operand, Need]],
    slots: Sequence[tuple[Any, ...]],
    members: Communicator,
    device: torch.device,
) -> tuple[tuple[int, Exchange], ...]:
    """The quick way with gradients: here nothing moves on the way there."""
    return tuple(
        (
            slot[0],
            exchange_of(operand.layout, need.layout, (device,), (device,), members, work=need.work),
        )
        for (operand, need), slot in zip(pairs, slots, strict=True)
        if _enters(operand, need)
    )


def _ask_torch(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: Sequence[tuple[Any, ...]],
    found: Sequence[Found],
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
        result = call_with(func, args, kwargs, slots, ones)
    if result is NotImplemented:  # of `x == None`; for a TypeError torch says so itself
        raise ArgumentTypeError(function_name(func), got=" and ".join(map(_kind, args)))


def _kind(value: object) -> str:
    return type(value).__name__


def _operand(one: Found, ranks: tuple[int, ...]) -> Operand:
    if isinstance(one, State):
        return Operand(one.layout, one.dtype)
    return Operand(replicated(tuple(one.shape), ranks), one.dtype, is_plain=True)


def needs_grad(found: Sequence[Found]) -> bool:
    """Whether autograd will follow a call with these operands."""
    return torch.is_grad_enabled() and any([one.requires_grad for one in found])


def call_with(
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
