"""A product as einsum sees it: its dims have labels, and what has one label has one range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardwise.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardwise.ops.rule import Invoke

__all__ = ["ALIKE", "Factor", "Form", "Labels", "Run", "Scale"]

# The label of each dim; None for a dim of size 1 that is broadcast.
Labels = tuple[int | None, ...]
# What a block gives: (the call's function, a tensor per operand, the block's range of each label).
Run: TypeAlias = "Callable[[Invoke, Sequence[torch.Tensor], Box], Any]"


class Scale(NamedTuple):
    """How the indices of a dim stand to its label: so many of them are so many units of it."""

    indices: int
    units: int

    def units_of(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """The units of a range of indices; of numbers or arrays of them."""
        return start // self.indices * self.units, -(-stop // self.indices) * self.units

    def indices_of(self, start: int, stop: int) -> tuple[int, int]:
        """The indices that a range of units has a part of."""
        return start // self.units * self.indices, -(-stop // self.units) * self.indices


ALIKE = Scale(1, 1)  # each index is one unit


class Factor(NamedTuple):
    """An operand of a product: where it stands among the operands of the call, and its labels."""

    place: int
    labels: Labels
    scales: tuple[Scale, ...] = ()  # of each dim; nothing: all are their labels

    def scale(self, dim: int) -> Scale:
        """Heads of keys that serve several heads of queries are several units of their label."""
        return self.scales[dim] if self.scales else ALIKE


@dataclass(frozen=True, slots=True)
class Form:
    """A product as einsum sees it. The addend is added to the product, broadcast to its shape."""

    sizes: tuple[int, ...]  # of each label
    factors: tuple[Factor, ...]
    output: tuple[int, ...]  # the label of each dim; labels that are not in it are summed over
    addend: Factor | None = None
    # Labels that nothing may cut. [Note: whole labels] in `whole_labels.py`.
    whole: frozenset[int] = frozenset()
    run: Run | None = None  # in place of the call's own function
    # Blocks of which the call's own function gives what `run` would.
    is_own: Callable[[Box], bool] = lambda space: False
    # Labels of further outputs: the same as those of the first, but for whole ones. Only if nothing
    # that may be cut is summed over.
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return self.shapes[0]

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The labels of each output."""
        return (self.output, *self.others)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each output."""
        return tuple(tuple(self.sizes[label] for label in labels) for labels in self.outputs)

    @property
    def summed(self) -> tuple[int, ...]:
        """The labels that are summed over."""
        return tuple(k for k in range(len(self.sizes)) if k not in self.output)

    def results(
        self, invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box
    ) -> Sequence[torch.Tensor]:
        """What a block gives, one per output."""
        if self.run is None or self.is_own(space):
            found = invoke(*tensors)
        else:
            found = self.run(invoke, tensors, space)
        return found if self.others else (found,)

    def inside(self, space: Box, piece: Box) -> Box:
        """The part of a block that goes into a piece of the output."""
        start, stop = list(space.start), list(space.stop)
        for label, low, high in zip(self.output, piece.start, piece.stop, strict=True):
            start[label], stop[label] = low, high
        return Box(tuple(start), tuple(stop))
