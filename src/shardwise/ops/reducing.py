"""Functions that reduce dims: every rank reduces what it holds by torch's own function.

Who has what of the result is [Note: cells and terms] in `terms.py`. The terms stay pending, or are
reduced by an operation that layouts know; what takes another operation is in `slots.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwise.geometry import Box, Layout
from shardwise.ops.outlines import listed_results, outlines
from shardwise.ops.phantoms import phantom_of_one
from shardwise.ops.rule import Decision, Need
from shardwise.ops.terms import terms_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.geometry import ReduceOp
    from shardwise.ops.phantoms import Phantom
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces
    from shardwise.ops.terms import Reduced, Share, Terms

__all__ = ["decide_terms", "decide_whole", "everywhere"]

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def everywhere(call: Call, pack: Callable[[list[Any]], Any] | None = None) -> Decision:
    """Every rank computes all of it: for tensors without elements, or with few that matter."""
    results = outlines(call)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        return [[result] for result in listed_results(invoke(*[held[0] for held in pieces]))]

    return Decision(
        tuple(Need(Layout.replicated(operand.shape, call.ranks)) for operand in call.operands),
        tuple(Layout.replicated(tuple(result.shape), call.ranks) for result in results),
        kernel,
        pack=pack,
    )


def _finish(layouts: tuple[Layout, ...], wanted: tuple[Layout, ...]) -> tuple[Layout, ...] | None:
    return None if layouts == wanted else wanted


def decide_whole(
    call: Call,
    terms: Terms,
    need: Layout,
    phantom: Phantom,
    *,
    pack: Callable[[list[Any]], Any] | None = None,
) -> Decision:
    """No reduced dim is cut: torch's function on every piece, and nothing travels.

    But for a result of one element, which every rank has.
    """
    reduced, rank = terms.reduced, call.rank
    layout = terms.layout(None)
    cells = _local_cells(terms, layout, rank)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        whole: dict[int, list[torch.Tensor]] = {}
        rows = []
        for cell in cells:
            if not cell.volume:
                shape = reduced.result_box(cell).shape
                rows.append([tie.reshape(shape) for tie in phantom(pieces[0][0])])
                continue
            (share,) = terms.shares[cell, 0]
            if share.piece not in whole:
                whole[share.piece] = listed_results(invoke(pieces[0][share.piece]))
            rows.append([_cut(result, share, reduced) for result in whole[share.piece]])
        return [list(column) for column in zip(*rows, strict=True)]

    outputs = (layout,) * len(outlines(call))
    wanted = (
        (Layout.replicated(layout.shape, call.ranks),) * len(outputs)
        if reduced.is_full
        else outputs
    )
    return Decision(
        (Need(need),),
        outputs,
        kernel,
        finish=_finish(outputs, wanted),
        phantom=phantom,
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
    layout = operand.linear_layout if passes_terms else operand.layout.bar
    terms = terms_of(layout, reduced, call.rank)
    phantom = phantom_of_one(call)
    if terms.is_whole and layout.pending is None:
        return decide_whole(call, terms, layout, phantom)
    output = terms.layout(op)
    weights = _weights(layout, reduced, call.rank, is_mean=is_mean)
    cells = _local_cells(terms, output, call.rank)
    rows = list(zip(cells, output.terms_of(call.rank), strict=True))
    combine = _COMBINE[op]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
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
        wanted = Layout.replicated(output.shape, call.ranks)
    return Decision(
        (Need(layout),), (output,), kernel, finish=_finish((output,), (wanted,)), phantom=phantom
    )


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
