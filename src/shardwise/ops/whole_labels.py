"""Layouts of factors in which nothing is cut that a product needs whole.

[Note: whole labels] Attention, convolutions and look-ups are products whose blocks torch cannot
compute of parts of some labels: the positions of a sequence, the pixels of a picture. An operand
that is cut along one of those is brought together along it first; its holders share the work along
another dim, or all do it, whichever moves fewer bytes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from shardwise.geometry import Box, Entry, Layout, common_pieces, even_cuts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.ops.forms import Factor, Form, Scale

__all__ = ["usable_layouts"]


def usable_layouts(form: Form, factor: Factor, layout: Layout) -> list[Layout]:
    """The layout, or those to choose from if it cuts what has to be whole. [Note: whole labels]"""
    full = [box for box in layout.boxes if not box.is_empty]
    dims = [dim for dim, label in enumerate(factor.labels) if label in form.whole]
    dims += [dim for dim in range(len(layout.shape)) if _splits_units(full, dim, factor.scale(dim))]
    if all(_is_whole(box, layout.shape, dims) for box in full):
        return [layout]
    return [_whole_along(factor, layout, dims, is_shared=is_shared) for is_shared in (True, False)]


def _splits_units(boxes: Iterable[Box], dim: int, scale: Scale) -> bool:
    return any(box.start[dim] % scale.indices or box.stop[dim] % scale.indices for box in boxes)


def _is_whole(box: Box, shape: tuple[int, ...], dims: Sequence[int]) -> bool:
    return all(box.start[dim] == 0 and box.stop[dim] == shape[dim] for dim in dims)


def _whole_along(factor: Factor, layout: Layout, dims: Sequence[int], *, is_shared: bool) -> Layout:
    """The layout with these dims whole, each part with those ranks that hold some of it.

    `is_shared`: they share it along another dim, if it has one that is long enough.
    """
    widened = {
        box: Box(
            tuple(0 if dim in dims else low for dim, low in enumerate(box.start)),
            tuple(layout.shape[d] if d in dims else high for d, high in enumerate(box.stop)),
        )
        for box in layout.boxes
        if not box.is_empty
    }
    pieces = common_pieces(list(widened.values()))
    holders: dict[Box, set[int]] = defaultdict(set)
    for box, rank, _ in layout:
        for piece in pieces.get(widened.get(box, box), ()):
            holders[piece].add(rank)
    entries: list[Entry] = []
    for piece, ranks in holders.items():
        shared = _shared(factor, piece, sorted(ranks), dims) if is_shared else None
        entries += shared or [Entry(piece, rank) for rank in sorted(ranks)]
    return Layout.of(layout.shape, entries)


def _shared(
    factor: Factor, piece: Box, ranks: Sequence[int], dims: Sequence[int]
) -> list[Entry] | None:
    """The piece cut along the first dim that has enough for all, but for `dims`."""
    for dim, size in enumerate(piece.shape):
        step = factor.scale(dim).indices  # what belongs together stays so: the channels of a group
        if dim not in dims and size // step >= len(ranks):
            cuts = (even_cuts(size // step, len(ranks)) * step + piece.start[dim]).tolist()
            return [
                Entry(piece.with_range(dim, low, high), rank)
                for rank, (low, high) in zip(ranks, itertools.pairwise(cuts), strict=True)
                if low < high
            ]
    return None
