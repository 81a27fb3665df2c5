"""Reading boxes of saved tensors: only the bytes that lie in them.

[Note: windows of a file] What is one run of bytes, and needs no conversion, is read straight into
the tensor. The rest is copied from the file mapped into memory, a few MiB of the file at a time:
what a process has looked at of a mapped file counts as its memory until it says that it is done.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
import xxhash

from shardwise.checkpoint.writing import bytes_of, is_plain_memory
from shardwise.errors import DamagedError

if TYPE_CHECKING:
    from types import TracebackType

    from shardwise.checkpoint.index import Index, SavedPiece, SavedTensor
    from shardwise.geometry import Box

__all__ = ["Reader", "check_file", "slices_in"]

_STEP = 1 << 23  # bytes that are hashed or converted at a time
_WINDOW = 1 << 24  # bytes of a mapped file that are looked at before they are let go


class _MappedFile(NamedTuple):
    """A file in memory, and where that is."""

    memory: mmap.mmap
    address: int

    @classmethod
    def of(cls, handle: int) -> _MappedFile:
        # Copied on write, since torch warns of memory that cannot be written.
        memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        return cls(memory, np.frombuffer(memory, np.uint8).ctypes.data)


class Reader:
    """Reads from the files of a checkpoint, each of which is opened once. Threads may share it."""

    def __init__(self, index: Index, *, most: int | None = None) -> None:
        """`most` caps the bytes of a mapped file that are looked at at a time."""
        self.index = index
        self._window = _WINDOW if most is None else max(min(most, _WINDOW), mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._maps: dict[int, _MappedFile] = {}
        self.bytes_read = 0  # of tensors
        self.bytes_hashed = 0

    def read(
        self, name: str, box: Box, out: torch.Tensor, *, via: torch.dtype | None = None
    ) -> None:
        """Fills `out`, of the shape of `box`, with that part of a tensor, in `out`'s dtype.

        Floating-point values are rounded to `via` on the way.
        """
        tensor = self.index.tensors[name]
        for number in self.overlapping(name, box):
            piece = tensor.piece(number)
            common = box & piece.box
            assert common is not None
            view = out if common == box else out[slices_in(common, box)]
            self._read_part(tensor, piece, common, view, via)

    def overlapping(self, name: str, box: Box) -> list[int]:
        """The numbers of a tensor's saved boxes that have elements in common with `box`."""
        boxes = self.index.tensors[name].boxes
        low = np.maximum(boxes.starts, np.array(box.start, np.int64))
        high = np.minimum(boxes.stops, np.array(box.stop, np.int64))
        found: list[int] = np.flatnonzero((low < high).all(axis=1)).tolist()
        return found

    def verify(self, name: str, number: int) -> None:
        """Raises if the bytes of a saved box are not those that were saved."""
        tensor = self.index.tensors[name]
        piece = tensor.piece(number)
        checksum = xxhash.xxh3_64()
        room = torch.empty(min(_STEP, piece.nbytes), dtype=torch.uint8)
        for start in range(0, piece.nbytes, _STEP):
            part = room[: min(_STEP, piece.nbytes - start)]
            self._read_run(piece.file, piece.start + start, part)
            checksum.update(bytes_of(part))
        self.bytes_hashed += piece.nbytes
        if checksum.intdigest() != piece.checksum:
            raise DamagedError(
                f"box {piece.box} of {name!r} in file {self.index.files[piece.file].name!r} of "
                f"{str(self.index.path)!r}",
                expected=f"bytes with checksum {piece.checksum or 0:016x}",
                got=f"{checksum.intdigest():016x}",
                fix="The file was changed or damaged; take it from where it came from again.",
            )

    def _read_part(
        self,
        tensor: SavedTensor,
        piece: SavedPiece,
        part: Box,
        out: torch.Tensor,
        via: torch.dtype | None,
    ) -> None:
        """`out` becomes `part` of a piece."""
        with self._lock:
            self.bytes_read += part.volume * tensor.dtype.itemsize
        is_plain = is_plain_memory(out) and out.dtype == tensor.dtype
        is_plain = is_plain and piece.strides is None and not _is_rounded(tensor.dtype, out, via)
        if is_plain and _is_run(part, piece.box):
            start = piece.start + _first(part, piece.box) * tensor.dtype.itemsize
            self._read_run(piece.file, start, out)
        else:
            source = self._mapped(tensor, piece)[slices_in(part, piece.box)]
            for rows in _windows(source, self._window):
                _convert(source[rows], out[rows], via)
                self._let_go(piece.file, source[rows])

    def _read_run(self, file: int, start: int, out: torch.Tensor) -> None:
        handle = self._opened(file)
        data = bytes_of(out)
        while len(data):
            count = os.preadv(handle, [data], start)
            if not count:  # it was as long as it should be when it was opened
                self._check_size(file)
                raise _wrong_size(self.index, file, "fewer")
            data, start = data[count:], start + count

    def _mapped(self, tensor: SavedTensor, piece: SavedPiece) -> torch.Tensor:
        """A piece as a tensor on the file itself: only what is looked at is read."""
        handle = self._opened(piece.file)
        with self._lock:
            if piece.file not in self._maps:
                self._maps[piece.file] = _MappedFile.of(handle)
        memory = self._maps[piece.file].memory
        raw = np.frombuffer(memory, np.uint8, piece.nbytes, piece.start)
        elements = torch.from_numpy(raw).view(tensor.dtype)
        if piece.strides is None:
            return elements.view(piece.box.shape)
        return elements.as_strided(piece.box.shape, piece.strides)

    def _let_go(self, file: int, seen: torch.Tensor) -> None:
        """Takes a part of a mapped file out of this process's memory; the system keeps it."""
        one = self._maps[file]
        first = (seen.data_ptr() - one.address) // mmap.PAGESIZE * mmap.PAGESIZE
        steps = zip(seen.shape, seen.stride(), strict=True)
        span = seen.itemsize * (1 + sum((size - 1) * step for size, step in steps))
        one.memory.madvise(mmap.MADV_DONTNEED, first, min(span, len(one.memory) - first))

    def _opened(self, file: int) -> int:
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = os.open(self.index.file_path(file), os.O_RDONLY)
                except OSError as error:
                    raise _absent(self.index, file, error) from error
                self.index.check_is_current()
                self._check_size(file)
                self._check_header(file)
            return self._open[file]

    def _check_header(self, file: int) -> None:
        """Raises unless the file's header ends where the index says that data begins."""
        if self.index.kind != "shardwise":
            return  # of others the index was made of the headers
        end = 8 + int.from_bytes(os.pread(self._open[file], 8, 0), "little")
        if end != self.index.data_starts[file]:
            raise DamagedError(
                f"file {self.index.files[file].name!r} of {str(self.index.path)!r}",
                expected=f"a header of {self.index.data_starts[file]} bytes",
                got=end,
                fix="It is of another checkpoint, or damaged; take it from where it came from "
                "again.",
            )

    def _check_size(self, file: int) -> None:
        _check_size(self.index, file, os.fstat(self._open[file]).st_size)

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


def slices_in(part: Box, box: Box) -> tuple[slice, ...]:
    """Index that cuts a part of a box out of a tensor of the box."""
    return tuple(
        slice(low - origin, high - origin)
        for low, high, origin in zip(part.start, part.stop, box.start, strict=True)
    )


def check_file(index: Index, file: int) -> None:
    """Raises unless a file of a checkpoint is there, and as long as the index says."""
    try:
        size = os.stat(index.file_path(file)).st_size
    except OSError as error:
        raise _absent(index, file, error) from error
    _check_size(index, file, size)


def _check_size(index: Index, file: int, size: int) -> None:
    """Raises unless a file of this size is as long as the index says."""
    if size != index.files[file].size:
        raise _wrong_size(index, file, size)


def _absent(index: Index, file: int, error: OSError) -> DamagedError:
    index.check_is_current()
    return DamagedError(
        f"file {index.files[file].name!r} of {str(index.path)!r} cannot be read",
        got=error.strerror,
        fix="Put it back: every file of a checkpoint is needed.",
    )


def _wrong_size(index: Index, file: int, size: object) -> DamagedError:
    return DamagedError(
        f"file {index.files[file].name!r} of {str(index.path)!r}",
        expected=f"{index.files[file].size} bytes",
        got=size,
        fix="It is cut off or was changed; take it from where it came from again.",
    )


def _windows(source: torch.Tensor, most: int) -> list[Any]:
    """Indices of parts of a mapped tensor; each spans `most` bytes of the file, or one row."""
    if source.ndim == 0:
        return [...]
    rows = max(most // max(source.stride(0) * source.itemsize, 1), 1)
    return [slice(start, start + rows) for start in range(0, len(source), rows)]


def _is_rounded(saved: torch.dtype, out: torch.Tensor, via: torch.dtype | None) -> bool:
    """Whether values go through a dtype that is neither the saved one nor that of `out`."""
    return via is not None and saved.is_floating_point and via not in (saved, out.dtype)


def _convert(source: torch.Tensor, out: torch.Tensor, via: torch.dtype | None) -> None:
    """`out` becomes `source`; a little at a time where a copy in another dtype is needed."""
    if not _is_rounded(source.dtype, out, via):
        out.copy_(source)
        return
    if source.ndim == 0:
        source, out = source[None], out[None]
    length = max(_STEP // source[0].nbytes, 1)
    for start in range(0, len(source), length):
        out[start : start + length].copy_(source[start : start + length].to(via))


def _is_run(part: Box, box: Box) -> bool:
    """Whether a part of a box is one run of its elements in row-major order."""
    is_whole = True  # whether all dims behind this one are taken whole
    for size, length in zip(reversed(part.shape), reversed(box.shape), strict=True):
        if not is_whole and size != 1:
            return False
        is_whole = is_whole and size == length
    return True


def _first(part: Box, box: Box) -> int:
    """The position of a part's first element among those of a box in row-major order."""
    position = 0
    for start, origin, length in zip(part.start, box.start, box.shape, strict=True):
        position = position * length + start - origin
    return position
