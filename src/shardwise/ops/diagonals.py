"""Diagonals of matrices, and matrices of diagonals: a box knows where the diagonal crosses it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline_of, outlines
from shardwise.ops.phantoms import as_tie
from shardwise.ops.pieces import Mapped, Part, decide_filled, decide_parts, decide_view
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__ = ["diagonal_box", "diagonal_in", "diagonal_of"]


def diagonal_of(box: Box, diagonal: int, rows: int = -2, columns: int = -1) -> int:
    """The diagonal of the dims `rows` and `columns`, counted from the box's own corner."""
    return diagonal + box.start[rows] - box.start[columns]


def diagonal_in(box: Box, diagonal: int, rows: int = -2, columns: int = -1) -> tuple[int, int, int]:
    """Which elements of a diagonal are in a box, and which diagonal of the box it is.

    None are if the range that comes first is empty.
    """
    row, column = max(-diagonal, 0), max(diagonal, 0)  # of the first element
    low = max(0, box.start[rows] - row, box.start[columns] - column)
    high = min(box.stop[rows] - row, box.stop[columns] - column)
    return low, high, diagonal_of(box, diagonal, rows, columns)


def diagonal_box(box: Box, span: tuple[int, int], rows: int, columns: int) -> Box:
    """Where elements `span` of the diagonals of a box are: in the last dim, behind the others."""
    others = [dim for dim in range(box.ndim) if dim not in (rows, columns)]
    return Box(
        (*[box.start[dim] for dim in others], span[0]),
        (*[box.stop[dim] for dim in others], span[1]),
    )


def _decide_diagonal(call: Call, *, dim1: int = 0, dim2: int = 1) -> Decision:
    """A view, of the diagonals of two dims: those given, or else `dim1` and `dim2`."""
    (operand,), result = call.operands, outline_of(call)
    given = {"offset": 0, "dim1": dim1, "dim2": dim2} | arguments_of(call, "input offset dim1 dim2")
    offset = given["offset"]
    rows, columns = (given[name] % len(operand.shape) for name in ("dim1", "dim2"))

    def parts(box: Box) -> list[Part]:
        low, high, here = diagonal_in(box, offset, rows, columns)
        if low >= high:
            return []
        placed = diagonal_box(box, (low, high), rows, columns)
        return [Part(placed, lambda piece: piece.diagonal(here, rows, columns))]

    return decide_view(call, [(tuple(result.shape), parts)])


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
            return [Part(nothing, as_tie, is_new=False)]
        return [Part(Box((low,), (high,)), lambda piece: piece.diagonal(here), is_new=False)]

    return decide_parts(call, [Mapped(layout, parts)], tuple(result.shape))


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

        return [Part(Box.of(ends), make)]

    return decide_parts(call, [Mapped(layout, parts)], shape)


register(Rule("diag", _decide_diag), functions_named(["diag"]))
register(Rule("diag_embed", _decide_diag_embed), functions_named(["diag_embed"]))
register(
    Rule("linalg.diagonal", partial(_decide_diagonal, dim1=-2, dim2=-1)), [torch.linalg.diagonal]
)
register(Rule("diagonal", _decide_diagonal), functions_named(["diagonal"]))
