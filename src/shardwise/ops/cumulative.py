"""Cumulative functions. Where the dim is cut, sums and products have the totals of pieces before.

The others need their dim whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pattern import decide_along
from shardwise.ops.phantoms import phantom_of_one, unit_of
from shardwise.ops.reducing import decide_whole, everywhere
from shardwise.ops.rule import Decision, Need, Rule, Then, composite, register
from shardwise.ops.slots import Fold, needed_slots, slots_of
from shardwise.ops.terms import Reduced, kept_box, terms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces
    from shardwise.ops.slots import Place, Tensors

__all__: list[str] = []


def _decide_cumulative(call: Call, dim: int, *, is_product: bool) -> Decision:
    """`cumsum` or `cumprod` along `dim`; only the totals of the pieces travel."""
    operand = call.operands[0]
    if not math.prod(operand.shape):
        return everywhere(call)
    layout, size = operand.layout.bar, operand.shape[dim] if operand.shape else 1
    dims = (dim,) if operand.shape else ()
    along = Reduced(operand.shape, dims, keepdim=True, width=size)
    one = phantom_of_one(call)
    if not dims or layout.is_whole(dim):
        return decide_whole(call, terms_of(layout, along, call.rank), layout, one)
    terms = terms_of(layout, replace(along, width=1), call.rank, along=dim)
    slots = slots_of(terms, _totals(dim, is_product=is_product), layout, call.rank)
    totals_of = needed_slots(terms, layout, slots.layouts[0].shape, call.rank)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        own = [invoke(piece) for piece in pieces[0]]
        return [*slots.kernel([own], invoke), own]

    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        return one(x) * 2

    def added(totals: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """What stands for the result of a piece without elements, in the graph of the totals."""
        before, one = unit_of(totals, (1,)), unit_of([own], (1,))
        return (one * before if is_product else one + before)[:0]

    def add(pieces: OperandPieces) -> OutputPieces:
        totals, own = pieces
        found = []
        for one, box, places in zip(own, layout.boxes_of(call.rank), totals_of.places, strict=True):
            if not box.volume:
                found.append(added(totals, one).reshape(one.shape))
                continue
            earlier = _earlier(totals, places, kept_box(box, terms.reduced), is_product)
            found.append(one * earlier if is_product else one + earlier)
        return [found]

    return Decision(
        (Need(layout),),
        (*slots.layouts, layout),
        kernel,
        then=Then(
            (totals_of.need, Need(layout)),
            (layout,),
            add,
            lambda totals, own: [added([totals], own)],
        ),
        phantom=phantom,
    )


def _totals(dim: int, *, is_product: bool) -> Fold:
    """The total of a piece is the last of what the function gave of it."""

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        return (piece.narrow(dim, -1, 1).unsqueeze(0),)

    return Fold(lift, lambda parts: parts, lambda part: part, lambda _: ((int(is_product),),))


def _earlier(
    totals: Sequence[torch.Tensor],
    places: Sequence[Place],
    part: Box,
    is_product: bool,
) -> torch.Tensor:
    """What the pieces before one add up to; of none too, to be in the graph of the totals."""

    def combined(place: Place) -> torch.Tensor:
        before = totals[place.piece][: place.term, 0]
        return (torch.prod if is_product else torch.sum)(before, 0, dtype=before.dtype)

    if len(places) == 1:
        return combined(places[0])
    found = totals[0].detach().new_empty(part.shape)
    for place in places:
        found[place.cell.relative_to(part).slices()] = combined(place)
    return found


# -- the functions ---------------------------------------------------------------------------------


def _decide(call: Call, *, name: str) -> Decision | None:
    given = known_arguments(call, "input dim dtype")
    if given is None or len(call.operands) != 1:
        return None
    outlines(call)  # raises what torch raises
    if type(given["dim"]) is not int:
        return None
    dim = given["dim"] % max(len(call.operands[0].shape), 1)
    return _decide_cumulative(call, dim, is_product=name == "cumprod")


def _decide_whole_dim(call: Call) -> Decision | None:
    given = known_arguments(call, "input dim")
    if given is None or len(call.operands) != 1:
        return None
    outlines(call)
    return decide_along(call, [given["dim"]])


def _in_place(name: str) -> None:
    function = getattr(torch, name)

    @composite(f"{name}_", functions_named([f"{name}_"]))
    def run(tensor: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        # The gradient of a product is made of its factors, which may not be overwritten.
        given = tensor.clone() if name == "cumprod" and tensor.requires_grad else tensor
        return tensor.copy_(function(given, dim, dtype=dtype))


for _name in ("cumsum", "cumprod"):
    register(Rule(_name, partial(_decide, name=_name)), functions_named([_name]))
    _in_place(_name)
for _name in ("cummax", "cummin", "logcumsumexp"):
    register(Rule(_name, _decide_whole_dim), functions_named([_name]))
