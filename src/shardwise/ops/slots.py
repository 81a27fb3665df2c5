"""Reductions by an operation that layouts do not know: a fold.

The terms of a cell ([Note: cells and terms] in `terms.py`) become slots along a new dim of a small
tensor, which is brought together; each rank with shares of a cell then has all slots.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.geometry import Box, Layout
from shardwise.ops.outlines import outlines
from shardwise.ops.phantoms import as_tie, unit_of
from shardwise.ops.reducing import decide_whole, everywhere
from shardwise.ops.rule import Decision, Need, Then
from shardwise.ops.terms import kept_box, terms_of
from shardwise.ops.work import Use, need_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.ops.phantoms import Phantom
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces
    from shardwise.ops.terms import Reduced, Share, Terms

__all__ = [
    "Fold",
    "NeededSlots",
    "Place",
    "Prepared",
    "Slots",
    "Tensors",
    "decide_fold",
    "decide_slots",
    "needed_slots",
    "slots_of",
    "wide_dtype",
]

Tensors = tuple["torch.Tensor", ...]  # of one rank
_HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partials of numbers of `dtype` lose nothing that matters."""
    return torch.float32 if dtype in _HALVES else dtype


class Fold(NamedTuple):
    """How the parts of a reduction are put together, in tensors of a few values per element.

    A partial is one or more tensors with a first dim of `identity`'s length, then the dims of the
    tensor, the reduced ones kept.
    """

    lift: Callable[[torch.Tensor, Box], Tensors]  # a piece and its box -> its partial
    merge: Callable[[Tensors], Tensors]  # partials, one per slot of a new first dim -> one
    final: Callable[[Tensors], Tensors]  # a partial -> the results, reduced dims kept
    # Per tensor of a partial, the values that change nothing; called with the dtype.
    identity: Callable[[torch.dtype], tuple[tuple[Any, ...], ...]]
    is_own: bool = False  # whether torch's function, even of a whole tensor, will not do
    is_of_parts: bool = True  # whether it is right; else torch's function has to see all
    conclude: Callable[[Tensors], Tensors] | None = None  # final of merge, where that is quicker


def decide_fold(
    call: Call, reduced: Reduced, fold: Fold, *, pack: Callable[[list[Any]], Any] | None = None
) -> Decision:
    """Every rank's partial, all partials of a cell exchanged by those that have some."""
    operand = call.operands[0]
    if not math.prod(operand.shape):
        return everywhere(call, pack)
    layout = operand.layout.bar
    terms = terms_of(layout, reduced, call.rank)
    if terms.is_whole and not fold.is_own:
        return decide_whole(call, terms, layout, _phantom_of_fold(fold, layout.ndim), pack=pack)
    if not fold.is_of_parts:
        return everywhere(call, pack)
    return decide_slots(call, terms, layout, fold, pack=pack)


def _phantom_of_fold(fold: Fold, ndim: int) -> Phantom:
    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        unit = fold.lift(unit_of([x], (1,) * ndim), Box.whole((1,) * ndim))
        return [as_tie(result) for result in fold.final(unit)]

    return phantom


class Prepared(NamedTuple):
    """What a fold is of, if not of the pieces of one operand."""

    needs: tuple[Need, ...]  # one per operand
    pieces: Callable[[OperandPieces], list[torch.Tensor]]  # one per local box
    unit: Callable[[torch.Tensor], torch.Tensor]  # what it makes of a tensor of ones


def decide_slots(
    call: Call,
    terms: Terms,
    layout: Layout,
    fold: Fold,
    *,
    prepared: Prepared | None = None,
    pack: Callable[[list[Any]], Any] | None = None,
) -> Decision:
    """The partials of pieces in `layout` as slots, brought together, and the results of them."""
    reduced = terms.reduced
    slots = slots_of(terms, fold, layout, call.rank)
    everybody = call.ranks if reduced.is_full else None
    together = [_together(terms, width, everybody) for width in slots.widths]
    result = _result_layout(terms, everybody)
    count = len(outlines(call))
    conclude = fold.conclude or (lambda partials: fold.final(fold.merge(partials)))

    def finish(pieces: OperandPieces) -> OutputPieces:
        boxes = result.boxes_of(call.rank)
        rows = []
        for box, *partials in zip(boxes, *pieces, strict=True):
            results = conclude(tuple(partials))
            rows.append([one.reshape(box.shape) for one in results])
        return [list(column) for column in zip(*rows, strict=True)]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        kept = [reduced.width if d in reduced.dims else 1 for d in range(len(reduced.shape))]
        units = [
            unit_of([tie], (1, width, *kept)) for tie, width in zip(ties, slots.widths, strict=True)
        ]
        return [as_tie(one) for one in conclude(tuple(units))]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        made = pieces if prepared is None else [prepared.pieces(pieces)]
        return slots.kernel(made, invoke)

    def phantom_of_slots(*ties: torch.Tensor) -> list[torch.Tensor]:
        if prepared is None:
            return slots.phantom(*ties)
        return [as_tie(prepared.unit(unit_of(ties, (1,) * layout.ndim)))]

    return Decision(
        (Need(layout),) if prepared is None else prepared.needs,
        slots.layouts,
        kernel,
        then=Then(tuple(map(Need, together)), (result,) * count, finish, phantom),
        phantom=phantom_of_slots,
        pack=pack,
    )


class Slots(NamedTuple):
    """Partials as tensors of (slots, values, dims of the tensor)."""

    layouts: tuple[Layout, ...]
    widths: tuple[int, ...]  # values per element
    kernel: Callable[..., list[list[torch.Tensor]]]
    phantom: Callable[..., list[torch.Tensor]]


def slots_of(terms: Terms, fold: Fold, need: Layout, rank: int) -> Slots:
    """How a rank makes its slots of the partials; slots that a cell has no term for are filled."""
    widths = tuple(map(len, fold.identity(torch.float32)))
    layouts = tuple(_slot_layout(terms, width) for width in widths)
    boxes = need.boxes_of(rank)
    held = [  # of each layout the local boxes, and the shares of each; no shares: a filler
        [(box, terms.shares.get((Box(box.start[2:], box.stop[2:]), box.start[0]))) for box in local]
        for local in [layout.boxes_of(rank) for layout in layouts]
    ]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        lifted: dict[int, Tensors] = {}

        def partial(share: Share) -> Tensors:
            if share.piece not in lifted:
                lifted[share.piece] = fold.lift(pieces[0][share.piece], boxes[share.piece])
            index = ... if share.part is None else (slice(None), *share.part)
            return tuple(part[index] for part in lifted[share.piece])

        made: list[list[torch.Tensor]] = []
        for number, listed in enumerate(held):
            made.append([])
            for box, shares in listed:
                if not box.volume:
                    made[-1].append(phantom(pieces[0][0])[number].reshape(box.shape))
                elif shares is not None:
                    made[-1].append(_merged(fold, [partial(s) for s in shares])[number])
                else:
                    made[-1].append(_filler(box, lifted, number, fold))
        return made

    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        unit = fold.lift(unit_of([x], (1,) * need.ndim), Box.whole((1,) * need.ndim))
        return [as_tie(part) for part in unit]

    return Slots(layouts, widths, kernel, phantom)


def _merged(fold: Fold, partials: Sequence[Tensors]) -> Tensors:
    """The partial of all shares of a term, with a first dim for its slot."""
    found = partials[0]
    if len(partials) > 1:
        found = fold.merge(tuple(map(torch.stack, zip(*partials, strict=True))))
    return tuple(part.unsqueeze(0) for part in found)


def _filler(box: Box, lifted: Mapping[int, Tensors], number: int, fold: Fold) -> torch.Tensor:
    """What stands in slots that a cell has no term for, on a rank that has some of the cell."""
    like = next(iter(lifted.values()))[number]
    filler = like.detach().new_empty(box.shape)
    for k, value in enumerate(fold.identity(like.dtype)[number]):
        filler[:, k] = value
    return filler


def _slot_layout(terms: Terms, width: int) -> Layout:
    total = terms.num_slots
    boxes, owners = [], []
    for cell, ranks in terms.holders.items():
        count = terms.count(cell) if cell.volume else total
        for rank, held in ranks.items():
            ends = [(term, term + 1) for term in held] if cell.volume else [(0, total)]
            if count < total:
                ends.append((count, total))
            for low, high in ends:
                boxes.append(Box((low, 0, *cell.start), (high, width, *cell.stop)))
                owners.append(rank)
    return Layout((total, width, *terms.reduced.kept_shape), boxes, owners)


def _together(terms: Terms, width: int, everybody: Sequence[int] | None) -> Layout:
    """All slots of a cell on each rank that has some, or on all."""
    total = terms.num_slots
    boxes, owners = [], []
    for cell, ranks in terms.holders.items():
        for rank in ranks if everybody is None else everybody:
            boxes.append(Box((0, 0, *cell.start), (total, width, *cell.stop)))
            owners.append(rank)
    return Layout((total, width, *terms.reduced.kept_shape), boxes, owners)


def _result_layout(terms: Terms, everybody: Sequence[int] | None) -> Layout:
    if everybody is not None:
        return Layout.replicated(terms.reduced.result_shape(), everybody)
    return Layout(
        terms.reduced.result_shape(),
        [terms.reduced.result_box(cell) for cell, ranks in terms.holders.items() for _ in ranks],
        [rank for ranks in terms.holders.values() for rank in ranks],
    )


# -- slots where pieces need them ------------------------------------------------------------------


class Place(NamedTuple):
    """Where a piece finds the slots of a cell that it has a share of."""

    cell: Box
    piece: int  # which of the received pieces has them
    term: int  # the piece's own among them


class NeededSlots(NamedTuple):
    """All slots of the cells that local pieces have shares of, where the pieces use them."""

    need: Need
    places: tuple[tuple[Place, ...], ...]  # per local piece


def needed_slots(terms: Terms, layout: Layout, shape: tuple[int, ...], rank: int) -> NeededSlots:
    """The slots, a tensor of `shape`, on ranks that have shares; each piece is a use of them."""
    count, width = shape[:2]

    def whole(cell: Box) -> Box:
        return Box((0, 0, *cell.start), (count, width, *cell.stop))

    uses = []
    cells = [cell for cell in terms.holders if cell.volume]
    for box, owner, _ in layout:
        if box.volume:
            part = kept_box(box, terms.reduced)
            uses += [Use(whole(cell), owner, box) for cell in cells if part.contains(cell)]
    need, place = need_of(shape, uses, rank)
    boxes = layout.boxes_of(rank)
    found: list[list[Place]] = [[] for _ in boxes]
    for (cell, term), shares in terms.shares.items():
        for share in shares:
            received = place[whole(cell), boxes[share.piece]]
            found[share.piece].append(Place(cell, received, term))
    return NeededSlots(need, tuple(map(tuple, found)))
