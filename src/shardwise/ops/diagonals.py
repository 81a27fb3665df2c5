"""Functions of diagonals of matrices: each box knows where the diagonal crosses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pieces import Mapped, Part, decide_filled, decide_parts
from shardwise.ops.rule import Decision, Need, Rule, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from shardwise.ops.rule import Call

__all__ = ["diagonal_in"]


# -- triangles -------------------------------------------------------------------------------------


def _triangle(name: str) -> None:
    """`tril` or `triu`, and in place; a pending sum passes through."""
    function, change = getattr(torch, name), getattr(torch.Tensor, f"{name}_")

    def decide(call: Call) -> Decision:
        outlines(call)
        layout = call.operands[0].layout
        diagonal = arguments_of(call, "input diagonal").get("diagonal", 0)

        def parts(box: Box) -> list[Part]:
            if box.start[-2] == box.start[-1]:
                return [Part(box)]
            return [Part(box, lambda piece: function(piece, _here(diagonal, box)))]

        return decide_parts(call, [Mapped(layout, parts)], layout.shape)

    def decide_in_place(call: Call) -> Decision:
        outlines(call)
        layout = call.operands[0].layout
        diagonal = arguments_of(call, "input diagonal").get("diagonal", 0)
        here = [_here(diagonal, box) for box in layout.boxes_of(call.rank)]

        def kernel(
            pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
        ) -> list[list[torch.Tensor]]:
            return [[change(piece, at) for piece, at in zip(pieces[0], here, strict=True)]]

        return Decision(
            (Need(layout),),
            (layout,),
            kernel,
            is_one_call=here == [diagonal],
            is_in_place=True,
        )

    register(Rule(name, decide), functions_named([name]))
    register(Rule(f"{name}_", decide_in_place), functions_named([f"{name}_"]))


def _here(diagonal: int, box: Box) -> int:
    """The diagonal, counted from the box's own corner."""
    return diagonal + box.start[-2] - box.start[-1]


_triangle("tril")
_triangle("triu")


# -- diagonals as tensors --------------------------------------------------------------------------


def _decide_diag(call: Call) -> Decision:
    """A diagonal of a matrix, or the matrix of a diagonal."""
    diagonal = arguments_of(call, "input diagonal").get("diagonal", 0)
    if len(call.operands[0].shape) == 1:
        return _embedded(call, diagonal, 0, 1)
    (result,) = outlines(call)
    layout = call.operands[0].layout

    def parts(box: Box) -> list[Part]:
        low, high, here = diagonal_in(box, diagonal)
        if low >= high:
            low = min(low, result.shape[0])
            nothing = Box((low,), (low,))
            return [Part(nothing, lambda piece: piece.reshape(-1)[:0], is_new=False)]
        return [Part(Box((low,), (high,)), lambda piece: piece.diagonal(here), is_new=False)]

    return decide_parts(call, [Mapped(layout, parts)], tuple(result.shape))


def diagonal_in(box: Box, diagonal: int) -> tuple[int, int, int]:
    """Which elements of a diagonal are in a box of a matrix, and which diagonal of the box it is.

    None are if the range that comes first is empty.
    """
    row, column = max(-diagonal, 0), max(diagonal, 0)  # of the first element
    low = max(0, box.start[0] - row, box.start[1] - column)
    high = min(box.stop[0] - row, box.stop[1] - column)
    return low, high, _here(diagonal, box)


def _decide_diag_embed(call: Call) -> Decision:
    given = arguments_of(call, "input offset dim1 dim2")
    ndim = len(call.operands[0].shape) + 1
    dims = [given.get(name, default) % ndim for name, default in (("dim1", -2), ("dim2", -1))]
    return _embedded(call, given.get("offset", 0), *dims)


def _embedded(call: Call, offset: int, dim1: int, dim2: int) -> Decision:
    """Each box has the rows of its elements, those at the border also the rows without any."""
    (result,) = outlines(call)
    shape, layout = tuple(result.shape), call.operands[0].layout
    if not call.operands[0].shape[-1] and 0 not in shape:
        return decide_filled(call, shape, 0)
    size, width = layout.shape[-1], shape[dim1]
    row, column = max(-offset, 0), max(offset, 0)  # of the first element

    def parts(box: Box) -> list[Part]:
        low, high = box.start[-1], box.stop[-1]
        before = row if low == 0 and high else 0
        after = width - size - row if high == size and low < high else 0
        # Offsets without rows leave the border as it is.
        start, stop = low + row - before, high + row + after
        ends = list(zip(box.start[:-1], box.stop[:-1], strict=True))
        for dim, span in sorted([(dim1, (start, stop)), (dim2, (0, width))]):
            ends.insert(dim, span)
        sides = [low + column, width - high - column, before, after]

        def make(piece: torch.Tensor) -> torch.Tensor:
            rows = torch.constant_pad_nd(torch.diag_embed(piece), sides)
            return rows.movedim((-2, -1), (dim1, dim2))

        return [Part(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)), make)]

    return decide_parts(call, [Mapped(layout, parts)], shape)


register(Rule("diag", _decide_diag), functions_named(["diag"]))
register(Rule("diag_embed", _decide_diag_embed), functions_named(["diag_embed"]))
