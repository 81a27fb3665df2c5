"""Tensors made of boxes of saved ones.

[Note: windows] Whatever a rule of a `map` says, a target ends up as boxes, each of which is a box
of a saved tensor, perhaps with its dims in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mosaic", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """A box of a target that is a box of the saved tensor `name`, of which `start` is the corner.

    Dim d of the target is dim `dims[d]` of the saved tensor.
    """

    into: Box
    name: str
    start: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether places in it are those in the saved tensor."""
        return self.start == self.into.start and self.dims == tuple(range(len(self.dims)))

    def source_of(self, box: Box) -> Box:
        """Where a part of `into` is in the saved tensor."""
        if self.is_plain:
            return box
        low = list(self.start)
        high = list(self.start)
        for d, dim in enumerate(self.dims):
            low[dim] += box.start[d] - self.into.start[d]
            high[dim] += box.stop[d] - self.into.start[d]
        return Box(tuple(low), tuple(high))

    def cut(self, box: Box) -> Window | None:
        """The part in `box`."""
        common = self.into & box
        if common is None:
            return None
        return Window(common, self.name, self.source_of(common).start, self.dims)

    def shift(self, offset: Sequence[int]) -> Window:
        """The same window, placed so much further."""
        return Window(self.into.shift(offset), self.name, self.start, self.dims)

    def permute(self, dims: Sequence[int]) -> Window:
        """Dim d becomes what dim `dims[d]` was."""
        into = self.into.along(dims)
        return Window(into, self.name, self.start, tuple(self.dims[dim] for dim in dims))


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A tensor of this shape, of which the windows are a tiling; none if it has no elements."""

    shape: tuple[int, ...]
    windows: tuple[Window, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Mosaic:
        """A saved tensor as it is."""
        dims = tuple(range(len(shape)))
        window = Window(Box.whole(shape), name, (0,) * len(shape), dims)
        return cls(shape, (window,) if window.into.volume else ())

    def cut(self, dim: int, start: int, stop: int) -> Mosaic:
        """The part `[start, stop)` of a dim."""
        box = Box.whole(self.shape).with_range(dim, start, stop)
        back = tuple(-low for low in box.start)
        found = (window.cut(box) for window in self.windows)
        return Mosaic(box.shape, tuple(window.shift(back) for window in found if window))

    def permute(self, dims: Sequence[int]) -> Mosaic:
        """Dim d becomes what dim `dims[d]` was."""
        shape = tuple(self.shape[dim] for dim in dims)
        return Mosaic(shape, tuple(window.permute(dims) for window in self.windows))

    @classmethod
    def joined(cls, parts: Sequence[Mosaic], dim: int) -> Mosaic:
        """The parts one after the other along a dim; they are alike in the others."""
        windows: list[Window] = []
        shape = list(parts[0].shape)
        shape[dim] = 0
        for one in parts:
            offset = [0] * len(shape)
            offset[dim] = shape[dim]
            windows += [window.shift(offset) for window in one.windows]
            shape[dim] += one.shape[dim]
        return cls(tuple(shape), tuple(windows))
