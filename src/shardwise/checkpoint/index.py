"""What is in a checkpoint: tensors, their boxes with file and byte range, plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from shardwise.geometry.box import Ints

__all__ = [
    "INDEX_NAME",
    "VERSION",
    "Index",
    "Kind",
    "SavedFile",
    "SavedPiece",
    "SavedTensor",
    "stamp_of",
]

INDEX_NAME = "shardwise.index.json"  # the file that says what is where
VERSION = 1  # of its format, [Note: index] in `index_file.py`

Kind = Literal["shardwise", "safetensors", "dcp"]  # formats of folders that can be read
Checksums = NDArray[np.uint64]


Stamp = tuple[int, int, int]  # of a file: one that takes its place has another


def stamp_of(path: Path) -> Stamp:
    """By which a file is known."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


class SavedFile(NamedTuple):
    """A file of a checkpoint; `rank` is the one that wrote it."""

    name: str
    size: int
    rank: int


class SavedPiece(NamedTuple):
    """One box of a tensor, at `start` in file number `file`; row-major if it has no `strides`."""

    box: Box
    file: int
    start: int
    nbytes: int
    checksum: int | None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor and where its boxes are. Boxes without elements are left out, unless all are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Boxes  # (n,): they tile the shape
    files: Ints  # (n,): numbers of `Index.files`
    starts: Ints  # (n,): first bytes in the files
    checksums: Checksums | None = None  # (n,)
    strides: Ints | None = None  # (n, ndim), in elements: of boxes that DCP wrote in other orders

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return Box.whole(self.shape).volume * self.dtype.itemsize

    def piece(self, number: int) -> SavedPiece:
        """The box of this number."""
        box = self.boxes[number]
        checksum = None if self.checksums is None else int(self.checksums[number])
        nbytes = box.volume * self.dtype.itemsize
        strides = None if self.strides is None else tuple(self.strides[number].tolist())
        file, start = int(self.files[number]), int(self.starts[number])
        return SavedPiece(box, file, start, nbytes, checksum, strides)

    def renamed(self, name: str) -> SavedTensor:
        """The same bytes by another name."""
        return replace(self, name=name)

    def pieces(self) -> Iterator[SavedPiece]:
        """All of them, in the order of the boxes."""
        return map(self.piece, range(len(self.boxes)))


@dataclass(frozen=True, eq=False)
class Index:
    """Everything about a checkpoint but its data. `load_index` reads it."""

    path: Path
    kind: Kind
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]
    structure: Any = field(repr=False)  # [Note: structure]
    world_size: int
    version: int = VERSION
    unreadable: dict[str, str] = field(default_factory=dict)  # of DCP: names, and why
    source: tuple[Path, Stamp] | None = None  # the file that it was read from

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def data_starts(self) -> Ints:
        """Of each file, where its first tensor begins: tensors of one cut have equal distances to
        it, although the headers of the files have different lengths."""
        first = np.array([file.size for file in self.files], np.int64)
        for tensor in self.tensors.values():
            np.minimum.at(first, tensor.files, tensor.starts)
        return first

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that it says, the same in every process: what ranks compare to agree."""
        digest = xxhash.xxh3_128(repr((self.kind, self.files, self.structure)).encode())
        for name, tensor in self.tensors.items():
            digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
            boxes = tensor.boxes
            for array in (boxes.starts, boxes.stops, tensor.files, tensor.starts, tensor.checksums):
                digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def check_is_current(self) -> None:
        """Raises if another checkpoint has taken its place since it was read.

        Files that are found to be there before this returns are its own.
        """
        if self.source is None:
            return
        path, stamp = self.source
        try:
            is_same = stamp_of(path) == stamp
        except OSError:
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"checkpoint {str(self.path)!r} was replaced or removed while it was read",
                fix="Load it again; keep one that is being read by saving to another path.",
            )

    def layout(self, name: str) -> Layout:
        """Which box of a tensor was saved by which rank."""
        tensor = self.tensors[name]
        ranks = np.array([file.rank for file in self.files], np.int64)
        return Layout(tensor.shape, tensor.boxes, ranks[tensor.files])

    def file_path(self, number: int) -> Path:
        """Where the file of that number is."""
        return self.path / self.files[number].name
