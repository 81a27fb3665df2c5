"""Views that read the same memory as numbers of another kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.geometry import Box
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline_of
from shardwise.ops.pieces import Part, decide_view
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from shardwise.ops.rule import Call, Decision

__all__ = ["decide_reinterpreted"]


def decide_reinterpreted(call: Call, dtype: torch.dtype) -> Decision | None:
    """`x.view(dtype)`, where elements keep their size. What is pending is reduced first."""
    operand = call.operands[0]
    if dtype.itemsize != operand.dtype.itemsize:
        return None

    def show(piece: torch.Tensor) -> torch.Tensor:
        return piece.view(dtype)

    return decide_view(
        call,
        [(operand.shape, lambda box: [Part(box, show)])],
        layout=operand.layout.bar,
        phantom=show,
    )


def _decide_as_real(call: Call) -> Decision | None:
    """A dim of size 2 comes last; sums stay pending, other reductions are of complex numbers."""
    (operand,), result = call.operands, outline_of(call)

    def parts(box: Box) -> list[Part]:
        return [Part(Box((*box.start, 0), (*box.stop, 2)), torch.view_as_real)]

    return decide_view(
        call,
        [(tuple(result.shape), parts)],
        layout=operand.linear_layout,
        phantom=torch.view_as_real,
    )


def _decide_as_complex(call: Call) -> Decision | None:
    """The last dim, of size 2, goes; None if it is cut."""
    (operand,), result = call.operands, outline_of(call)
    layout = operand.linear_layout
    if not layout.is_whole(-1):
        return None

    def parts(box: Box) -> list[Part]:
        return [Part(Box(box.start[:-1], box.stop[:-1]), torch.view_as_complex)]

    def phantom(tie: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(tie.view(0, 2))

    return decide_view(call, [(tuple(result.shape), parts)], layout=layout, phantom=phantom)


register(Rule("view_as_real", _decide_as_real), functions_named(["view_as_real"]))
register(Rule("view_as_complex", _decide_as_complex), functions_named(["view_as_complex"]))
