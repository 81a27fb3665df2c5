"""How gradients find their way through a function on local pieces.

[Note: whose work] What a rank computes is what it has of the outputs. Ranks that have the same
pieces of all outputs do the same work: the gradients of what they share are equal already. Ranks
whose outputs differ do other work, and the gradient of what they share is the sum over distinct
work. An output piece that ranks of different work have would then be counted more than once; so
its gradient goes back on those ranks only that do the first such work. All of this follows from
the layouts, but those of the outputs are known only once the function has run: what enters it
learns its way back later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from shardwise.comm.differentiable import Exchange, exchange
from shardwise.geometry import Box, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.comm.differentiable import Carriers

__all__ = [
    "Entry",
    "OutputPiece",
    "enter",
    "homes_of",
    "inputs_behind",
    "leave_elsewhere",
    "tie",
    "works_of",
]

OutputPiece = tuple[int, Box, int]  # number of an output, box, term


class Entry:
    """How an input came in, and by what work its gradients differ, once that is known."""

    __slots__ = ("job",)

    def __init__(self, job: Exchange) -> None:
        self.job = job

    def learn(self, works: Mapping[int, int]) -> None:
        """Takes the work that the input turned out to be used for."""
        target = self.job.target
        terms = [works[rank] for rank in target.owners.tolist()]
        met: dict[Box, set[int]] = {}
        for box, term in zip(target.boxes, terms, strict=True):
            met.setdefault(box, set()).add(term)
        if any(len(found) > 1 for found in met.values()):
            work = Layout(target.shape, target.boxes, target.owners, terms=terms, pending="sum")
            self.job = replace(self.job, work=work)


def works_of(layouts: Sequence[Layout], ranks: Iterable[int]) -> dict[int, int]:
    """The work of each rank: a number that ranks with equal pieces of all outputs share."""
    numbers: dict[Any, int] = {}
    return {
        rank: numbers.setdefault(
            tuple((layout.boxes_of(rank), layout.terms_of(rank)) for layout in layouts),
            len(numbers),
        )
        for rank in sorted(ranks)
    }


def homes_of(layouts: Sequence[Layout], works: Mapping[int, int]) -> dict[OutputPiece, int]:
    """The first work that makes each piece of each output: by it the gradient goes back."""
    found: dict[OutputPiece, int] = {}
    for number, layout in enumerate(layouts):
        for box, owner, term in layout:
            piece = number, box, term
            found[piece] = min(found.get(piece, works[owner]), works[owner])
    return found


class _Enter(torch.autograd.Function):
    """An input on its way in, whose way back is learned later. [Note: whose work]"""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *carriers: torch.Tensor) -> Carriers:
        ctx.entry = entry
        # Read before backward communicates, as in `comm/differentiable.py`.
        ctx.save_for_backward(carriers[0].new_empty(0))
        values = tuple([carrier.detach() for carrier in carriers])
        job = entry.job
        moved = values if job.changes_nothing else exchange(job, values)
        return tuple([value.detach() for value in moved])  # each its own object

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert len(ctx.saved_tensors) == 1
        job = ctx.entry.job
        if job.work is None and job.changes_nothing:
            return None, *grads
        return None, *exchange(job.back, grads)


class _Tie(torch.autograd.Function):
    """Outputs that come to depend on all inputs, so that every rank meets every exchange."""

    @staticmethod
    def forward(ctx: Any, has_zeros: tuple[bool, ...], *tensors: torch.Tensor) -> Carriers:
        count = len(tensors) - len(has_zeros)
        ctx.inputs = [(one.shape, one.dtype, one.device) for one in tensors[count:]]
        ctx.has_zeros = has_zeros
        # By it a checkpointed function that runs again comes this far on every rank.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_zero else None
            for (shape, dtype, device), is_zero in zip(ctx.inputs, ctx.has_zeros, strict=True)
        ]
        return None, *grads, *zeros


class _Elsewhere(torch.autograd.Function):
    """An output whose gradient goes back on other ranks. [Note: whose work]"""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor) -> torch.Tensor:
        return piece.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grads[0])


def enter(entry: Entry, carriers: Carriers) -> Carriers:
    """The carriers of an input where it is to be; the gradient goes back as the entry learns."""
    found: Carriers = _Enter.apply(entry, *carriers)  # type: ignore[no-untyped-call]  # torch's
    return found


def tie(outputs: Sequence[torch.Tensor], inputs: Sequence[tuple[torch.Tensor, bool]]) -> Carriers:
    """The outputs, which autograd now takes to depend on all inputs.

    They pass no gradient on to an input: not even zeros, unless the input says so.
    """
    tensors, has_zeros = zip(*inputs, strict=True)
    found: Carriers = _Tie.apply(has_zeros, *outputs, *tensors)  # type: ignore[no-untyped-call]  # torch's
    return found


def leave_elsewhere(piece: torch.Tensor) -> torch.Tensor:
    """An output whose gradient goes back on other ranks. [Note: whose work]"""
    found: torch.Tensor = _Elsewhere.apply(piece)  # type: ignore[no-untyped-call]  # torch's
    return found


def inputs_behind(outputs: Sequence[torch.Tensor], inputs: Sequence[Carriers]) -> frozenset[int]:
    """The numbers of the inputs that gradients of the outputs come to."""
    numbers = {
        get_gradient_edge(carrier).node: number
        for number, carriers in enumerate(inputs)
        for carrier in carriers
        if carrier.requires_grad
    }
    found: set[int] = set()
    left = [get_gradient_edge(piece).node for piece in outputs if piece.requires_grad]
    seen = set(left)
    while left:
        node = left.pop()
        if node in numbers:
            found.add(numbers[node])
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return frozenset(found)
