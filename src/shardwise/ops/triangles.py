"""`tril` and `triu`: each box is cut by the diagonal that crosses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.diagonals import diagonal_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pieces import Mapped, Part, decide_parts
from shardwise.ops.rule import Decision, Need, Rule, register

if TYPE_CHECKING:
    from shardwise.geometry import Box
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces

__all__: list[str] = []


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
            return [Part(box, lambda piece: function(piece, diagonal_of(box, diagonal)))]

        return decide_parts(call, [Mapped(layout, parts)], layout.shape)

    def decide_in_place(call: Call) -> Decision:
        outlines(call)
        layout = call.operands[0].layout
        diagonal = arguments_of(call, "input diagonal").get("diagonal", 0)
        here = [diagonal_of(box, diagonal) for box in layout.boxes_of(call.rank)]

        def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
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


_triangle("tril")
_triangle("triu")
