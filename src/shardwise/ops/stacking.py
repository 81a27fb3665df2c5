"""One product in place of several with the pieces of a weight that a rank holds.

[Note: stacked pieces] A rank's rows of queries, keys and values are three boxes of one weight, all
multiplied with one piece of the input. The product with all rows at once gives the same, and the
gradient of the input without adding up three. It takes no copy of the weight where its pieces
follow each other in memory, as those do that an exchange made (`new_tensors` in `comm/load.py`).
Elsewhere there are as many products as pieces. What other ranks compute, too, is left alone: a
product of another size may differ in the last bits, and replicas are equal.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Entry
    from shardwise.ops.forms import Factor, Form
    from shardwise.ops.rule import Invoke, OperandPieces

__all__ = ["Stack", "are_alone", "label_of", "side_by_side"]


class Stack(NamedTuple):
    """How all local pieces of a product's output come out of one call."""

    places: tuple[int, ...]  # of the factor whose pieces are stacked, and of an addend cut so, too
    dim: int  # of the output, along which it falls into pieces
    sizes: list[int]  # of the pieces

    def results(
        self, given: list[Any], pieces: OperandPieces, invoke: Invoke
    ) -> list[torch.Tensor] | None:
        """The pieces of the output; None if those of the factor lie apart.

        `given` has what the other operands are.
        """
        factor, *addend = self.places
        count = len(self.sizes)
        stacked = side_by_side(pieces[factor][:count])
        if stacked is None:
            return None
        given[factor] = stacked
        for place in addend:
            given[place] = torch.cat(list(pieces[place][:count]))
        # Nobody sees the whole, so its parts may be written as if they were no views.
        return list(torch.unsafe_split_with_sizes(invoke(*given), self.sizes, self.dim))


def label_of(form: Form, factor: Factor) -> int | None:
    """The label along which products with pieces of a factor are one product, if there is one."""
    label = factor.labels[0] if factor.labels and not factor.scales else None
    others = [one for one in form.factors if one is not factor]
    if label is None or label not in form.output or label in factor.labels[1:]:
        return None
    return None if any(label in one.labels for one in others) else label


def are_alone(entries: Sequence[Entry], every: Sequence[Entry]) -> bool:
    """Whether no other rank has what is in these entries of an output."""
    owners = Counter((box, term) for box, _, term in every)
    return all(owners[box, term] == 1 and not box.is_empty for box, _, term in entries)


def side_by_side(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The pieces as one tensor, stacked along dim 0, without a copy; None if they lie apart."""
    first = pieces[0]
    end = start = first.data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end or not piece.is_contiguous():
            return None
        end += piece.nbytes
    memory = first.untyped_storage()
    if end > memory.data_ptr() + memory.nbytes() or end == start:
        return None  # of other tensors, which happen to come next
    found: torch.Tensor = _SideBySide.apply(*pieces)  # type: ignore[no-untyped-call]  # torch's
    return found


class _SideBySide(torch.autograd.Function):
    """Contiguous tensors that follow each other in memory, as one."""

    @staticmethod
    def forward(ctx: Any, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(piece) for piece in pieces]
        first = pieces[0]
        shape = (sum(ctx.sizes), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride()).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(grads[0], ctx.sizes)
