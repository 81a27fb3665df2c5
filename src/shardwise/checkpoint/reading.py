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

from shardwise.checkpoint.regions import parts_of
from shardwise.checkpoint.writing import bytes_of, is_plain_memory
from shardwise.errors import DamagedError

if TYPE_CHECKING:
    from types import TracebackType

    from shardwise.checkpoint.index import Index, SavedTensor
    from shardwise.checkpoint.regions import Part, Region
    from shardwise.geometry import Box

__all__ = ["Reader", "check_file"]

_STEP = 1 << 23  # bytes that are hashed or converted at a time
_WINDOW = 1 << 24  # bytes of a mapped file that are looked at before they are let go
# What numpy, which knows fewer dtypes than torch, takes elements of so many bytes for.
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


class _Place(NamedTuple):
    """Where a saved box begins, what its elements are, and how many may be looked at at a time."""

    file: int
    start: int
    dtype: torch.dtype
    most: int


class Reader:
    """Reads from the files of a checkpoint, each of which is opened once. Threads may share it."""

    def __init__(self, index: Index, *, most: int | None = None) -> None:
        """`most` caps the bytes of a mapped file that are looked at at a time."""
        self.index = index
        self._window = _WINDOW if most is None else max(min(most, _WINDOW), mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._parts: dict[tuple[int, Box], tuple[Part, ...]] = {}
        self.bytes_read = 0  # of tensors
        self.bytes_hashed = 0

    def read(
        self, name: str, box: Box, out: torch.Tensor, *, via: torch.dtype | None = None
    ) -> None:
        """Fills `out`, of the shape of `box`, with that part of a tensor, in `out`'s dtype.

        Floating-point values are rounded to `via` on the way.
        """
        tensor = self.index.tensors[name]
        is_rounded = _is_rounded(tensor.dtype, out, via)
        is_plain = out.dtype == tensor.dtype and not is_rounded
        copies = 1 if out.is_cpu and not is_rounded else 2  # one is made here on the way
        most = self._window // (tensor.dtype.itemsize * copies)
        for part in self._parts_of(tensor, box):
            view = out if part.into is None else out[part.into]
            file, start = int(tensor.files[part.number]), int(tensor.starts[part.number])
            if is_plain and part.is_run and is_plain_memory(view):
                self._read_run(file, start + part.region.first * tensor.dtype.itemsize, view)
            else:
                self._copy(_Place(file, start, tensor.dtype, most), part.region, view, via)
        with self._lock:
            self.bytes_read += box.volume * tensor.dtype.itemsize  # saved boxes tile the tensor

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

    def _parts_of(self, tensor: SavedTensor, box: Box) -> tuple[Part, ...]:
        """Kept for the next tensor, since those of one cut have one list of boxes."""
        if tensor.strides is not None:
            return parts_of(tensor, box)
        key = id(tensor.boxes), box
        if key not in self._parts:
            self._parts[key] = parts_of(tensor, box)
        return self._parts[key]

    def _copy(
        self, place: _Place, region: Region, out: torch.Tensor, via: torch.dtype | None
    ) -> None:
        """`out` becomes a region of a saved box. [Note: windows of a file]"""
        span = region.span
        if span > place.most:
            for box in region.windows(place.most):
                self._copy(place, region.at(box), out[box.slices()], via)
            return
        memory = self._mapped(place.file)
        first = place.start + region.first * place.dtype.itemsize
        _convert(_tensor_on(memory, first, region, place.dtype), out, via)
        # Takes it out of this process's memory; the system keeps it.
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(mmap.MADV_DONTNEED, page, first - page + span * place.dtype.itemsize)

    def _read_run(self, file: int, start: int, out: torch.Tensor) -> None:
        handle = self._opened(file)
        data = bytes_of(out)
        while len(data):
            count = os.preadv(handle, [data], start)
            if not count:  # it was as long as it should be when it was opened
                self._check_size(file)
                raise _wrong_size(self.index, file, "fewer")
            data, start = data[count:], start + count

    def _mapped(self, file: int) -> mmap.mmap:
        if file not in self._maps:
            handle = self._opened(file)
            # Copied on write, since torch warns of memory that cannot be written.
            memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
            self._maps.setdefault(file, memory)  # another thread may have been first
        return self._maps[file]

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


def _tensor_on(memory: mmap.mmap, first: int, region: Region, dtype: torch.dtype) -> torch.Tensor:
    """A region as a tensor on a mapped file: only what is looked at is read."""
    strides = [step * dtype.itemsize for step in region.strides]
    words: np.ndarray[Any, Any] = np.ndarray(
        region.shape, _WORDS[dtype.itemsize], memory, first, strides
    )
    return torch.from_numpy(words).view(dtype)


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
