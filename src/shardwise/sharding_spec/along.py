"""What specs that cut a sequence of lengths share: boxes along one dim, and checked sizes."""

from __future__ import annotations

import numpy as np

from shardwise.arguments import whole_numbers
from shardwise.errors import SpecError
from shardwise.geometry.box import Boxes, Ints

__all__ = ["boxes_along", "check_sizes"]


def boxes_along(shape: tuple[int, ...], dim: int, starts: Ints, stops: Ints) -> Boxes:
    """Boxes `[starts[i], stops[i])` along `dim`, whole in the other dims."""
    low = np.zeros((len(starts), len(shape)), np.int64)
    high = np.tile(np.array(shape, dtype=np.int64), (len(starts), 1))
    low[:, dim], high[:, dim] = starts, stops
    return Boxes(low, high)


def check_sizes(sizes: object, parts: int, spec: str) -> tuple[int, ...]:
    """`sizes` as a tuple of `parts` lengths >= 0."""
    lengths = whole_numbers(sizes, f"{spec}: sizes")
    if len(lengths) != parts:
        raise SpecError(
            f"{spec}: sizes",
            expected=f"{parts} lengths, one per placement",
            got=f"{len(lengths)}: {list(lengths)!s:.80}",
        )
    return lengths
