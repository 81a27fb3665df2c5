"""Functions that show a tensor in another shape, or a part of it: boxes are mapped, nothing moves.

Every box of the operand becomes boxes of the result on the same rank, each a torch view of the
local piece. So what is written into the one shows in the other, replicas stay replicas, addends of
a pending reduction stay addends, and gradients need no exchange.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.geometry import Box, Layout
from shardwise.ops.rule import Decision, Need, Operand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.rule import Call

__all__ = ["Part", "decide_view", "on_probe", "operand_of"]


class Part(NamedTuple):
    """A box of the result, and how it is made of the local piece of a box of the operand."""

    box: Box
    show: Callable[[torch.Tensor], torch.Tensor]


class _Spot(NamedTuple):
    """A local piece of the result: its box and term, and of which piece it is made, and how."""

    box: Box
    term: int
    piece: int
    show: Callable[[torch.Tensor], torch.Tensor]


def operand_of(call: Call) -> Operand | None:
    """The operand of a view; None if the call has others, which say something that we cannot see.

    As in `x[indices]` and `tensor_split(x, indices)`.
    """
    return call.operands[0] if len(call.operands) == 1 else None


def on_probe(call: Call, operand: Operand) -> tuple[torch.Tensor, Any]:
    """A tensor without data, of the size of the only operand, and what the function gives of it.

    So torch itself reads the arguments, and raises what it raises of them.
    """
    probe = torch.empty(operand.shape, dtype=operand.dtype, device="meta")

    def put(value: Any) -> Any:
        return probe if isinstance(value, Operand) else value

    named = {name: put(value) for name, value in call.kwargs.items()}
    return probe, call.function(*map(put, call.args), **named)


def decide_view(
    call: Call,
    results: Sequence[tuple[tuple[int, ...], Callable[[Box], list[Part]]]],
    *,
    layout: Layout | None = None,
    pack: Callable[[list[Any]], Any] | None = None,
    phantom: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Decision:
    """The decision for results of these shapes, each with the parts that a box has in it.

    `layout` is where the operand is needed, if not where it is; `phantom` makes of a tensor without
    elements one of the results' dtype, if that is another.
    """
    source = call.operands[0].layout if layout is None else layout
    shown = [_shown(source, shape, parts, call.rank) for shape, parts in results]

    def kernel(
        pieces: Sequence[Sequence[torch.Tensor]], invoke: Callable[..., Any]
    ) -> list[list[torch.Tensor]]:
        return [[spot.show(pieces[0][spot.piece]) for spot in spots] for _, spots in shown]

    spots = shown[0][1]
    is_one = len(spots) == 1 == len(source.boxes_of(call.rank)) and len(shown) == 1

    return Decision(
        (Need(source), *[Need(other.layout) for other in call.operands[1:]]),
        tuple(found for found, _ in shown),
        kernel,
        phantom=lambda tie, *_: [tie if phantom is None else phantom(tie)] * len(shown),
        is_view=True,
        local=spots[0].show if is_one and pack is None else None,
        pack=pack,
    )


def _shown(
    source: Layout, shape: tuple[int, ...], parts: Callable[[Box], list[Part]], rank: int
) -> tuple[Layout, list[_Spot]]:
    """The layout of a result, and how the pieces of `rank` are made, in its order."""
    if 0 in shape:  # each piece shows nothing of what it has
        parts = partial(_nothing, shape)
    known: dict[Box, list[Part]] = {}
    boxes, owners, terms = [], [], []
    spots: list[_Spot] = []
    num_pieces = 0
    for box, owner, term in source:
        if box not in known:
            known[box] = parts(box) if box.volume or 0 in shape else []
        for part in known[box]:
            boxes.append(part.box)
            owners.append(owner)
            terms.append(term)
            if owner == rank:
                spots.append(_Spot(part.box, term, num_pieces, part.show))
        num_pieces += owner == rank
    pending = source.pending
    layout = Layout(shape, boxes, owners, terms=terms if pending else None, pending=pending)
    return layout, sorted(spots, key=lambda spot: spot[:3])


def _nothing(shape: tuple[int, ...], _: Box) -> list[Part]:
    def show(piece: torch.Tensor) -> torch.Tensor:
        some = piece if piece.dim() else piece.view(1)
        return some.narrow(0, 0, 0).view(shape)

    return [Part(Box.whole(shape), show)]
