"""Boxes of tensors in parts that fit a limit of memory, in the order of their elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.reading import Reader
from shardwise.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.mosaics import Mosaic

__all__ = ["blocks_of", "read_block", "read_mosaic"]


def blocks_of(box: Box, shape: tuple[int, ...], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """Parts of a box of a tensor, each a run of its row-major elements.

    Counted are the bytes of whole rows of the tensor: to read some columns of its rows may take
    the pages of all of them. One element is a part however small the limit is.
    """
    yield from _blocks(box, shape, itemsize, max_bytes, 0)


def _blocks(
    box: Box, shape: tuple[int, ...], itemsize: int, max_bytes: int, dim: int
) -> Iterator[Box]:
    row = itemsize * Box.whole(shape[dim + 1 :]).volume
    if dim == len(shape) or not box.volume or row * box.shape[dim] <= max_bytes:
        yield box
        return
    step = max(1, max_bytes // row)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        part = box.with_range(dim, start, stop)
        if row <= max_bytes:
            yield part
        else:
            yield from _blocks(part, shape, itemsize, max_bytes, dim + 1)


def read_block(index: Index, name: str, box: Box) -> torch.Tensor:
    """A part of a saved tensor, in its dtype."""
    out = torch.empty(box.shape, dtype=index.tensors[name].dtype)
    with Reader(index) as reader:  # a new one for each, so that pages do not stay mapped
        reader.read(name, box, out)
    return out


def read_mosaic(index: Index, mosaic: Mosaic, box: Box) -> torch.Tensor:
    """A part of a tensor that is made of saved ones of one dtype."""
    if len(mosaic.windows) == 1 and mosaic.windows[0].into == Box.whole(mosaic.shape):
        (window,) = mosaic.windows
        found = read_block(index, window.name, window.source_of(box))
        return found.permute(window.dims).contiguous()
    out = torch.empty(box.shape, dtype=index.tensors[mosaic.windows[0].name].dtype)
    for window in mosaic.windows:
        if (cut := window.cut(box)) is not None:
            found = read_block(index, cut.name, cut.source_of(cut.into))
            out[cut.into.relative_to(box).slices()].copy_(found.permute(cut.dims))
    return out
