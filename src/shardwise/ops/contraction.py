"""Products of tensors: whoever holds the factors of a block computes it.

What blocks are, who computes them and which operands move: the notes in `blocks.py`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.geometry import Box, Entry, Layout, is_tiling
from shardwise.ops.blocks import blocks_of, following, result_of
from shardwise.ops.rule import Call, Decision, Need
from shardwise.ops.stacking import Stack, are_alone, label_of
from shardwise.ops.whole_labels import usable_layouts
from shardwise.ops.work import Use, bytes_moved, need_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.ops.blocks import Block, Result
    from shardwise.ops.forms import Factor, Form, Labels
    from shardwise.ops.rule import Invoke, OperandPieces, OutputPieces

__all__ = ["decide_product"]


def decide_product(call: Call, form: Form) -> Decision:
    """The way to compute a product for which the fewest bytes move."""
    if 0 in form.sizes:
        return _decide_nothing(call, form)
    held = [call.operands[factor.place].layout for factor in form.factors]
    stay = [layout.bar for layout in held]
    choices = [
        usable_layouts(form, factor, one) for factor, one in zip(form.factors, stay, strict=True)
    ]
    are_usable = all(one in usable for one, usable in zip(stay, choices, strict=True))
    blocks = blocks_of(form, stay) if are_usable else None
    ways = [] if blocks is None else [_decision(call, form, stay, blocks)]
    if blocks is None or stay != held:
        for anchor, usable in enumerate(choices):
            for layout in usable:
                layouts = following(form, [*stay[:anchor], layout, *stay[anchor + 1 :]], anchor)
                blocks = blocks_of(form, layouts)
                assert blocks is not None
                ways.append(_decision(call, form, layouts, blocks))
    return min(ways, key=lambda way: way[1])[0]


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
        return _Muted.apply(found) if self.is_muted else found  # type: ignore[no-untyped-call]  # torch's

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
        if not torch.is_grad_enabled():
            return grad
        found: torch.Tensor = _Echo.apply(grad)  # type: ignore[no-untyped-call]  # torch's
        return found


class _Echo(torch.autograd.Function):
    """A tensor as it is, whose gradient is muted. [Note: muted addends]"""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Muted.apply(grad)  # type: ignore[no-untyped-call]  # torch's
        return found


Spots = dict[int, _Spot]  # by the place of the operand
Sums = list[list[tuple[tuple[_Spot, ...], Box]]]  # spots by place, and the block's range of labels


def _decision(
    call: Call, form: Form, layouts: Sequence[Layout], blocks: Sequence[Block]
) -> tuple[Decision, int]:
    """The decision for factors in these layouts, and how many bytes move for it."""
    result = result_of(form, blocks)
    entries = result.entries_of(call.rank)
    rows: list[list[Spots]] = [[{} for _ in result.blocks[entry]] for entry in entries]
    needs: dict[int, Need] = {}
    for number, (factor, layout) in enumerate(zip(form.factors, layouts, strict=True)):
        uses = _uses(layout, number, blocks, result)
        needs[factor.place], pieces = need_of(layout.shape, uses, call.rank)
        for row, entry in zip(rows, entries, strict=True):
            for spots, k in zip(row, result.blocks[entry], strict=True):
                source = blocks[k].sources[number]
                part = _part_of(source, factor, form.inside(blocks[k].box, entry.box))
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
        [form.inside(blocks[k].box, entry.box) for k in result.blocks[entry]] for entry in entries
    ]
    return _made(call, form, result, listed, rows, spaces), cost


def _made(
    call: Call,
    form: Form,
    result: Result,
    needs: tuple[Need, ...],
    rows: Sequence[Sequence[Spots]],
    spaces: Sequence[Sequence[Box]],
) -> Decision:
    # One sum per piece of the output on this rank: of what the function gives on these operands.
    sums: Sums = [
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

    stack = _stack(form, sums, result, call.rank)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        if stack is not None:
            given = [spot.of(held) for spot, held in zip(sums[0][0][0], pieces, strict=True)]
            together = stack.results(given, pieces, invoke)
            if together is not None:
                return [together]
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
    everywhere = Layout.replicated((), call.ranks)
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
        is_of_all=form.run is None,
    )


def _stack(form: Form, sums: Sums, result: Result, rank: int) -> Stack | None:
    """How the sums are one product, if they are. [Note: stacked pieces] in `stacking.py`"""
    is_plain = form.run is None and not form.whole and not form.others
    if not is_plain or len(sums) < 2 or any(len(listed) != 1 for listed in sums):
        return None
    if not are_alone(result.entries_of(rank), list(result.blocks)):
        return None
    found = (_stack_of(form, factor, sums) for factor in form.factors)
    return next((stack for stack in found if stack is not None), None)


def _stack_of(form: Form, factor: Factor, sums: Sums) -> Stack | None:
    """The same, with pieces of this factor."""
    label = label_of(form, factor)
    if label is None:
        return None
    spaces = [space for ((_, space),) in sums]
    spots = list(zip(*[spots for ((spots, _),) in sums], strict=True))  # by place
    stacked = [factor.place]
    if form.addend is not None and label in form.addend.labels:
        if form.addend.labels[0] != label:
            return None
        stacked.append(form.addend.place)
    if not all(
        _are_in_order(one) if k in stacked else all(spot == one[0] for spot in one)
        for k, one in enumerate(spots)
    ):
        return None
    if len({_without(space, label) for space in spaces}) > 1:
        return None
    sizes = [space.shape[label] for space in spaces]
    return Stack(tuple(stacked), form.output.index(label), sizes)


def _are_in_order(spots: Sequence[_Spot]) -> bool:
    """Whether these are the first pieces of an operand, whole, one after the other."""
    return all(spot.is_whole and spot.piece == k for k, spot in enumerate(spots))


def _without(space: Box, label: int) -> tuple[Box, Box]:
    """The range of all labels but one."""
    return space.along(tuple(range(label))), space.along(tuple(range(label + 1, len(space.start))))


def _other_layout(form: Form, labels: tuple[int, ...], result: Result) -> Layout:
    """The layout of an output that is cut as the first one is."""
    entries = [
        Entry(_other_box(form, labels, box), rank, term) for box, rank, term in result.blocks
    ]
    shape = tuple(form.sizes[label] for label in labels)
    return Layout.of(shape, entries, pending="sum")


def _other_box(form: Form, labels: tuple[int, ...], box: Box) -> Box:
    return form.inside(Box.whole(form.sizes), box).along(labels)


def _order(
    form: Form, labels: tuple[int, ...], layout: Layout, result: Result, rank: int
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


def _uses(layout: Layout, number: int, blocks: Sequence[Block], result: Result) -> Iterable[Use]:
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


# -- the addend ------------------------------------------------------------------------------------


def _addend_need(
    call: Call, form: Form, addend: Factor, result: Result
) -> tuple[Need, list[tuple[_Spot, _Spot]]]:
    """Where the addend is needed; for each local piece, what its first block adds, and the others.

    [Note: muted addends] It is added to one term of each box: the lowest. But all terms have the
    whole gradient of the sum, and so that of the addend: where all ranks hold it already, they
    take its gradient from their own term, and none is sent. The gradient of that gradient counts
    once, as the addend does: it is muted on the same ranks.
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


# -- without elements ------------------------------------------------------------------------------


def _decide_nothing(call: Call, form: Form) -> Decision:
    """The decision for a product of no elements, or of sums over none: nothing moves.

    What stands in place of the factors has their shapes, so that the function gives what it should.
    """
    everywhere = {
        shape: Layout.replicated(shape, call.ranks)
        for shape in (*form.shapes, *[operand.shape for operand in call.operands])
    }
    places = {factor.place for factor in form.factors}
    shapes = [operand.shape for operand in call.operands]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
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
