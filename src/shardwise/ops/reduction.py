"""Functions that reduce dims: every rank reduces what it holds, and little travels.

[Note: cells and terms] The result is cut where the tensor is cut along the dims that are kept;
its boxes are *cells*. Where boxes of the tensor lie askew, so that what they project to overlaps in
part, the cells are cut along all of their edges. Each box of the tensor is a share of every cell
that it projects to. The shares of a cell that a rank holds are put together at once if ranks
hold equal or disjoint sets of them; else each stays its own. What comes of it are the *terms* of
the cell: ranks with the same shares are replicas of one term.

Terms are combined in one of two ways. `decide_terms` leaves them pending, or has them reduced by
an operation that layouts know. `decide_fold` is for all else: terms become slots along a new dim
of a small tensor, which is brought together; each rank with shares of a cell then has all slots.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from shardwise.geometry import Box, Layout
from shardwise.ops.outlines import listed_results, outlines
from shardwise.ops.rule import Decision, Need, Operand, Then
from shardwise.ops.work import number_work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.geometry import ReduceOp
    from shardwise.ops.rule import Call

__all__ = [
    "Fold",
    "Prepared",
    "Reduced",
    "Share",
    "Slots",
    "Terms",
    "decide_fold",
    "decide_slots",
    "decide_terms",
    "decide_whole",
    "dtype_now",
    "everywhere",
    "kept_box",
    "phantom_of_one",
    "reduced_of",
    "slots_of",
    "terms_of",
    "tie_of",
    "unit_of",
]

Tensors = tuple["torch.Tensor", ...]
Phantom: TypeAlias = "Callable[..., list[torch.Tensor]]"
_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True, slots=True)
class Reduced:
    """Which dims of a tensor a call reduces, and what is left of them."""

    shape: tuple[int, ...]  # of the tensor
    dims: tuple[int, ...]  # ascending
    keepdim: bool = False
    width: int = 1  # what is left of a reduced dim, if it is kept
    group: tuple[int, int] | None = None  # a dim that is kept, of so many neighbours one

    @property
    def is_full(self) -> bool:
        return len(self.dims) == len(self.shape) and self.width == 1

    @property
    def count(self) -> int:
        """How many elements make one of the result."""
        count = math.prod(self.shape[dim] for dim in self.dims)
        return count if self.group is None else count * self.group[1]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the result, if reduced dims are kept."""
        kept = [self.width if d in self.dims else n for d, n in enumerate(self.shape)]
        if self.group is not None:
            kept[self.group[0]] //= self.group[1]
        return tuple(kept)

    def squeezed(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """What is one per dim of the tensor, for the dims of the result."""
        kept = (n for d, n in enumerate(sizes) if self.keepdim or d not in self.dims)
        return tuple(kept)

    def result_box(self, cell: Box) -> Box:
        """A cell, in the result."""
        return Box(self.squeezed(cell.start), self.squeezed(cell.stop))

    def result_shape(self) -> tuple[int, ...]:
        return self.squeezed(self.kept_shape)


class Share(NamedTuple):
    """What a local piece has for a cell: the part of what the piece is reduced to."""

    piece: int
    part: tuple[slice, ...] | None = None  # per dim of the tensor; None: all of it


@dataclass(frozen=True, slots=True)
class Terms:
    """Who has what of the result of a reduction. [Note: cells and terms]"""

    reduced: Reduced
    holders: dict[Box, dict[int, tuple[int, ...]]]  # cell -> rank -> its terms
    shares: dict[tuple[Box, int], tuple[Share, ...]]  # of this rank: (cell, term) -> shares
    is_whole: bool  # whether no reduced dim is cut: every cell has one share

    @property
    def num_slots(self) -> int:
        """The largest number of terms of a cell."""
        return max((self.count(cell) for cell in self.holders), default=1)

    def count(self, cell: Box) -> int:
        """The number of terms of a cell."""
        return 1 + max(max(terms) for terms in self.holders[cell].values())

    def layout(self, op: ReduceOp | None) -> Layout:
        """The result with its terms pending; None: where there is one term per cell."""
        rows = [
            (self.reduced.result_box(cell), rank, term)
            for cell, ranks in self.holders.items()
            for rank, terms in ranks.items()
            for term in terms
        ]
        boxes, owners = [box for box, _, _ in rows], [rank for _, rank, _ in rows]
        shape = self.reduced.result_shape()
        if op is None:
            return Layout(shape, boxes, owners)
        return Layout(shape, boxes, owners, terms=[term for _, _, term in rows], pending=op)


def reduced_of(
    operand: Operand, dim: Any, keepdim: bool = False, *, width: int = 1
) -> Reduced | None:
    """The dims that torch means by `dim`: one, several, none or None for all; None: unclear."""
    ndim = len(operand.shape)
    listed = dim if isinstance(dim, list | tuple) else (dim,)
    if dim is None or not listed or (ndim == 0 and width == 1):
        return Reduced(operand.shape, tuple(range(ndim)), keepdim, width)
    if not all(type(one) is int for one in listed):
        return None
    return Reduced(operand.shape, tuple(sorted({one % ndim for one in listed})), keepdim, width)


def kept_box(box: Box, reduced: Reduced) -> Box:
    """The part of the result that a box has a share of, reduced dims kept."""
    dims, width = reduced.dims, reduced.width
    start = [0 if d in dims else low for d, low in enumerate(box.start)]
    stop = [width if d in dims else high for d, high in enumerate(box.stop)]
    if reduced.group is not None:
        dim, size = reduced.group
        start[dim], stop[dim] = start[dim] // size, -(-stop[dim] // size)
    return Box(tuple(start), tuple(stop))


def terms_of(layout: Layout, reduced: Reduced, rank: int, *, along: int | None = None) -> Terms:
    """Who has which terms, of a tensor with elements.

    `along`: shares are not put together, and the terms of a cell are in the order of this dim.
    """
    empty = {(box, owner) for box, owner, _ in layout if not box.volume}
    full = [entry for entry in layout if entry.box.volume]
    cells = _cells({kept_box(entry.box, reduced) for entry in full}, reduced.kept_shape)
    users: dict[Box, dict[int, dict[Any, None]]] = defaultdict(lambda: defaultdict(dict))
    for box, owner, term in full:
        for cell in cells[kept_box(box, reduced)]:
            users[cell][owner][box, term] = None
    holders: dict[Box, dict[int, tuple[int, ...]]] = {}
    shares: dict[tuple[Box, int], tuple[Share, ...]] = {}
    mine = {
        entry: k
        for k, entry in enumerate(zip(layout.boxes_of(rank), layout.terms_of(rank), strict=True))
    }
    for cell, ranks in users.items():
        number = number_work(cell, ranks) if along is None else _in_order(ranks, along)
        holders[cell] = {
            owner: tuple(sorted({number[one] for one in held})) for owner, held in ranks.items()
        }
        found: dict[int, list[Share]] = defaultdict(list)
        for one in ranks.get(rank, ()):
            found[number[one]].append(_share(mine[one], kept_box(one[0], reduced), cell))
        shares |= {(cell, term): tuple(listed) for term, listed in found.items()}
    # A box without elements that is so along a dim that is kept is one of the result, too.
    for box, owner in sorted(empty):
        cell = kept_box(box, reduced)
        if not cell.volume:
            holders.setdefault(cell, {})[owner] = (0,)
    is_whole = all(len({*_all_shares(ranks)}) == 1 for ranks in users.values())
    return Terms(reduced, holders, shares, is_whole)


def _all_shares(ranks: Mapping[int, Mapping[tuple[Box, int], None]]) -> list[tuple[Box, int]]:
    return [one for held in ranks.values() for one in held]


def _in_order(
    ranks: Mapping[int, Mapping[tuple[Box, int], None]], along: int
) -> dict[tuple[Box, int], int]:
    listed = sorted({*_all_shares(ranks)}, key=lambda one: one[0].start[along])
    return {one: k for k, one in enumerate(listed)}


def _cells(parts: set[Box], shape: tuple[int, ...]) -> dict[Box, list[Box]]:
    """The cells that each part of the result consists of. [Note: cells and terms]"""
    if sum(part.volume for part in parts) == math.prod(shape):
        return {part: [part] for part in parts}
    cuts = [
        sorted({edge for part in parts for edge in (part.start[d], part.stop[d])})
        for d in range(len(shape))
    ]
    found = {}
    for part in parts:
        steps = [
            [(a, b) for a, b in pairwise(along) if low <= a and b <= high]
            for along, low, high in zip(cuts, part.start, part.stop, strict=True)
        ]
        found[part] = [
            Box(tuple(a for a, _ in step), tuple(b for _, b in step)) for step in product(*steps)
        ]
    return found


def _share(piece: int, part: Box, cell: Box) -> Share:
    return Share(piece, None if part == cell else cell.relative_to(part).slices())


def tie_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """No elements of `dtype`, following from the tensors as far as there are gradients."""
    tie = torch.empty(0, dtype=dtype, device=tensors[0].device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return tie
    for tensor in tensors:
        flat = tensor.reshape(-1)[:0]
        if flat.is_complex() and not dtype.is_complex:
            flat = flat.real
        if flat.is_floating_point() or flat.is_complex():
            tie = tie + flat.to(dtype)
    return tie


def unit_of(tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Ones of the first tensor's dtype, following from all as far as there are gradients.

    What a rank without pieces computes of it has the graph that pieces have elsewhere, so that
    gradients of gradients meet the same exchanges there.
    """
    first = tensors[0]
    ones = torch.ones(shape, dtype=first.dtype, device=first.device)
    if first.is_floating_point() or first.is_complex():
        ones = ones + tie_of(tensors, first.dtype).sum()
    return ones


def _as_tie(result: torch.Tensor) -> torch.Tensor:
    return result.reshape(-1)[:0]


# -- decisions -------------------------------------------------------------------------------------


def _replicated(shape: tuple[int, ...], ranks: Sequence[int]) -> Layout:
    return Layout(shape, [Box.whole(shape)] * len(ranks), ranks)


def everywhere(call: Call, pack: Callable[[list[Any]], Any] | None = None) -> Decision:
    """Every rank computes all of it: what tensors without elements need, which cost nothing."""
    results = outlines(call)

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        return [[result] for result in listed_results(invoke(*[held[0] for held in pieces]))]

    return Decision(
        tuple(Need(_replicated(operand.shape, call.ranks)) for operand in call.operands),
        tuple(_replicated(tuple(result.shape), call.ranks) for result in results),
        kernel,
        pack=pack,
    )


def _finish(layouts: tuple[Layout, ...], wanted: tuple[Layout, ...]) -> tuple[Layout, ...] | None:
    return None if layouts == wanted else wanted


def phantom_of_one(call: Call) -> Phantom:
    """What torch's function gives of ones, as ties: of its dtypes at the time, in its graph."""
    # Two along each dim: of one element torch's gradient of `cumprod` does not follow from it.
    shape = (2,) * len(call.operands[0].shape)

    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        results = outlines(_with_operand(call, unit_of([x], shape)))
        return [_as_tie(result) for result in results]

    return phantom


def dtype_now(call: Call, given: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that torch gives of an operand of dtype `given`: autocast may change it."""
    one = torch.ones((1,) * len(call.operands[0].shape), dtype=given, device=device)
    return outlines(_with_operand(call, one))[0].dtype


def _phantom_of_fold(fold: Fold, ndim: int) -> Phantom:
    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        unit = fold.lift(unit_of([x], (1,) * ndim), Box.whole((1,) * ndim))
        return [_as_tie(result) for result in fold.final(unit)]

    return phantom


def _phantom_of_call(call: Call) -> Phantom:
    dtypes = [result.dtype for result in outlines(call)]
    return lambda x: [tie_of([x], dtype) for dtype in dtypes]


def _with_operand(call: Call, tensor: torch.Tensor) -> Call:
    """The call on a tensor in place of its only operand."""
    operand = call.operands[0]
    args = tuple(tensor if arg is operand else arg for arg in call.args)
    kwargs = {name: tensor if arg is operand else arg for name, arg in call.kwargs.items()}
    return call._replace(args=args, kwargs=kwargs)


def decide_whole(
    call: Call,
    terms: Terms,
    need: Layout,
    pack: Callable[[list[Any]], Any] | None = None,
    phantom: Phantom | None = None,
) -> Decision:
    """No reduced dim is cut: torch's function on every piece, and nothing travels.

    But for a result of one element, which every rank has.
    """
    reduced, rank = terms.reduced, call.rank
    layout = terms.layout(None)
    cells = _local_cells(terms, layout, rank)
    ties = _phantom_of_call(call) if phantom is None else phantom

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        whole: dict[int, list[torch.Tensor]] = {}
        rows = []
        for cell in cells:
            if not cell.volume:
                shape = reduced.result_box(cell).shape
                rows.append([tie.reshape(shape) for tie in ties(pieces[0][0])])
                continue
            (share,) = terms.shares[cell, 0]
            if share.piece not in whole:
                whole[share.piece] = listed_results(invoke(pieces[0][share.piece]))
            rows.append([_cut(result, share, reduced) for result in whole[share.piece]])
        return [list(column) for column in zip(*rows, strict=True)]

    outputs = (layout,) * len(outlines(call))
    wanted = (_replicated(layout.shape, call.ranks),) * len(outputs) if reduced.is_full else outputs
    return Decision(
        (Need(need),),
        outputs,
        kernel,
        finish=_finish(outputs, wanted),
        phantom=ties,
        is_one_call=len(cells) == 1
        and bool(cells[0].volume)
        and terms.shares[cells[0], 0][0].part is None,
        pack=pack,
    )


def _local_cells(terms: Terms, layout: Layout, rank: int) -> list[Box]:
    """The cell of each local box of the result."""
    of_box = {terms.reduced.result_box(cell): cell for cell in terms.holders}
    return [of_box[box] for box in layout.boxes_of(rank)]


def _cut(result: torch.Tensor, share: Share, reduced: Reduced) -> torch.Tensor:
    if share.part is None:
        return result
    return result[cast("Any", reduced.squeezed(cast("Any", share.part)))]


def decide_terms(
    call: Call,
    reduced: Reduced,
    op: ReduceOp,
    *,
    passes_terms: bool = False,
    is_mean: bool = False,
    stays_pending: bool = False,
) -> Decision:
    """Every rank's part by torch's own function, the terms pending `op` or reduced at once.

    `passes_terms`: the function is linear, and a pending sum of the operand passes through.
    """
    operand = call.operands[0]
    if not math.prod(operand.shape):
        return everywhere(call)
    layout = _linear_layout(operand) if passes_terms else operand.layout.bar
    terms = terms_of(layout, reduced, call.rank)
    phantom = phantom_of_one(call)
    if terms.is_whole and layout.pending is None:
        return decide_whole(call, terms, layout, phantom=phantom)
    output = terms.layout(op)
    weights = _weights(layout, reduced, call.rank, is_mean=is_mean)
    cells = _local_cells(terms, output, call.rank)
    rows = list(zip(cells, output.terms_of(call.rank), strict=True))
    combine = _COMBINE[op]

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        whole: dict[int, torch.Tensor] = {}
        found = []
        for cell, term in rows:
            if not cell.volume:
                found.append(phantom(pieces[0][0])[0].reshape(reduced.result_box(cell).shape))
                continue
            total = None
            for share in terms.shares[cell, term]:
                if share.piece not in whole:
                    part = invoke(pieces[0][share.piece])
                    weight = weights[share.piece]
                    whole[share.piece] = part if weight == 1 else part * weight
                part = _cut(whole[share.piece], share, reduced)
                total = part if total is None else combine(total, part)
            assert total is not None
            found.append(total)
        return [found]

    wanted = output if stays_pending else output.bar
    if reduced.is_full:
        wanted = _replicated(output.shape, call.ranks)
    return Decision(
        (Need(layout),), (output,), kernel, finish=_finish((output,), (wanted,)), phantom=phantom
    )


def _linear_layout(operand: Operand) -> Layout:
    """The operand's own layout if its pending sum passes through, else with nothing pending."""
    return operand.layout if operand.is_linear_sum else operand.layout.bar


def _weights(layout: Layout, reduced: Reduced, rank: int, *, is_mean: bool) -> list[float]:
    """By what each local piece's part is multiplied."""
    terms: dict[Box, set[int]] = defaultdict(set)
    if layout.pending == "avg":
        for box, _, term in layout:
            terms[box].add(term)
    found = []
    for box in layout.boxes_of(rank):
        weight = 1 / len(terms[box]) if layout.pending == "avg" else 1.0
        if is_mean:
            weight *= math.prod(box.shape[dim] for dim in reduced.dims) / reduced.count
        found.append(weight)
    return found


# -- folds -----------------------------------------------------------------------------------------


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
        phantom_of_fold = _phantom_of_fold(fold, layout.ndim)
        return decide_whole(call, terms, layout, pack, phantom_of_fold)
    return decide_slots(call, terms, layout, fold, pack=pack)


class Prepared(NamedTuple):
    """What a fold is of, if not of the pieces of one operand."""

    needs: tuple[Need, ...]  # one per operand
    pieces: Callable[[Sequence[Sequence[torch.Tensor]]], list[torch.Tensor]]  # one per local box
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

    def finish(pieces: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        boxes = result.boxes_of(call.rank)
        rows = []
        for box, *partials in zip(boxes, *pieces, strict=True):
            results = fold.final(fold.merge(tuple(partials)))
            rows.append([one.reshape(box.shape) for one in results])
        return [list(column) for column in zip(*rows, strict=True)]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        kept = [reduced.width if d in reduced.dims else 1 for d in range(len(reduced.shape))]
        units = [
            unit_of([tie], (1, width, *kept)) for tie, width in zip(ties, slots.widths, strict=True)
        ]
        return [_as_tie(one) for one in fold.final(fold.merge(tuple(units)))]

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        made = pieces if prepared is None else [prepared.pieces(pieces)]
        return slots.kernel(made, invoke)

    def phantom_of_slots(*ties: torch.Tensor) -> list[torch.Tensor]:
        if prepared is None:
            return slots.phantom(*ties)
        return [_as_tie(prepared.unit(unit_of(ties, (1,) * layout.ndim)))]

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

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        lifted: dict[int, Tensors] = {}

        def partial(share: Share) -> Tensors:
            if share.piece not in lifted:
                lifted[share.piece] = fold.lift(pieces[0][share.piece], boxes[share.piece])
            index = ... if share.part is None else (slice(None), *share.part)
            return tuple(part[index] for part in lifted[share.piece])

        made: list[list[torch.Tensor]] = []
        for number, layout in enumerate(layouts):
            made.append([])
            for box in layout.boxes_of(rank):
                cell = Box(box.start[2:], box.stop[2:])
                if not box.volume:
                    made[-1].append(phantom(pieces[0][0])[number].reshape(box.shape))
                elif (shares := terms.shares.get((cell, box.start[0]))) is not None:
                    made[-1].append(_merged(fold, [partial(s) for s in shares])[number])
                else:
                    made[-1].append(_filler(box, lifted, number, fold))
        return made

    def phantom(x: torch.Tensor) -> list[torch.Tensor]:
        unit = fold.lift(unit_of([x], (1,) * need.ndim), Box.whole((1,) * need.ndim))
        return [_as_tie(part) for part in unit]

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
        return _replicated(terms.reduced.result_shape(), everybody)
    return Layout(
        terms.reduced.result_shape(),
        [terms.reduced.result_box(cell) for cell, ranks in terms.holders.items() for _ in ranks],
        [rank for ranks in terms.holders.values() for rank in ranks],
    )
