"""Tensors that torch.save wrote: zip archives, in which the data lies as it is.

[Note: zips] A `.distcp` file of DCP is a row of such archives. The record `data.pkl` says dtype,
shape and strides, `data/0` is the memory of the tensor, without compression. So a tensor can be
read at its place in the large file, in part, once its archive's directory is read.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.restricted_pickles import read_pickle
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

__all__ = ["SavedChunk", "Slice", "check_archive", "find_chunk"]

_MOST_PICKLE = 1 << 20  # bytes of `data.pkl` for one tensor: a few hundred are usual
_STEP = 1 << 22  # bytes that are read at once
_LOCAL_HEADER = 30  # bytes, before a record's name
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A tensor in a file: its first byte and how it lies there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: row-major
    start: int


class Slice(io.RawIOBase):
    """A part of an open file, to be read as a file of its own."""

    def __init__(self, handle: int, offset: int, length: int) -> None:
        self._handle, self._offset, self._length = handle, offset, length
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position, from the start of the slice."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position, as a file's."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        """Fills the buffer from the position on; how many bytes there were."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._handle, [view], self._offset + self._at) if len(view) else 0
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Storage:
    """The memory that a tensor lies in."""

    dtype: torch.dtype | None  # None: the tensor says it
    key: str


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """What `data.pkl` says of a tensor."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def find_chunk(handle: int, offset: int, length: int, what: str) -> SavedChunk:
    """The tensor that torch.save wrote at `offset` of an open file; raises about `what`."""
    with _opened(handle, offset, length, what) as archive:
        return _found(archive, handle, offset, length, what)


def check_archive(handle: int, offset: int, length: int, what: str) -> None:
    """Reads all that torch.save wrote at `offset` of an open file, and compares its checksums."""
    with _opened(handle, offset, length, what) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename} is compressed")
            with archive.open(record) as opened:
                while opened.read(_STEP):
                    pass


@contextmanager
def _opened(handle: int, offset: int, length: int, what: str) -> Iterator[zipfile.ZipFile]:
    """The archive at `offset` of an open file; whatever is wrong with it is an error of `what`."""
    try:
        with zipfile.ZipFile(io.BufferedReader(Slice(handle, offset, length))) as archive:
            yield archive
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise DamagedError(
            what,
            expected="a tensor as torch.save writes it",
            got=f"{type(error).__name__}: {error}"[:300],
            fix="The file is cut off or damaged; take it from where it came from again.",
        ) from error


def _found(
    archive: zipfile.ZipFile, handle: int, offset: int, length: int, what: str
) -> SavedChunk:
    names = archive.namelist()
    (pickled,) = (name for name in names if name.endswith("/data.pkl"))
    root = pickled.removesuffix("data.pkl")
    if archive.getinfo(pickled).file_size > _MOST_PICKLE:
        raise ValueError(f"{pickled} of {archive.getinfo(pickled).file_size} bytes")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(
            what,
            expected="data of a little-endian machine",
            got=archive.read(f"{root}byteorder")[:10],
            fix="Load it with torch and save it again on a little-endian machine.",
        )
    tensor = _rebuilt(archive.read(pickled), what)
    record = archive.getinfo(f"{root}data/{tensor.storage.key}")
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.filename} is compressed")
    head = os.pread(handle, _LOCAL_HEADER, offset + record.header_offset)
    name_length, extra_length = struct.unpack("<26xHH", head)
    first = record.header_offset + _LOCAL_HEADER + name_length + extra_length
    nbytes = tensor.dtype.itemsize * _volume(tensor.shape)
    start = tensor.offset * tensor.dtype.itemsize
    if start + nbytes > record.file_size or first + record.file_size > length:
        raise ValueError(f"{nbytes} bytes of {tensor.shape} in a record of {record.file_size}")
    strides = None if _is_row_major(tensor) else _dense_strides(tensor, what)
    return SavedChunk(tensor.dtype, tensor.shape, strides, offset + first + start)


def _rebuilt(data: bytes, what: str) -> _Rebuilt:
    found = read_pickle(data, what, _known, _storage)
    if not isinstance(found, _Rebuilt):
        raise CheckpointError(what, expected="a tensor", got=type(found).__name__)
    sizes = (found.offset, *found.shape, *found.strides)
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError(f"sizes {sizes}")
    if len(found.shape) != len(found.strides):
        raise ValueError(f"strides {found.strides} of shape {found.shape}")
    return found


def _known(module: str, name: str) -> Any:
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return _rebuild_v2
    if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
        return _rebuild_v3
    if (module, name) == ("torch._utils", "_rebuild_parameter"):
        return _rebuild_parameter
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return name
    if module == "torch" and name in _STORAGES:
        return name
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def _storage(key: Any) -> _Storage:
    kind, storage, name = key[0], key[1], key[2]
    if kind != "storage" or not isinstance(name, str):
        raise ValueError(f"persistent id {kind!r}")
    return _Storage(_STORAGES.get(storage), name)


def _rebuild_v2(storage: _Storage, offset: Any, shape: Any, strides: Any, *_: Any) -> _Rebuilt:
    assert storage.dtype is not None
    return _Rebuilt(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_v3(
    storage: _Storage,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: torch.dtype,
    *_: Any,
) -> _Rebuilt:
    return _Rebuilt(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: _Rebuilt, *_: Any) -> _Rebuilt:
    return data


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


def _is_row_major(tensor: _Rebuilt) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in tensor.shape
        expected *= size
    return True


def _dense_strides(tensor: _Rebuilt, what: str) -> tuple[int, ...]:
    """The strides of dims in another order, such as those of channels_last."""
    expected = 1
    for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            raise CheckpointError(
                what,
                expected="a tensor of which the elements lie next to each other",
                got=f"strides {tensor.strides} of shape {tensor.shape}",
                fix="Load it with torch and save tensor.contiguous().",
            )
        expected *= size
    return tensor.strides
