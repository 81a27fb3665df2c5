"""Functions that need statistics of dims and give a tensor of the operand's own layout.

Softmax and normalisations: every rank makes partial statistics of its pieces, these are exchanged
as slots ([Note: cells and terms] in `terms.py`), and every rank finishes its own pieces with
them. The gradients of the statistics come back in one exchange too: each piece is one use of them.

Operands *beside* the tensor, as a weight per channel or targets, have some of its dims; a piece is
finished with the part that lies beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.geometry import Box, Layout
from shardwise.ops.phantoms import unit_of
from shardwise.ops.rule import Decision, Need, Operand, Then
from shardwise.ops.slots import Fold, slots_of, wide_dtype
from shardwise.ops.terms import kept_box
from shardwise.ops.work import Use, need_of, needed_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardwise.ops.rule import Call
    from shardwise.ops.terms import Terms
    from shardwise.ops.work import Spot

__all__ = [
    "Beside",
    "Finish",
    "NeededSlots",
    "beside",
    "decide_pieces",
    "decide_with_statistics",
    "needed_slots",
]


# -- operands beside the tensor --------------------------------------------------------------------


class Beside(NamedTuple):
    """What the pieces of a tensor need of an operand that has some of its dims."""

    need: Need
    dims: tuple[int, ...]  # of the tensor, one per dim of the operand
    ndim: int  # of the tensor
    spots: tuple[Spot, ...]  # per local box of the tensor

    def parts(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part for each local box of the tensor, which broadcasts against its piece."""
        found = []
        for part in self.narrow_parts(pieces):
            shape = [1] * self.ndim
            for dim, size in zip(self.dims, part.shape, strict=True):
                shape[dim] = size
            found.append(part.reshape(shape))
        return found

    def narrow_parts(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same with the operand's own dims."""
        return [spot.of(pieces) for spot in self.spots]


def beside(operand: Operand, dims: tuple[int, ...], layout: Layout, rank: int) -> Beside:
    """What the boxes of `layout` need of an operand whose dims are `dims` of its tensor."""
    parts = {box: box.along(dims) for box in layout.boxes}
    need, spots = needed_parts(operand, layout, parts, rank)
    return Beside(need, dims, layout.ndim, spots)


# -- slots where pieces need them ------------------------------------------------------------------


class NeededSlots(NamedTuple):
    """All slots of the cells that local pieces have shares of, where the pieces use them."""

    need: Need
    # Per local piece: its cells, the received piece with their slots, and its own term there.
    places: tuple[tuple[tuple[Box, int, int], ...], ...]


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
    found: list[list[tuple[Box, int, int]]] = [[] for _ in boxes]
    for (cell, term), shares in terms.shares.items():
        for share in shares:
            number = place[whole(cell), boxes[share.piece]]
            found[share.piece].append((cell, number, term))
    return NeededSlots(need, tuple(map(tuple, found)))


# -- decisions -------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """How pieces are computed, before and after statistics are exchanged.

    Pieces are of the dtype of the statistics, and the result becomes that of `unit`. Statistics are
    tensors of (values, dims of the tensor, reduced ones kept).
    """

    start: Callable[[torch.Tensor, Box], torch.Tensor]  # a piece and its box -> its statistics
    merge: Callable[[torch.Tensor], torch.Tensor]  # one per slot of a new first dim -> one
    identity: tuple[float, ...]  # the values that change nothing, one per value
    end: Callable[..., torch.Tensor]  # a piece, the statistics, its box, what is beside it
    # The function on ones, perhaps with ones beside it, which tells its dtype.
    unit: Callable[..., torch.Tensor]
    dtype: Callable[[torch.dtype], torch.dtype] = wide_dtype  # of the statistics, from the tensor's
    # The statistics of a cell -> more results, reduced dims kept, without gradients.
    more: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
    num_more: int = 0

    def result_dtype(self, piece: torch.Tensor, ndim: int) -> torch.dtype:
        """That of the result, now: autocast may change it."""
        return self.unit(piece.detach().new_ones((1,) * ndim)).dtype


def decide_with_statistics(
    call: Call, terms: Terms, layout: Layout, finish: Finish, besides: Sequence[Beside] = ()
) -> Decision:
    """Every rank's partial statistics, exchanged, and the result where the pieces are."""
    rank, boxes = call.rank, layout.boxes_of(call.rank)
    one = Box.whole((1,) * layout.ndim)
    made = slots_of(terms, _as_fold(finish), layout, rank)
    slots = needed_slots(terms, layout, made.layouts[0].shape, rank)
    results = terms.layout("sum").bar

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        # Once for both ends, so that the parts of a gradient are added before they are rounded.
        wides = [piece.to(finish.dtype(piece.dtype)) for piece in pieces[0]]
        partials = [
            finish.start(piece, box) if box.volume else started(piece)
            for piece, box in zip(wides, boxes, strict=True)
        ]
        return [*made.kernel([partials], invoke), wides]

    def started(wide: torch.Tensor) -> torch.Tensor:
        """What stands for the partial of a piece without elements."""
        return finish.start(unit_of([wide], one.shape), one).reshape(-1)[:0]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        wide = ties[0].to(finish.dtype(ties[0].dtype))
        return [started(wide), wide]

    def end(pieces: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        received, wides, given, *others = pieces
        parts = [one.parts(held) for one, held in zip(besides, others, strict=True)]
        rows = zip(wides, *parts, strict=True)
        known = _Known(finish.merge, received)
        dtype = finish.result_dtype(given[0], layout.ndim)
        found = []
        for (piece, *aside), box, places in zip(rows, boxes, slots.places, strict=True):
            if box.volume:
                statistics = known.of_box(places, kept_box(box, terms.reduced))
                found.append(finish.end(piece, statistics, box, *aside).to(dtype))
            else:
                found.append(ended(received, piece, aside).to(dtype).reshape(box.shape))
        return [found, *_more(finish, terms, results.boxes_of(rank), slots, known)]

    def ended(
        received: Sequence[torch.Tensor], wide: torch.Tensor, aside: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What stands for the result of a piece without elements."""
        slot = unit_of(received, (1, len(finish.identity), *one.shape))
        units = [unit_of([part], one.shape) for part in aside]
        found = finish.end(unit_of([wide], one.shape), finish.merge(slot), one, *units)
        return found.reshape(-1)[:0]

    def phantom_of_end(*ties: torch.Tensor) -> list[torch.Tensor]:
        received, wide, given, *aside = ties
        dtype = finish.result_dtype(given, layout.ndim)
        more = [received.detach().reshape(-1)[:0]] * finish.num_more
        return [ended([received], wide, aside).to(dtype), *more]

    return Decision(
        (Need(layout), *[one.need for one in besides]),
        (*made.layouts, layout),
        kernel,
        then=Then(
            (slots.need, Need(layout)),
            (layout, *[results] * finish.num_more),
            end,
            phantom_of_end,
            tuple(range(1 + len(besides))),
        ),
        phantom=phantom,
    )


def decide_pieces(
    call: Call,
    layout: Layout,
    besides: Sequence[Beside],
    unit: Callable[..., torch.Tensor],
    local: Callable[..., torch.Tensor] | None = None,
) -> Decision:
    """Torch's function on every piece and what is beside it, with no statistics from elsewhere.

    `unit` as that of a `Finish`. `local`, if the function of the call itself will not do, is what
    it is on a piece: given the box, the piece and what is beside it.
    """
    boxes = layout.boxes_of(call.rank)

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        parts = [one.narrow_parts(held) for one, held in zip(besides, pieces[1:], strict=True)]
        found = []
        for box, *given in zip(boxes, pieces[0], *parts, strict=True):
            if box.volume:
                found.append(invoke(*given) if local is None else local(box, *given))
            else:
                found.append(phantom(*given)[0].reshape(box.shape))
        return [found]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        shapes = [(1,) * layout.ndim, *[(1,) * len(one.dims) for one in besides]]
        units = [unit_of([tie], shape) for tie, shape in zip(ties, shapes, strict=True)]
        return [unit(*units).reshape(-1)[:0]]

    return Decision(
        (Need(layout), *[one.need for one in besides]),
        (layout,),
        kernel,
        phantom=phantom,
        is_one_call=local is None
        and len(boxes) == 1
        and bool(boxes[0].volume)
        and all(spot.part is None for one in besides for spot in one.spots),
    )


def _as_fold(finish: Finish) -> Fold:
    """How partials that are made already become slots."""
    return Fold(
        lambda partial, _: (partial,),
        lambda partials: (finish.merge(partials[0]),),
        lambda partial: partial,
        lambda _: (finish.identity,),
    )


class _Known:
    """Statistics of cells, merged when they are asked for."""

    def __init__(
        self, merge: Callable[[torch.Tensor], torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        self._merge, self._received = merge, received
        self._merged: dict[int, torch.Tensor] = {}

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Of a cell without elements."""
        return self._received[0].detach().new_empty(shape)

    def of_cell(self, number: int) -> torch.Tensor:
        if number not in self._merged:
            self._merged[number] = self._merge(self._received[number])
        return self._merged[number]

    def of_box(self, places: Sequence[tuple[Box, int, int]], part: Box) -> torch.Tensor:
        """The statistics of a part of the result, from those of its cells."""
        if len(places) == 1:
            return self.of_cell(places[0][1])
        first = self.of_cell(places[0][1])
        found = first.detach().new_empty((len(first), *part.shape))
        for cell, number, _ in places:
            found[(slice(None), *cell.relative_to(part).slices())] = self.of_cell(number)
        return found


def _more(
    finish: Finish, terms: Terms, boxes: Sequence[Box], slots: NeededSlots, known: _Known
) -> list[list[torch.Tensor]]:
    """The further results, one per local cell."""
    if finish.more is None:
        return []
    of_box = {terms.reduced.result_box(cell): cell for cell in terms.holders}
    numbers = {cell: number for places in slots.places for cell, number, _ in places}
    rows = []
    for box in boxes:
        if box.volume:
            statistics = known.of_cell(numbers[of_box[box]]).detach()
            rows.append([one.reshape(box.shape) for one in finish.more(statistics)])
        else:
            rows.append([known.empty(box.shape)] * finish.num_more)
    return [[row[k] for row in rows] for k in range(finish.num_more)]
