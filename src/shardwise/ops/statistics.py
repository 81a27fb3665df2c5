"""Functions that need statistics of dims and give a tensor of the operand's own layout.

Softmax and normalisations: every rank makes partial statistics of its pieces, these are exchanged
as slots ([Note: cells and terms] in `terms.py`), and every rank finishes its own pieces with
them. The gradients of the statistics come back in one exchange too: each piece is one use of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.geometry import Box
from shardwise.ops.phantoms import as_tie, unit_of
from shardwise.ops.rule import Decision, Need, Then
from shardwise.ops.slots import Fold, needed_slots, slots_of, wide_dtype
from shardwise.ops.terms import kept_box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardwise.geometry import Layout
    from shardwise.ops.beside import Beside
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces
    from shardwise.ops.slots import Place
    from shardwise.ops.terms import Terms

__all__ = ["Finish", "decide_with_statistics"]


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
    # As `merge`, of the slots of one rank, if their gradient is another while others may follow.
    merge_own: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wide(self, piece: torch.Tensor) -> torch.Tensor:
        """A piece in the dtype of the statistics."""
        return piece.to(self.dtype(piece.dtype))

    def result_dtype(self, piece: torch.Tensor, ndim: int) -> torch.dtype:
        """That of the result, now: autocast may change it."""
        return self.unit(piece.detach().new_ones((1,) * ndim)).dtype

    def started(self, wide: torch.Tensor, ndim: int) -> torch.Tensor:
        """What stands for the statistics of a piece without elements."""
        one = Box.whole((1,) * ndim)
        return as_tie(self.start(unit_of([wide], one.shape), one))

    def ended(
        self,
        received: Sequence[torch.Tensor],
        wide: torch.Tensor,
        aside: Sequence[torch.Tensor],
        ndim: int,
    ) -> torch.Tensor:
        """What stands for the result of a piece without elements."""
        one = Box.whole((1,) * ndim)
        slot = unit_of(received, (1, len(self.identity), *one.shape))
        units = [unit_of([part], one.shape) for part in aside]
        return as_tie(self.end(unit_of([wide], one.shape), self.merge(slot), one, *units))


def decide_with_statistics(
    call: Call, terms: Terms, layout: Layout, finish: Finish, besides: Sequence[Beside] = ()
) -> Decision:
    """Every rank's partial statistics, exchanged, and the result where the pieces are."""
    boxes, ndim = layout.boxes_of(call.rank), layout.ndim
    slots = slots_of(terms, _as_fold(finish), layout, call.rank)
    needed = needed_slots(terms, layout, slots.layouts[0].shape, call.rank)
    more = terms.layout("sum").bar  # of each further result
    ends = _Ends(finish, terms, boxes, needed.places, tuple(besides), more.boxes_of(call.rank))

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        # Once for both ends, so that the parts of a gradient are added before they are rounded.
        wides = [finish.wide(piece) for piece in pieces[0]]
        partials = [
            finish.start(piece, box) if box.volume else finish.started(piece, ndim)
            for piece, box in zip(wides, boxes, strict=True)
        ]
        return [*slots.kernel([partials], invoke), wides]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        wide = finish.wide(ties[0])
        return [finish.started(wide, ndim), wide]

    def phantom_of_end(*ties: torch.Tensor) -> list[torch.Tensor]:
        received, wide, given, *aside = ties
        found = finish.ended([received], wide, aside, ndim).to(finish.result_dtype(given, ndim))
        return [found, *[as_tie(received.detach())] * finish.num_more]

    return Decision(
        (Need(layout), *[one.need for one in besides]),
        (*slots.layouts, layout),
        kernel,
        then=Then(
            (needed.need, Need(layout)),
            (layout, *[more] * finish.num_more),
            ends.kernel,
            phantom_of_end,
            tuple(range(1 + len(besides))),
        ),
        phantom=phantom,
    )


def _as_fold(finish: Finish) -> Fold:
    """How partials that are made already become slots."""
    return Fold(
        lambda partial, _: (partial,),
        lambda partials: ((finish.merge_own or finish.merge)(partials[0]),),
        lambda partial: partial,
        lambda _: (finish.identity,),
    )


class _Ends(NamedTuple):
    """What a rank computes after the exchange."""

    finish: Finish
    terms: Terms
    boxes: Sequence[Box]  # of the local pieces
    places: Sequence[Sequence[Place]]  # where each of them finds its statistics
    besides: tuple[Beside, ...]
    more_boxes: Sequence[Box]  # of the local pieces of further results

    def kernel(self, pieces: OperandPieces) -> OutputPieces:
        received, wides, given, *others = pieces
        finish, ndim = self.finish, len(self.terms.reduced.shape)
        parts = [one.parts(held) for one, held in zip(self.besides, others, strict=True)]
        rows = zip(wides, *parts, strict=True)
        known = _Known(finish.merge, received)
        dtype = finish.result_dtype(given[0], ndim)
        found = []
        for (piece, *aside), box, places in zip(rows, self.boxes, self.places, strict=True):
            if box.volume:
                statistics = known.of_box(places, kept_box(box, self.terms.reduced))
                found.append(finish.end(piece, statistics, box, *aside).to(dtype))
            else:
                ended = finish.ended(received, piece, aside, ndim)
                found.append(ended.to(dtype).reshape(box.shape))
        return [found, *self._more(known)]

    def _more(self, known: _Known) -> list[list[torch.Tensor]]:
        """The further results, one per local cell."""
        more = self.finish.more
        if more is None:
            return []
        of_box = {self.terms.reduced.result_box(cell): cell for cell in self.terms.holders}
        numbers = {place.cell: place.piece for places in self.places for place in places}
        rows = []
        for box in self.more_boxes:
            if box.volume:
                statistics = known.of_cell(numbers[of_box[box]]).detach()
                rows.append([one.reshape(box.shape) for one in more(statistics)])
            else:
                rows.append([known.empty(box.shape)] * self.finish.num_more)
        return [[row[k] for row in rows] for k in range(self.finish.num_more)]


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

    def of_box(self, places: Sequence[Place], part: Box) -> torch.Tensor:
        """The statistics of a part of the result, from those of its cells."""
        first = self.of_cell(places[0].piece)
        if len(places) == 1:
            return first
        found = first.detach().new_empty((len(first), *part.shape))
        for place in places:
            index = (slice(None), *place.cell.relative_to(part).slices())
            found[index] = self.of_cell(place.piece)
        return found
