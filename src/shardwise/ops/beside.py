"""Operands beside a tensor, as a weight per channel or targets, which have some of its dims.

A piece of the tensor is computed with the part of them that lies beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.ops.phantoms import as_tie, unit_of
from shardwise.ops.rule import Decision, Need
from shardwise.ops.work import needed_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardwise.geometry import Layout
    from shardwise.ops.rule import Call, Invoke, Operand, OperandPieces, OutputPieces
    from shardwise.ops.work import Spot

__all__ = ["Beside", "beside", "decide_pieces"]


class Beside(NamedTuple):
    """What the pieces of a tensor need of an operand that has some of its dims."""

    need: Need
    dims: tuple[int, ...]  # of the tensor, one per dim of the operand
    ndim: int  # of the tensor
    spots: tuple[Spot, ...]  # per local box of the tensor

    def parts(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part for each local box of the tensor, which broadcasts against its piece."""
        found = []
        for part in self.narrow_parts(pieces):
            shape = [1] * self.ndim
            for dim, size in zip(self.dims, part.shape, strict=True):
                shape[dim] = size
            found.append(part.reshape(shape))
        return found

    def narrow_parts(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same with the operand's own dims."""
        return [spot.of(pieces) for spot in self.spots]


def beside(operand: Operand, dims: tuple[int, ...], layout: Layout, rank: int) -> Beside:
    """What the boxes of `layout` need of an operand whose dims are `dims` of its tensor."""
    parts = {box: box.along(dims) for box in layout.boxes}
    need, spots = needed_parts(operand, layout, parts, rank)
    return Beside(need, dims, layout.ndim, spots)


def decide_pieces(
    call: Call,
    layout: Layout,
    besides: Sequence[Beside],
    unit: Callable[..., torch.Tensor],
    local: Callable[..., torch.Tensor] | None = None,
) -> Decision:
    """Torch's function on every piece and what is beside it, with nothing from elsewhere.

    `unit` is the function on ones, with ones beside them. `local`, if the function of the call
    itself will not do, is what it is on a piece: given the box, the piece and what is beside it.
    """
    boxes = layout.boxes_of(call.rank)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        parts = [one.narrow_parts(held) for one, held in zip(besides, pieces[1:], strict=True)]
        found = []
        for box, *given in zip(boxes, pieces[0], *parts, strict=True):
            if box.volume:
                found.append(invoke(*given) if local is None else local(box, *given))
            else:
                found.append(phantom(*given)[0].reshape(box.shape))
        return [found]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        shapes = [(1,) * layout.ndim, *[(1,) * len(one.dims) for one in besides]]
        units = [unit_of([tie], shape) for tie, shape in zip(ties, shapes, strict=True)]
        return [as_tie(unit(*units))]

    return Decision(
        (Need(layout), *[one.need for one in besides]),
        (layout,),
        kernel,
        phantom=phantom,
        is_one_call=local is None
        and len(boxes) == 1
        and bool(boxes[0].volume)
        and all(spot.part is None for one in besides for spot in one.spots),
    )
