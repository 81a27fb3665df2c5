"""Products of tensors by owner intersection: whoever holds the factors of a block computes it.

[Note: blocks] Every product here has an einsum form: its dims have labels. A box of each operand
gives a block, the range that they share in the space of all labels; the boxes of an operand tile
it, so the blocks tile that space. A rank that holds all boxes of a block can compute it. What a
rank computes of one box of the output it adds up; what ranks compute of different ranges of a
contracted label are the terms of a pending sum. If every block has a rank, nothing moves.

[Note: who computes] Every rank computes what it can, if the blocks that ranks use a box for, or
that they add up, are equal or disjoint from rank to rank: then equal ones are replicas, and
different ones addends. Else every block goes to its lowest rank, which is always so.

[Note: following] If some block has no rank, the operands are brought to one of them: each of its
entries gets what it is multiplied with. The operand for which the fewest bytes move is the one that
stays. A pending operand is reduced on its way.

[Note: whole labels] Attention, convolutions and look-ups are products in this sense, whose blocks
torch cannot compute of parts of some labels: the positions of a sequence, the pixels of a picture.
An operand that is cut along one of those is brought together along it first; its holders share the
work along another dim, or all do it, whichever moves fewer bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from shardwise.geometry import (
    Box,
    Boxes,
    Entry,
    Layout,
    common_pieces,
    even_cuts,
    intersecting_pairs,
    is_tiling,
)
from shardwise.ops.rule import Call, Decision, Need
from shardwise.ops.work import Use, bytes_moved, need_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from shardwise.geometry.box import Ints

__all__ = ["Factor", "Form", "Labels", "Run", "Scale", "decide_product"]

# The label of each dim; None for a dim of size 1 that is broadcast.
Labels = tuple[int | None, ...]
Key = TypeVar("Key", bound="Hashable")


# What a block gives: (the call's function, a tensor per operand, the block's range of each label).
Run: TypeAlias = "Callable[[Callable[..., Any], Sequence[torch.Tensor], Box], Any]"


class Scale(NamedTuple):
    """How the indices of a dim stand to its label: so many of them are so many units of it."""

    indices: int
    units: int

    def units_of(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """The units of a range of indices; of numbers or arrays of them."""
        return start // self.indices * self.units, -(-stop // self.indices) * self.units

    def indices_of(self, start: int, stop: int) -> tuple[int, int]:
        """The indices that a range of units has a part of."""
        return start // self.units * self.indices, -(-stop // self.units) * self.indices


_ALIKE = Scale(1, 1)


class Factor(NamedTuple):
    """An operand of a product: where it stands among the operands of the call, and its labels."""

    place: int
    labels: Labels
    scales: tuple[Scale, ...] = ()  # of each dim; nothing: all are their labels

    def scale(self, dim: int) -> Scale:
        """Heads of keys that serve several heads of queries are several units of their label."""
        return self.scales[dim] if self.scales else _ALIKE


@dataclass(frozen=True, slots=True)
class Form:
    """A product as einsum sees it. The addend is added to the product, broadcast to its shape."""

    sizes: tuple[int, ...]  # of each label
    factors: tuple[Factor, ...]
    output: tuple[int, ...]  # the label of each dim; labels that are not in it are summed over
    addend: Factor | None = None
    whole: frozenset[int] = frozenset()  # labels that nothing may cut. [Note: whole labels]
    run: Run | None = None  # in place of the call's own function
    # Blocks of which the call's own function gives what `run` would.
    is_own: Callable[[Box], bool] = lambda space: False
    # Labels of further outputs: the same as those of the first, but for whole ones. Only if nothing
    # that may be cut is summed over.
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return self.shapes[0]

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The labels of each output."""
        return (self.output, *self.others)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each output."""
        return tuple(tuple(self.sizes[label] for label in labels) for labels in self.outputs)

    @property
    def summed(self) -> tuple[int, ...]:
        """The labels that are summed over."""
        return tuple(k for k in range(len(self.sizes)) if k not in self.output)

    def results(
        self, invoke: Callable[..., Any], tensors: Sequence[torch.Tensor], space: Box
    ) -> Sequence[torch.Tensor]:
        """What a block gives, one per output."""
        is_own = self.run is None or self.is_own(space)
        found = invoke(*tensors) if is_own else self.run(invoke, tensors, space)  # type: ignore[misc]
        return found if self.others else (found,)


def decide_product(call: Call, form: Form) -> Decision:
    """The way to compute a product for which the fewest bytes move."""
    if 0 in form.sizes:
        return _decide_nothing(call, form)
    held = [call.operands[factor.place].layout for factor in form.factors]
    stay = [layout.bar for layout in held]
    choices = [_usable(form, factor, one) for factor, one in zip(form.factors, stay, strict=True)]
    are_usable = all(one in usable for one, usable in zip(stay, choices, strict=True))
    blocks = _blocks(form, stay) if are_usable else None
    ways = [] if blocks is None else [_decision(call, form, stay, blocks)]
    if blocks is None or stay != held:
        for anchor, usable in enumerate(choices):
            for layout in usable:
                layouts = _following(form, [*stay[:anchor], layout, *stay[anchor + 1 :]], anchor)
                blocks = _blocks(form, layouts)
                assert blocks is not None
                ways.append(_decision(call, form, layouts, blocks))
    return min(ways, key=lambda way: way[1])[0]


# -- whole labels ----------------------------------------------------------------------------------


def _usable(form: Form, factor: Factor, layout: Layout) -> list[Layout]:
    """The layout, or those to choose from if it cuts what has to be whole. [Note: whole labels]"""
    full = [box for box in layout.boxes if not box.is_empty]
    dims = [dim for dim, label in enumerate(factor.labels) if label in form.whole]
    dims += [dim for dim in range(len(layout.shape)) if _splits_units(full, dim, factor.scale(dim))]
    if all(_is_whole(box, layout.shape, dims) for box in full):
        return [layout]
    return [_whole_along(factor, layout, dims, is_shared=is_shared) for is_shared in (True, False)]


def _splits_units(boxes: Iterable[Box], dim: int, scale: Scale) -> bool:
    return any(box.start[dim] % scale.indices or box.stop[dim] % scale.indices for box in boxes)


def _is_whole(box: Box, shape: tuple[int, ...], dims: Sequence[int]) -> bool:
    return all(box.start[dim] == 0 and box.stop[dim] == shape[dim] for dim in dims)


def _whole_along(factor: Factor, layout: Layout, dims: Sequence[int], *, is_shared: bool) -> Layout:
    """The layout with these dims whole, each part with those ranks that hold some of it.

    `is_shared`: they share it along another dim, if it has one that is long enough.
    """
    widened = {
        box: Box(
            tuple(0 if dim in dims else low for dim, low in enumerate(box.start)),
            tuple(layout.shape[d] if d in dims else high for d, high in enumerate(box.stop)),
        )
        for box in layout.boxes
        if not box.is_empty
    }
    pieces = common_pieces(list(widened.values()))
    holders: dict[Box, set[int]] = defaultdict(set)
    for box, rank, _ in layout:
        for piece in pieces.get(widened.get(box, box), ()):
            holders[piece].add(rank)
    entries = []
    for piece, ranks in holders.items():
        shared = _shared(factor, piece, sorted(ranks), dims) if is_shared else None
        entries += shared or [(piece, rank) for rank in sorted(ranks)]
    return Layout(layout.shape, [box for box, _ in entries], [rank for _, rank in entries])


def _shared(
    factor: Factor, piece: Box, ranks: Sequence[int], dims: Sequence[int]
) -> list[tuple[Box, int]] | None:
    """The piece cut along the first dim that has enough for all, but for `dims`."""
    for dim, size in enumerate(piece.shape):
        step = factor.scale(dim).indices  # what belongs together stays so: the channels of a group
        if dim not in dims and size // step >= len(ranks):
            cuts = (even_cuts(size // step, len(ranks)) * step + piece.start[dim]).tolist()
            return [
                (piece.with_range(dim, low, high), rank)
                for rank, (low, high) in zip(ranks, itertools.pairwise(cuts), strict=True)
                if low < high
            ]
    return None


# -- blocks ----------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """A part of the space of labels, and the boxes that it is computed from. [Note: blocks]"""

    box: Box  # a range of each label
    sources: tuple[Box, ...]  # of each factor
    ranks: frozenset[int]  # those that hold all of them


class _Distinct(NamedTuple):
    """The boxes of a layout, each once."""

    boxes: Boxes
    owners: tuple[frozenset[int], ...]


def _distinct(layout: Layout) -> _Distinct:
    first = layout.box_rows
    owners = layout.owners.tolist()
    return _Distinct(
        layout.boxes[first[:-1]],
        tuple(frozenset(owners[a:b]) for a, b in itertools.pairwise(first.tolist())),
    )


def _ranges(boxes: Boxes, factor: Factor, sizes: tuple[int, ...]) -> Boxes:
    """The boxes in the space of labels: whole where they have no dim.

    Of a label that stands twice, as in `ii`, the part that all its dims share.
    """
    starts = np.zeros((len(boxes), len(sizes)), np.int64)
    stops = np.tile(np.array(sizes, np.int64), (len(boxes), 1))
    for dim, label in enumerate(factor.labels):
        if label is not None:
            low, high = factor.scale(dim).units_of(boxes.starts[:, dim], boxes.stops[:, dim])
            starts[:, label] = np.maximum(starts[:, label], low)
            stops[:, label] = np.minimum(stops[:, label], high)
    return Boxes(starts, np.maximum(starts, stops))


def _blocks(form: Form, layouts: Sequence[Layout]) -> list[_Block] | None:
    """All blocks, in order of the output and then of the labels that are summed over.

    None if one of them has no rank that can compute it.
    """
    found = list(map(_distinct, layouts))
    space, picks = _overlaps(form, found)
    columns = [space.starts[:, label] for label in (*form.output, *form.summed)]
    order = np.lexsort(columns[::-1]) if columns else np.arange(len(space))
    blocks = []
    for row, pick in zip(order.tolist(), picks[order].tolist(), strict=True):
        sources = list(zip(found, pick, strict=True))
        ranks = frozenset.intersection(*[one.owners[k] for one, k in sources])
        if not ranks:
            return None
        blocks.append(_Block(space[row], tuple(one.boxes[k] for one, k in sources), ranks))
    # Many a kernel with whole labels refuses tensors without elements.
    return blocks if form.whole else blocks + _empty_blocks(form, layouts)


def _overlaps(form: Form, found: Sequence[_Distinct]) -> tuple[Boxes, Ints]:
    """All parts of the space of labels, and of which box of each factor they are, (n, factors)."""
    space = Boxes.of([Box.whole(form.sizes)], len(form.sizes))
    picks: Ints = np.zeros((1, 0), np.int64)
    for factor, one in zip(form.factors, found, strict=True):
        full = np.flatnonzero(one.boxes.is_full)
        ranges = _ranges(one.boxes[full], factor, form.sizes)
        i, j = intersecting_pairs(space, ranges)
        picks = np.column_stack([picks[i], full[j]])
        space = Boxes(
            np.maximum(space.starts[i], ranges.starts[j]),
            np.minimum(space.stops[i], ranges.stops[j]),
        )
    return space, picks


def _empty_blocks(form: Form, layouts: Sequence[Layout]) -> list[_Block]:
    """Blocks of empty boxes: a rank with an empty piece of an operand has one of the output.

    Only along labels of the output; an empty range to sum over adds nothing.
    """
    found: dict[tuple[Box, ...], set[int]] = defaultdict(set)
    for rank in {rank for layout in layouts for rank in _ranks_with_empty_boxes(layout)}:
        for sources in itertools.product(*[layout.boxes_of(rank) for layout in layouts]):
            if any(box.is_empty for box in sources) and not _has_empty_broadcast(form, sources):
                found[sources].add(rank)
    blocks = []
    for sources, ranks in sorted(found.items()):
        start, stop = [0] * len(form.sizes), list(form.sizes)
        for factor, box in zip(form.factors, sources, strict=True):
            for label, low, high in zip(factor.labels, box.start, box.stop, strict=True):
                if label is not None:
                    start[label], stop[label] = max(start[label], low), min(stop[label], high)
        is_box = all(low <= high for low, high in zip(start, stop, strict=True))
        has_terms = all(start[label] < stop[label] for label in form.summed)
        if is_box and has_terms and any(start[k] == stop[k] for k in form.output):
            blocks.append(_Block(Box(tuple(start), tuple(stop)), sources, frozenset(ranks)))
    return blocks


def _has_empty_broadcast(form: Form, sources: Sequence[Box]) -> bool:
    """Whether a box has nothing along a dim that is broadcast, of which torch knows no product."""
    return any(
        label is None and not size
        for factor, box in zip(form.factors, sources, strict=True)
        for label, size in zip(factor.labels, box.shape, strict=True)
    )


def _ranks_with_empty_boxes(layout: Layout) -> set[int]:
    return set(layout.owners[~layout.boxes.is_full].tolist())


def _following(form: Form, layouts: Sequence[Layout], anchor: int) -> list[Layout]:
    """The layouts in which every entry of one factor has what it is multiplied with."""
    boxes, owners = _distinct(layouts[anchor])
    full = np.flatnonzero(boxes.is_full)
    spaces = list(_ranges(boxes[full], form.factors[anchor], form.sizes))
    users = [owners[k] for k in full.tolist()]
    found = list(layouts)
    for k, (factor, layout) in enumerate(zip(form.factors, layouts, strict=True)):
        if k != anchor:
            parts = [
                (_needed_of(factor, layout.shape, space), ranks)
                for space, ranks in zip(spaces, users, strict=True)
                if not space.is_empty
            ]
            found[k] = _covering(layout.shape, parts)
    return found


def _needed_of(factor: Factor, shape: tuple[int, ...], space: Box) -> Box:
    """What of a factor is needed for a part of the space of labels.

    Of a label that stands twice only the first dim is cut, since squares along a diagonal would
    leave out the rest of the tensor.
    """
    start, stop = [0] * len(shape), list(shape)
    for dim, label in enumerate(factor.labels):
        if label is not None and label not in factor.labels[:dim]:
            start[dim], stop[dim] = factor.scale(dim).indices_of(
                space.start[label], space.stop[label]
            )
    return Box(tuple(start), tuple(stop))


def _covering(shape: tuple[int, ...], parts: Sequence[tuple[Box, frozenset[int]]]) -> Layout:
    """The layout in which ranks have these parts, cut where they overlap in part."""
    pieces = common_pieces([box for box, _ in parts])
    users: dict[Box, set[int]] = defaultdict(set)
    for box, ranks in parts:
        for piece in pieces[box]:
            users[piece] |= ranks
    entries = [(box, rank) for box, ranks in users.items() for rank in sorted(ranks)]
    return Layout(shape, [box for box, _ in entries], [rank for _, rank in entries])


# -- who computes what -----------------------------------------------------------------------------


class _Result(NamedTuple):
    """The output: its layout, and the blocks that each entry is the sum of."""

    layout: Layout
    blocks: dict[Entry, tuple[int, ...]]

    def entries_of(self, rank: int) -> list[Entry]:
        """In the order of the local pieces."""
        found = zip(self.layout.boxes_of(rank), self.layout.terms_of(rank), strict=True)
        return [Entry(box, rank, term) for box, term in found]


def _result(form: Form, blocks: Sequence[_Block]) -> _Result:
    """What comes out of the blocks that ranks compute. [Note: who computes]"""
    pieces = _output_pieces(form, blocks)
    every = [block.ranks for block in blocks]
    sums = _blocks_by(pieces, every)
    uses = _blocks_by([tuple(enumerate(block.sources)) for block in blocks], every)
    if not all(_are_apart(by_rank) for by_rank in (*uses.values(), *sums.values())):
        sums = _blocks_by(pieces, [frozenset([min(ranks)]) for ranks in every])
    found: dict[Entry, tuple[int, ...]] = {}
    for box, by_rank in sums.items():
        if box.is_empty:  # nothing to add up
            found |= {Entry(box, rank): tuple(one[:1]) for rank, one in by_rank.items()}
        else:
            terms = {one: k for k, one in enumerate(sorted(set(map(tuple, by_rank.values()))))}
            found |= {
                Entry(box, rank, terms[tuple(one)]): tuple(one) for rank, one in by_rank.items()
            }
    return _Result(Layout.of(form.shape, found, pending="sum"), found)


def _blocks_by(
    keys: Sequence[tuple[Key, ...]], who: Sequence[frozenset[int]]
) -> dict[Key, dict[int, list[int]]]:
    """The numbers of the blocks that have a key, by key and by the ranks that compute them."""
    found: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, (listed, ranks) in enumerate(zip(keys, who, strict=True)):
        for key, rank in itertools.product(listed, sorted(ranks)):
            found[key][rank].append(number)
    return found


def _are_apart(by_rank: Mapping[int, Sequence[int]]) -> bool:
    """Whether what two ranks have is equal or disjoint."""
    distinct = set(map(tuple, by_rank.values()))
    return sum(map(len, distinct)) == len(set(itertools.chain.from_iterable(distinct)))


def _output_pieces(form: Form, blocks: Sequence[_Block]) -> list[tuple[Box, ...]]:
    """The boxes of the output that each block is a part of."""
    projected = [_projected(block.box, form.output) for block in blocks]
    pieces = common_pieces([box for box in projected if not box.is_empty])
    return [pieces.get(box, (box,)) for box in projected]


def _projected(space: Box, labels: Sequence[int]) -> Box:
    return Box(
        tuple(space.start[label] for label in labels), tuple(space.stop[label] for label in labels)
    )


# -- the decision ----------------------------------------------------------------------------------


class _Spot(NamedTuple):
    """Where a rank finds its part of an operand: which of its pieces, and what part of it.

    `zeros`: the shape of an addend that is added elsewhere, which has zeros in its place;
    `is_muted`: that it is here, too, and has its gradient. [Note: muted addends]
    """

    piece: int
    part: tuple[slice, ...] | None = None
    zeros: tuple[int, ...] | None = None
    is_muted: bool = False

    def of(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        found = pieces[self.piece]
        if self.zeros is not None:
            return _zero(found).expand(self.zeros)
        found = found if self.part is None else found[self.part]
        return _Muted.apply(found) if self.is_muted else found  # type: ignore[no-untyped-call]

    @property
    def is_whole(self) -> bool:
        return self.part is None and self.zeros is None and not self.is_muted


class _Muted(torch.autograd.Function):
    """Zeros in place of a tensor, which gets their gradient. [Note: muted addends]"""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


Spots = dict[int, _Spot]  # by the place of the operand


def _decision(
    call: Call, form: Form, layouts: Sequence[Layout], blocks: Sequence[_Block]
) -> tuple[Decision, int]:
    """The decision for factors in these layouts, and how many bytes move for it."""
    result = _result(form, blocks)
    entries = result.entries_of(call.rank)
    rows: list[list[Spots]] = [[{} for _ in result.blocks[entry]] for entry in entries]
    needs: dict[int, Need] = {}
    for number, (factor, layout) in enumerate(zip(form.factors, layouts, strict=True)):
        uses = _uses(layout, number, blocks, result)
        needs[factor.place], pieces = need_of(layout.shape, uses, call.rank)
        for row, entry in zip(rows, entries, strict=True):
            for spots, k in zip(row, result.blocks[entry], strict=True):
                source = blocks[k].sources[number]
                part = _part_of(source, factor, _inside(blocks[k].box, form, entry.box))
                spots[factor.place] = _Spot(pieces[source, k], part)
    if form.addend is not None:
        place = form.addend.place
        needs[place], added = _addend_need(call, form, form.addend, result)
        for row, (first, rest) in zip(rows, added, strict=True):
            for k, spots in enumerate(row):
                spots[place] = rest if k else first
    listed = tuple(needs[k] for k in range(len(call.operands)))
    cost = sum(map(bytes_moved, call.operands, listed))
    spaces = [
        [_inside(blocks[k].box, form, entry.box) for k in result.blocks[entry]] for entry in entries
    ]
    return _made(call, form, result, listed, rows, spaces), cost


def _made(
    call: Call,
    form: Form,
    result: _Result,
    needs: tuple[Need, ...],
    rows: Sequence[Sequence[Spots]],
    spaces: Sequence[Sequence[Box]],
) -> Decision:
    # One sum per piece of the output on this rank: of what the function gives on these operands.
    sums = [
        [
            (tuple(spots[k] for k in range(len(needs))), space)
            for spots, space in zip(*row, strict=True)
        ]
        for row in zip(rows, spaces, strict=True)
    ]

    layouts = [result.layout, *[_other_layout(form, labels, result) for labels in form.others]]
    orders = [
        _order(form, labels, layout, result, call.rank)
        for labels, layout in zip(form.outputs, layouts, strict=True)
    ]

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        found = []
        for listed in sums:
            products = [
                form.results(
                    invoke, [spot.of(held) for spot, held in zip(spots, pieces, strict=True)], space
                )
                for spots, space in listed
            ]
            found.append([functools.reduce(torch.add, one) for one in zip(*products, strict=True)])
        return [[found[k][number] for k in order] for number, order in enumerate(orders)]

    # A number is of use to everybody, and as cheap to bring everywhere as to anybody.
    everywhere = Layout((), [Box.whole(())] * len(call.ranks), call.ranks)
    finish = [everywhere if layout.shape == () else layout for layout in layouts]
    return Decision(
        needs,
        tuple(layouts),
        kernel,
        finish=tuple(finish) if finish != layouts else None,
        phantom=_phantom(call, form) if form.whole else None,
        is_one_call=len(sums) == 1
        and len(sums[0]) == 1
        and all(spot.is_whole for spot in sums[0][0][0])
        and (form.run is None or form.is_own(sums[0][0][1])),
    )


def _other_layout(form: Form, labels: tuple[int, ...], result: _Result) -> Layout:
    """The layout of an output that is cut as the first one is."""
    entries = [
        Entry(_other_box(form, labels, box), rank, term) for box, rank, term in result.blocks
    ]
    shape = tuple(form.sizes[label] for label in labels)
    return Layout.of(shape, entries, pending="sum")


def _other_box(form: Form, labels: tuple[int, ...], box: Box) -> Box:
    return _projected(_inside(Box.whole(form.sizes), form, box), labels)


def _order(
    form: Form, labels: tuple[int, ...], layout: Layout, result: _Result, rank: int
) -> list[int]:
    """Which piece of the first output each local piece of an output goes with."""
    place = {
        (_other_box(form, labels, entry.box), entry.term): k
        for k, entry in enumerate(result.entries_of(rank))
    }
    return [place[one] for one in zip(layout.boxes_of(rank), layout.terms_of(rank), strict=True)]


def _phantom(call: Call, form: Form) -> Callable[..., Any]:
    """The function on a block as small as it may be: it knows what autocast does."""
    factors = form.factors if form.addend is None else (*form.factors, form.addend)
    units = [size if label in form.whole else 1 for label, size in enumerate(form.sizes)]
    for factor in factors:
        for dim, label in enumerate(factor.labels):
            if label is not None and label not in form.whole:
                units[label] = math.lcm(units[label], factor.scale(dim).units)
    shapes = {factor.place: _smallest(factor, units) for factor in factors}
    space = Box((0,) * len(units), tuple(units))

    def phantom(*ties: torch.Tensor) -> Any:
        tensors = [_hollow(tie, shapes[k]) for k, tie in enumerate(ties)]
        return form.results(call.invoke, tensors, space)

    return phantom


def _smallest(factor: Factor, units: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        1 if label is None else factor.scale(dim).indices_of(0, units[label])[1]
        for dim, label in enumerate(factor.labels)
    )


def _uses(layout: Layout, number: int, blocks: Sequence[_Block], result: _Result) -> Iterable[Use]:
    """Who uses which box of a factor for which block."""
    used: set[Box] = set()
    for entry, listed in result.blocks.items():
        for k in listed:
            box = blocks[k].sources[number]
            used.add(box)
            yield Use(box, entry.rank, k)
    for box, rank, _ in layout:
        # A need has all boxes; these have no gradient, or a gradient of zeros: all `ii` but a few.
        if box.is_empty or box not in used:
            yield Use(box, rank, None)


def _inside(space: Box, form: Form, piece: Box) -> Box:
    """The part of a block that goes into a piece of the output."""
    start, stop = list(space.start), list(space.stop)
    for label, low, high in zip(form.output, piece.start, piece.stop, strict=True):
        start[label], stop[label] = low, high
    return Box(tuple(start), tuple(stop))


def _part_of(source: Box, factor: Factor, space: Box) -> tuple[slice, ...] | None:
    """What to cut out of a piece for a part of the space of labels; None: it is all of it."""
    start, stop = list(source.start), list(source.stop)
    for dim, label in enumerate(factor.labels):
        if label is not None:
            start[dim], stop[dim] = factor.scale(dim).indices_of(
                space.start[label], space.stop[label]
            )
    part = Box(tuple(start), tuple(stop))
    return None if part == source else part.relative_to(source).slices()


def _addend_need(
    call: Call, form: Form, addend: Factor, result: _Result
) -> tuple[Need, list[tuple[_Spot, _Spot]]]:
    """Where the addend is needed; for each local piece, what its first block adds, and the others.

    [Note: muted addends] It is added to one term of each box: the lowest. But all terms have the
    whole gradient of the sum, and so that of the addend: where all ranks hold it already, they
    take its gradient from their own term, and none is sent.
    """
    operand = call.operands[addend.place]
    parts = {entry.box: _addend_part(form, addend.labels, entry.box) for entry in result.blocks}
    whole = Box.whole(operand.shape)
    is_cut = is_tiling(list(dict.fromkeys(parts.values())), operand.shape)
    uses = [
        (Use(parts[box] if is_cut else whole, rank, box), term) for box, rank, term in result.blocks
    ]
    need, pieces = need_of(operand.shape, [use for use, _ in uses], call.rank)
    is_muted = bytes_moved(operand, need) == 0
    if not is_muted:
        need, pieces = need_of(operand.shape, [use for use, term in uses if not term], call.rank)
    found = []
    for box, _, term in result.entries_of(call.rank):
        part = parts[box]
        zero = _Spot(0, zeros=part.shape)
        spot = zero
        if term == 0 or is_muted:
            used = part if is_cut else whole
            cut = None if part == used else part.slices()
            spot = _Spot(pieces[used, box], cut, is_muted=term > 0)
        found.append((spot, zero))
    return need, found


def _addend_part(form: Form, labels: Labels, box: Box) -> Box:
    """The part of the addend that is added to a box of the output."""
    start, stop = [0] * len(labels), [1] * len(labels)
    for dim, label in enumerate(labels):
        if label is not None:
            along = form.output.index(label)
            start[dim], stop[dim] = box.start[along], box.stop[along]
    return Box(tuple(start), tuple(stop))


def _decide_nothing(call: Call, form: Form) -> Decision:
    """The decision for a product of no elements, or of sums over none: nothing moves.

    What stands in place of the factors has their shapes, so that the function gives what it should.
    """
    everywhere = {
        shape: Layout(shape, [Box.whole(shape)] * len(call.ranks), call.ranks)
        for shape in (*form.shapes, *[operand.shape for operand in call.operands])
    }
    places = {factor.place for factor in form.factors}
    shapes = [operand.shape for operand in call.operands]

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        given = [
            _hollow(held[0], shapes[k]) if k in places else held[0] for k, held in enumerate(pieces)
        ]
        results = form.results(invoke, given, Box.whole(form.sizes))
        return [[one] for one in results]

    needs = [
        Need(operand.layout if k in places else everywhere[operand.shape])
        for k, operand in enumerate(call.operands)
    ]
    return Decision(tuple(needs), tuple(everywhere[one] for one in form.shapes), kernel)


def _hollow(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` that comes from `piece`, of zeros if it has elements."""
    return piece.reshape(-1)[:0].view(shape) if 0 in shape else _zero(piece).expand(shape)


def _zero(piece: torch.Tensor) -> torch.Tensor:
    """A zero that autograd knows to come from `piece`, so that this rank stays in the graph."""
    return piece.reshape(-1)[:0].sum(dtype=piece.dtype)
