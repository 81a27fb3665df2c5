"""Functions that work element by element, with broadcasting.

The result is cut like one of the operands, and the others are brought there: the one for which the
fewest bytes move. An operand that is broadcast is used by several boxes of the result, often on
several ranks; there its replicas enter work that is split.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from shardwise.errors import OpError
from shardwise.geometry import Box, Entry, Layout
from shardwise.ops.rule import Call, Decision, Need, Operand, Rule
from shardwise.ops.work import Spot, bytes_moved, needed_parts

if TYPE_CHECKING:
    from shardwise.ops.rule import Invoke, OperandPieces, OutputPieces

__all__ = ["Linear", "decide_pointwise", "pointwise", "with_dims"]

# In which operands a function is linear, so that a pending sum can stay pending:
# "each": in all together, as a + b; "one": in any one of them, as a * b; "first": as a / b.
Linear = Literal["each", "one", "first"]


class _Way(NamedTuple):
    """One way to compute: the layout of the result, and what it needs."""

    output: Layout
    needs: tuple[Need, ...]
    spots: tuple[tuple[Spot, ...], ...]  # per operand, per local box of the result
    cost: int  # bytes


def pointwise(name: str, linear: Linear | None = None, *, in_place: bool = False) -> Rule:
    """The rule of a function that works element by element."""
    return Rule(
        name,
        lambda call: decide_pointwise(call, linear, in_place=in_place),
        reads_numbers=False,
        asks_torch=True,
    )


def decide_pointwise(
    call: Call, linear: Linear | None, *, in_place: bool = False
) -> Decision | None:
    """The cheapest way to compute the call; None if it is not one of elements after all."""
    if call.function is torch.where and len(call.operands) == len(call.args) == 1:
        return None  # where(condition) looks for indices
    shape = _broadcast(call)
    in_place = in_place or _asks_in_place(call)
    if in_place:
        target = call.operands[0]
        is_settled = target.layout.pending is None
        if target.is_plain or not (
            is_settled or _stays_pending(call, linear, shape) == target.layout
        ):
            return None  # it is written with what is gathered
        way = _way_in_place(call, linear, shape)
    else:
        ways = [_way(call, layout, linear) for layout in _candidates(call, linear, shape)]
        way = min(ways, key=lambda way: way.cost)
    rows = list(zip(*way.spots, strict=True))

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        return [
            [
                invoke(*[spot.of(held) for spot, held in zip(row, pieces, strict=True)])
                for row in rows
            ]
        ]

    return Decision(
        way.needs,
        (way.output,),
        kernel,
        is_one_call=len(rows) == 1 and all(spot.part is None for spot in rows[0]),
        is_of_all=True,
        is_in_place=in_place,
    )


@lru_cache(maxsize=1024)
def _place_of_inplace(function: Any) -> int | None:
    """Position of the argument `inplace` of functions that have one, as `F.relu`."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C functions, which have none
        return None
    return names.index("inplace") if "inplace" in names else None


def _asks_in_place(call: Call) -> bool:
    place = _place_of_inplace(call.function)
    if place is None:
        return False
    return bool(call.args[place] if place < len(call.args) else call.kwargs.get("inplace"))


def _broadcast(call: Call) -> tuple[int, ...]:
    shapes = [operand.shape for operand in call.operands]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise OpError(
            f"{call.name}: shapes do not fit together",
            rank=call.rank,
            got=" and ".join(map(str, shapes)),
            fix="A plain tensor beside sharded ones is the same on all ranks and of global size. "
            "For one that has this rank's rows only, pass shardwise.as_local_rows(x).",
        ) from error


def _candidates(call: Call, linear: Linear | None, shape: tuple[int, ...]) -> list[Layout]:
    """The layouts that the result may have, best first where they cost the same."""
    sharded = [operand for operand in call.operands if not operand.is_plain]
    stays = _stays_pending(call, linear, shape)
    if stays is not None:
        return [stays]
    settled = [operand.layout.bar for operand in sharded]
    full = [layout for layout in settled if layout.shape == shape]
    return list(dict.fromkeys(full or [_widened(layout, shape) for layout in settled]))


def _stays_pending(call: Call, linear: Linear | None, shape: tuple[int, ...]) -> Layout | None:
    """The layout of the operand whose pending sum passes through, if it does."""
    pending = [k for k, operand in enumerate(call.operands) if operand.layout.pending is not None]
    if linear is None or not pending:
        return None
    full = [k for k in pending if call.operands[k].shape == shape]
    if not full or not all(call.operands[k].is_linear_sum for k in pending):
        return None
    layout = call.operands[full[0]].layout
    if linear == "each":
        # A number would be added to every term.
        alike = all(call.operands[k].layout.pending == layout.pending for k in pending)
        has_two = len(call.operands) == _num_terms(call)
        fits = all(one.shape == shape or _widens_to(one, layout) for one in call.operands)
        return layout if alike and has_two and fits else None
    if len(pending) > 1 or (linear == "first" and pending != [0]):
        return None
    is_plain_division = linear == "first" and call.args[0] is call.operands[0] and not call.kwargs
    return layout if linear == "one" or is_plain_division else None


def _widens_to(operand: Operand, layout: Layout) -> bool:
    """Whether a pending sum that is broadcast has its terms where those of `layout` are."""
    return operand.layout.pending is not None and _widened(operand.layout, layout.shape) == layout


def _num_terms(call: Call) -> int:
    """How many things a call adds up: its first two arguments, or one."""
    return min(len([arg for arg in call.args if arg is not None]), 2)


def _widened(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of a result of `shape`, each box where the part of the operand is."""
    lead = len(shape) - layout.ndim
    entries = []
    for box, owner, term in layout:
        if not box.volume and 0 not in shape:
            continue  # an empty box that would widen to a full one
        start, stop = [0] * lead, list(shape[:lead])
        for dim, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
            size = shape[lead + dim]
            start.append(low if layout.shape[dim] == size else 0)
            stop.append(high if layout.shape[dim] == size else size)
        entries.append(Entry(Box(tuple(start), tuple(stop)), owner, term))
    return Layout.of(shape, entries, pending=layout.pending)


def _way(call: Call, output: Layout, linear: Linear | None) -> _Way:
    found = [_needed(operand, output, linear, call.rank) for operand in call.operands]
    needs = tuple(need for need, _ in found)
    cost = sum(map(bytes_moved, call.operands, needs))
    return _Way(output, needs, tuple(spots for _, spots in found), cost)


def _way_in_place(call: Call, linear: Linear | None, shape: tuple[int, ...]) -> _Way:
    """The first operand stays where it is, since it is what changes."""
    target = call.operands[0]
    if target.shape != shape:
        raise OpError(
            f"{call.name} in place",
            rank=call.rank,
            expected=f"a tensor of shape {shape} to change, which is that of the result",
            got=target.shape,
            fix="Compute a new tensor.",
        )
    return _way(call, target.layout, linear)


def _needed(
    operand: Operand, output: Layout, linear: Linear | None, rank: int
) -> tuple[Need, tuple[Spot, ...]]:
    """In which layout an operand is needed, and where each local box finds its piece."""
    count = len(output.boxes_of(rank))
    is_term = linear == "each" or operand.layout.pending is not None
    is_alike = output.pending is None or is_term
    if operand.shape == output.shape and is_alike:
        return Need(output), tuple(map(Spot, range(count)))
    parts = {box: _projected(box, output.shape, operand.shape) for box in output.boxes}
    if linear == "each" and output.pending is not None:  # terms meet terms: `_widens_to`
        held = operand.layout
        terms = zip(held.boxes_of(rank), held.terms_of(rank), strict=True)
        place = {one: k for k, one in enumerate(terms)}
        mine = zip(output.boxes_of(rank), output.terms_of(rank), strict=True)
        return Need(held), tuple(Spot(place[parts[box], term]) for box, term in mine)
    return needed_parts(operand, output, parts, rank)


def _projected(box: Box, shape: tuple[int, ...], onto: tuple[int, ...]) -> Box:
    """The part of an operand of shape `onto` that a box of the result is computed from."""
    lead = len(shape) - len(onto)
    dims = list(zip(onto, shape[lead:], box.start[lead:], box.stop[lead:], strict=True))
    # Not by n == 1: of a dim of size 1 the box may be empty, and so has to be the result.
    start = [low if n == size else 0 for n, size, low, _ in dims]
    stop = [high if n == size else 1 for n, size, _, high in dims]
    return Box(tuple(start), tuple(stop))


def with_dims(layout: Layout, more: int) -> Layout:
    """The layout of the tensor with `more` dims of size 1 at its end; negative: less of them."""
    keep = layout.ndim + min(more, 0)

    def ended(values: tuple[int, ...], last: int) -> tuple[int, ...]:
        return (*values[:keep], *[last] * more)

    entries = [
        Entry(Box(ended(box.start, 0), ended(box.stop, 1)), rank, term)
        for box, rank, term in layout
        # One that is empty along a dim that goes would become a full one.
        if more >= 0
        or all(low < high for low, high in zip(box.start[keep:], box.stop[keep:], strict=True))
    ]
    return Layout.of(ended(layout.shape, 1), entries, pending=layout.pending)
