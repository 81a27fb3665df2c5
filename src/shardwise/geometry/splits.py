"""The one place for split arithmetic.

A cut dim is described by its *cuts*: `n + 1` non-decreasing positions for `n` pieces, from 0 to
the dim's size. Piece `i` is `[cuts[i], cuts[i + 1])`; equal neighbours are an empty piece.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import items, whole_number, whole_numbers
from shardwise.errors import GeometryError
from shardwise.geometry.box import Box, Ints, as_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "block_cuts",
    "chunk_length",
    "even_cuts",
    "even_piece",
    "flat_range_boxes",
    "product_boxes",
    "sized_cuts",
    "split_size",
    "weighted_sizes",
]


def split_size(size: int, parts: int) -> int:
    """Length of a full piece when torch.chunk cuts `size` into `parts`."""
    return -(-whole_number(size, "size") // whole_number(parts, "number of parts", least=1))


def chunk_length(size: int, length: int, index: int) -> int:
    """Length of piece `index` when `size` is cut into pieces of `length`; 0 past the end."""
    return max(min(size, length * (index + 1)) - length * index, 0)


def even_cuts(size: int, parts: int) -> Ints:
    """Cuts of torch.chunk, except that there are always `parts` pieces: the last may be empty.

    >>> even_cuts(5, 4).tolist()
    [0, 2, 4, 5, 5]
    """
    length = split_size(size, parts)
    num_full = size // length if length else 0  # whose ends are below 2**63
    cuts = np.full(parts + 1, size, dtype=np.int64)
    cuts[: num_full + 1] = np.arange(min(num_full, parts) + 1, dtype=np.int64) * length
    return cuts


def even_piece(size: int, parts: int, index: int) -> tuple[int, int]:
    """The piece `index` of `even_cuts(size, parts)`, without making the others."""
    length = split_size(size, parts)
    return min(index * length, size), min((index + 1) * length, size)


def sized_cuts(size: int, sizes: Sequence[int]) -> Ints:
    """Cuts for chosen lengths, which must add up to `size`.

    >>> sized_cuts(9, [2, 0, 7]).tolist()
    [0, 2, 2, 9]
    """
    lengths = whole_numbers(sizes, "sizes")
    if sum(lengths) != size:
        raise GeometryError(
            "sizes",
            expected=f"lengths that add up to {size}",
            got=f"{_short(lengths)}, together {sum(lengths)}",
            fix="Change a length, or leave sizes out for an even cut.",
        )
    cuts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.array(lengths, dtype=np.int64), out=cuts[1:])
    return cuts


def weighted_sizes(size: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole lengths in proportion to `weights` that add up to `size`.

    Each length is its exact share rounded up or down; the largest remainders are rounded up
    (the first among equals), so unequal devices get work by their speed or memory.

    >>> weighted_sizes(10, [1, 1, 2])
    (3, 2, 5)
    """
    whole_number(size, "size")
    given = items(weights, "weights", of="numbers")
    listed = [float(weight) if isinstance(weight, Real) else math.nan for weight in given]
    if not all(math.isfinite(w) and w >= 0 for w in listed) or not any(listed):
        raise GeometryError("weights", expected="numbers >= 0, at least one above 0", got=given)
    shares = [Fraction(weight) for weight in listed]  # exact: floats would lose whole elements
    exact = [size * share / sum(shares) for share in shares]
    lengths = [math.floor(length) for length in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: lengths[k] - exact[k])
    for k in by_remainder[: size - sum(lengths)]:
        lengths[k] += 1
    return tuple(lengths)


def block_cuts(size: int, block: int) -> Ints:
    """Cuts into blocks of length `block`, the last one shorter; dealt out in turn when cyclic.

    >>> block_cuts(7, 3).tolist()
    [0, 3, 6, 7]
    """
    starts = np.arange(0, whole_number(size, "size"), whole_number(block, "block", least=1))
    return np.append(starts, np.int64(size))


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that are elements `[start, stop)` of the row-major order, in that order.

    At most `2 * ndim - 1` of them: up the dims to whole slabs, and down again.

    >>> [str(box) for box in flat_range_boxes((4, 5), 3, 17)]
    ['[0:1, 3:5]', '[1:3, 0:5]', '[3:4, 0:2]']
    """
    sizes = as_shape(shape)
    start, stop = whole_number(start, "start"), whole_number(stop, "stop")
    strides = [1]
    for size in reversed(sizes):
        strides.append(strides[-1] * size)
    numel, strides = strides[-1], strides[-2::-1]  # strides[dim] = elements of one slice of dim
    if not 0 <= start <= stop <= numel:
        raise GeometryError(
            "flat range", expected=f"0 <= start <= stop <= {numel}", got=f"[{start}, {stop})"
        )
    if start == 0 and stop == numel and numel:
        return [Box.whole(sizes)]
    boxes = []
    while start < stop:
        # The outermost dim of which whole slices begin here and fit: one box, then on.
        dim = next(d for d, n in enumerate(strides) if start % n == 0 and n <= stop - start)
        first = start // strides[dim] % sizes[dim]
        count = min(sizes[dim] - first, (stop - start) // strides[dim])
        low = [start // strides[d] % sizes[d] for d in range(dim)]
        boxes.append(
            Box(
                (*low, first, *[0] * (len(sizes) - dim - 1)),
                (*[c + 1 for c in low], first + count, *sizes[dim + 1 :]),
            )
        )
        start += count * strides[dim]
    return boxes


def product_boxes(intervals: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Starts and stops, (n, ndim), of all products of one interval per dim, row-major.

    `intervals[dim]` is (starts, stops) of that dim's pieces.
    """
    if not intervals:
        return np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64)
    picks = np.indices([len(low) for low, _ in intervals]).reshape(len(intervals), -1)
    starts = np.stack([low[pick] for (low, _), pick in zip(intervals, picks, strict=True)], axis=1)
    stops = np.stack([high[pick] for (_, high), pick in zip(intervals, picks, strict=True)], axis=1)
    return starts, stops


def _short(sizes: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, sizes[:most]))
    return f"[{shown}]" if len(sizes) <= most else f"[{shown}, ... ({len(sizes)} lengths)]"
