"""Reading boxes of saved tensors: only the bytes that lie in them."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from shardwise.checkpoint.writing import bytes_of
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from types import TracebackType

    from shardwise.checkpoint.index import Index, SavedPiece, SavedTensor
    from shardwise.geometry import Box

__all__ = ["Reader"]


class Reader:
    """Reads from the files of a checkpoint, each of which is opened once."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self.bytes_read = 0

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Fills `out`, of the shape of `box`, with that part of a tensor, in `out`'s dtype."""
        tensor = self._index.tensors[name]
        for number in _overlapping(tensor, box):
            piece = tensor.piece(number)
            common = box & piece.box
            assert common is not None
            self._read_part(tensor, piece, common, out[common.relative_to(box).slices()])

    def _read_part(
        self, tensor: SavedTensor, piece: SavedPiece, part: Box, out: torch.Tensor
    ) -> None:
        """`out` becomes `part` of a piece."""
        self.bytes_read += part.volume * tensor.dtype.itemsize
        within = part.relative_to(piece.box)
        is_plain = out.is_contiguous() and out.device.type == "cpu" and out.dtype == tensor.dtype
        if is_plain and piece.strides is None and _is_run(within, piece.box.shape):
            start = piece.start + _first(within, piece.box.shape) * tensor.dtype.itemsize
            self._read_run(piece.file, start, out)
        else:
            out.copy_(self._mapped(tensor, piece)[within.slices()])

    def _read_run(self, file: int, start: int, out: torch.Tensor) -> None:
        handle = self._opened(file)
        data = bytes_of(out)
        while len(data):
            count = os.preadv(handle, [data], start)
            if not count:
                raise self._cut_off(file)
            data, start = data[count:], start + count

    def _mapped(self, tensor: SavedTensor, piece: SavedPiece) -> torch.Tensor:
        """A piece as a tensor on the file itself: only what is looked at is read."""
        handle = self._opened(piece.file)
        if piece.file not in self._maps:
            # Copied on write, since torch warns of memory that cannot be written.
            self._maps[piece.file] = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        raw = np.frombuffer(self._maps[piece.file], np.uint8, piece.nbytes, piece.start)
        elements = torch.from_numpy(raw).view(tensor.dtype)
        if piece.strides is None:
            return elements.view(piece.box.shape)
        return elements.as_strided(piece.box.shape, piece.strides)

    def _opened(self, file: int) -> int:
        if file not in self._open:
            path, expected = self._index.file_path(file), self._index.files[file].size
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise DamagedError(
                    f"file {path.name!r} of {str(self._index.path)!r} cannot be read",
                    got=error.strerror,
                    fix="Put it back: every file of a checkpoint is needed.",
                ) from error
            self._open[file] = handle
            if os.fstat(handle).st_size != expected:
                raise self._cut_off(file)
        return self._open[file]

    def _cut_off(self, file: int) -> CheckpointError:
        found = os.fstat(self._open[file]).st_size
        return DamagedError(
            f"file {self._index.files[file].name!r} of {str(self._index.path)!r}",
            expected=f"{self._index.files[file].size} bytes",
            got=found,
            fix="It is cut off or was changed; take it from where it came from again.",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._maps.clear()  # each is unmapped when the last tensor on it is gone
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()


def _overlapping(tensor: SavedTensor, box: Box) -> list[int]:
    """The numbers of the boxes that have elements in common with `box`."""
    low = np.maximum(tensor.boxes.starts, np.array(box.start, np.int64))
    high = np.minimum(tensor.boxes.stops, np.array(box.stop, np.int64))
    found: list[int] = np.flatnonzero((low < high).all(axis=1)).tolist()
    return found


def _is_run(part: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is one run of elements in a row-major array of `shape`."""
    is_whole = True  # whether all dims behind this one are taken whole
    for size, length in zip(reversed(part.shape), reversed(shape), strict=True):
        if not is_whole and size != 1:
            return False
        is_whole = is_whole and size == length
    return True


def _first(part: Box, shape: tuple[int, ...]) -> int:
    """The position of a box's first element in a row-major array of `shape`."""
    position = 0
    for start, length in zip(part.start, shape, strict=True):
        position = position * length + start
    return position
