"""From the shapes of pieces back to the global shape of which a spec makes them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["find_shape"]

Shape = tuple[int, ...]


def find_shape(spec: ShardingSpec, pieces: Mapping[int, tuple[Shape, ...]]) -> Shape | None:
    """The global shape that `spec` cuts into these pieces of each rank, if there is one.

    A dim of which there are g parts, each on as many pieces as any other, has the size that the
    pieces add up to, divided by how many there are of a part. So a spec is tried on few shapes.
    """
    shapes = [shape for held in pieces.values() for shape in held]
    if not shapes or len({len(shape) for shape in shapes}) > 1:
        return None
    for shape in itertools.product(*[_sizes(sizes) for sizes in zip(*shapes, strict=True)]):
        try:
            layout = spec.layout(shape)
        except ShardwiseError:  # a spec of other sizes
            continue
        if all(
            held == tuple(box.shape for box in layout.boxes_of(rank))
            for rank, held in pieces.items()
        ):
            return shape
    return None


def _sizes(parts: tuple[int, ...]) -> Iterator[int]:
    """What a dim can measure that has these parts: the whole, then what is cut the less."""
    total, most = sum(parts), max(parts)
    tried = set()
    for times in range(len(parts), 0, -1):
        size = total // times
        if len(parts) % times == 0 and total % times == 0 and size >= most and size not in tried:
            tried.add(size)
            yield size
