"""Views that are not a part of each dim: diagonals, and windows that overlap."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.geometry import Box
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline_of
from shardwise.ops.pieces import Part, decide_view, operand_of
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []


def _diagonal(
    _: Any, offset: int = 0, dim1: int = 0, dim2: int = 1, *, dim: int | None = None
) -> tuple[int, int, int]:
    """Offset and dims, as `torch.diagonal` has them."""
    return offset, dim1, dim2


def _diagonal_last(
    _: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> tuple[int, int, int]:
    """The same, as `torch.linalg.diagonal` has them."""
    return offset, dim1, dim2


def _decide_diagonal(call: Call, *, is_last: bool = False) -> Decision | None:
    """Element k of it is element (i + k, j + k) of the operand: an interval of k in each box."""
    operand = operand_of(call)
    assert operand is not None
    result = outline_of(call)
    named = {"_" if name in ("input", "A") else name: arg for name, arg in call.kwargs.items()}
    offset, *dims = (_diagonal_last if is_last else _diagonal)(*call.args, **named)
    rows, columns = (dim % len(operand.shape) for dim in dims)
    first_row, first_column = max(-offset, 0), max(offset, 0)

    def parts(box: Box) -> list[Part]:
        low = max(box.start[rows] - first_row, box.start[columns] - first_column)
        high = min(box.stop[rows] - first_row, box.stop[columns] - first_column)
        if low >= high or high <= 0:
            return []
        left = [dim for dim in range(box.ndim) if dim not in (rows, columns)]
        start = (*[box.start[dim] for dim in left], max(low, 0))
        stop = (*[box.stop[dim] for dim in left], high)
        inside = offset + box.start[rows] - box.start[columns]
        return [
            Part(Box(start, stop), lambda piece: piece.diagonal(inside, rows, columns)),
        ]

    return decide_view(call, [(tuple(result.shape), parts)])


def _decide_windows(call: Call) -> Decision | None:
    """`x.unfold(dim, size, step)`: each window has elements of the next; None if `dim` is cut."""
    operand = operand_of(call)
    assert operand is not None
    result = outline_of(call)
    names = ("dimension", "size", "step")
    given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
    dim, size, step = (given[name] for name in names)
    if not operand.shape or not operand.layout.is_whole(dim):
        return None
    dim %= len(operand.shape)

    def parts(box: Box) -> list[Part]:
        stop = [*box.stop, size]
        stop[dim] = result.shape[dim]
        target = Box((*box.start, 0), tuple(stop))
        return [Part(target, lambda piece: piece.unfold(dim, size, step))]

    return decide_view(call, [(tuple(result.shape), parts)])


register(Rule("linalg.diagonal", partial(_decide_diagonal, is_last=True)), [torch.linalg.diagonal])
register(Rule("diagonal", _decide_diagonal), functions_named(["diagonal"]))
register(Rule("unfold", _decide_windows), [torch.Tensor.unfold])
