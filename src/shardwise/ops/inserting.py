"""Functions that put a tensor in place of a part of another: a copy, cut like the other.

What is put there is brought to the boxes that it meets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.diagonals import diagonal_box, diagonal_in
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pieces import tied
from shardwise.ops.rule import Decision, Need, Rule, register
from shardwise.ops.work import Use, need_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces

__all__: list[str] = []


class _Put(NamedTuple):
    """What comes into a box: this part of the tensor that is put there, and how."""

    source: Box
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (piece, part) -> a new piece


def _decide(call: Call, put: Callable[[Box], _Put | None]) -> Decision:
    outlines(call)
    target, source = call.operands
    layout = target.layout.bar
    puts = {box: put(box) for box in dict.fromkeys(layout.boxes)}
    uses = [
        Use(found.source, owner, box)
        for box, owner, _ in layout
        if (found := puts[box]) is not None and found.source.volume
    ]
    need, place = need_of(source.shape, uses, call.rank)
    rows = [(puts[box], box) for box in layout.boxes_of(call.rank)]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        found = []
        for piece, (one, box) in zip(pieces[0], rows, strict=True):
            if one is None or not one.source.volume:
                found.append(tied(piece.clone(), pieces[1][:1]))
            else:
                found.append(one.write(piece, pieces[1][place[one.source, box]]))
        return [found]

    return Decision((Need(layout), need), (layout,), kernel, phantom=lambda x, y: tied(x, [y]))


def _decide_slice_scatter(call: Call) -> Decision:
    given = arguments_of(call, "input src dim start end step")
    shape = call.operands[0].shape
    dim = given.get("dim", 0) % len(shape)
    taken = range(shape[dim])[
        slice(given.get("start"), given.get("end"), step := given.get("step", 1))
    ]

    def put(box: Box) -> _Put | None:
        first, last = (
            min(max(-((taken.start - end) // step), 0), len(taken))
            for end in (box.start[dim], box.stop[dim])
        )
        if first == last:
            return None
        start = taken[first] - box.start[dim]
        stop = taken[last - 1] - box.start[dim] + 1
        source = box.with_range(dim, first, last)
        return _Put(source, lambda x, part: torch.slice_scatter(x, part, dim, start, stop, step))

    return _decide(call, put)


def _decide_select_scatter(call: Call) -> Decision:
    given = arguments_of(call, "input src dim index")
    shape = call.operands[0].shape
    dim = given["dim"] % len(shape)
    index = given["index"] % max(shape[dim], 1)

    def put(box: Box) -> _Put | None:
        at = index - box.start[dim]
        if not 0 <= at < box.shape[dim]:
            return None
        source = Box(box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :])
        return _Put(source, lambda x, part: torch.select_scatter(x, part, dim, at))

    return _decide(call, put)


def _decide_diagonal_scatter(call: Call) -> Decision:
    given = arguments_of(call, "input src offset dim1 dim2")
    ndim, offset = len(call.operands[0].shape), given.get("offset", 0)
    dim1, dim2 = given.get("dim1", 0) % ndim, given.get("dim2", 1) % ndim

    def put(box: Box) -> _Put | None:
        low, high, here = diagonal_in(box, offset, dim1, dim2)
        if low >= high:
            return None
        source = diagonal_box(box, (low, high), dim1, dim2)
        return _Put(source, lambda x, part: torch.diagonal_scatter(x, part, here, dim1, dim2))

    return _decide(call, put)


for _name, _decided in (
    ("slice_scatter", _decide_slice_scatter),
    ("select_scatter", _decide_select_scatter),
    ("diagonal_scatter", _decide_diagonal_scatter),
):
    register(Rule(_name, _decided), functions_named([_name]))
