"""What is in a checkpoint: tensors, their boxes with file and byte range, plain values.

[Note: index] `shardwise.index.json` is one JSON object:

    format, version     "shardwise checkpoint", 1
    world_size          how many ranks saved
    files               [name, bytes, rank] of each
    first               of each file, where its first tensor begins
    cuts                the different ways in which tensors are cut and spread: of each box its
                        start, size and file (a number of `files`)
    tensors             by name: dtype (a code of safetensors), shape, cut (a number of `cuts`),
                        start (of each box its first byte, counted from the file's `first`; one
                        number if it is the same for all) and checksum: of each box 16 hexadecimal
                        digits (XXH3, 64 bits)
    state               the nested state, with names of tensors ([Note: structure])
    checksum            of all bytes of the index before it; the last key

Boxes lie in files in row-major order. All that an index says is checked when it is read: boxes
tile their tensors, byte ranges are as long as their boxes and lie in their files, files lie in the
folder. So its sizes are no larger than files that are there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.checkpoint.dtypes import code_of, dtype_of
from shardwise.checkpoint.structure import tensor_names
from shardwise.errors import CheckpointError, DamagedError, ShardwiseError
from shardwise.geometry import Box, Layout
from shardwise.geometry.box import Boxes, as_shape, rows_of_ints
from shardwise.geometry.tiling import check_tiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardwise.geometry.box import Ints

__all__ = [
    "INDEX_NAME",
    "Index",
    "Kind",
    "SavedFile",
    "SavedPiece",
    "SavedTensor",
    "decode_index",
    "encode_index",
    "stamp_of",
]

INDEX_NAME = "shardwise.index.json"  # the file that says what is where
VERSION = 1
_FORMAT = "shardwise checkpoint"
_DIGITS = 16  # of a checksum
_END = ',"checksum":"'
# What is raised by code that takes a stranger's values for what they should be.
_WRONG = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)

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


def encode_index(index: Index) -> bytes:
    """The bytes of `shardwise.index.json`."""
    first = index.data_starts
    cuts = _Cuts()
    tensors = []
    for name, tensor in index.tensors.items():
        assert tensor.checksums is not None
        starts = tensor.starts - first[tensor.files]
        is_same = bool((starts == starts[0]).all())
        entry = {
            "dtype": code_of(tensor.dtype, name),
            "shape": tensor.shape,
            "cut": cuts.number_of(tensor),
            "start": int(starts[0]) if is_same else starts.tolist(),
        }
        # Most of the text is checksums, which need none of what `json` does to strings.
        sums = tensor.checksums.astype(">u8").tobytes().hex()
        tensors.append(f'{_json(name)}:{_json(entry)[:-1]},"checksum":"{sums}"}}')
    body = {
        "format": _json(_FORMAT),
        "version": _json(index.version),
        "world_size": _json(index.world_size),
        "files": _json(index.files),
        "first": _json(first.tolist()),
        "cuts": _json(cuts.listed),
        "tensors": f"{{{','.join(tensors)}}}",
        "state": _json(index.structure),
    }
    inside = ",".join(f'"{key}":{text}' for key, text in body.items())
    text = f"{{{inside}{_END}".encode()
    return text + f'{xxhash.xxh3_64_hexdigest(text)}"}}\n'.encode()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Cuts:
    """The different ways in which tensors are cut and spread over files."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._numbers: dict[tuple[bytes, ...], int] = {}
        self._of_objects: dict[tuple[int, int], int] = {}  # boxes and files that are shared

    def number_of(self, tensor: SavedTensor) -> int:
        """Which of `listed` the tensor has."""
        objects = (id(tensor.boxes), id(tensor.files))
        if objects not in self._of_objects:
            self._of_objects[objects] = self._found(tensor.boxes, tensor.files)
        return self._of_objects[objects]

    def _found(self, boxes: Boxes, files: Ints) -> int:
        key = (boxes.starts.tobytes(), boxes.stops.tobytes(), files.tobytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.listed)
            cut = {"starts": boxes.starts, "sizes": boxes.shapes, "files": files}
            self.listed.append({name: array.tolist() for name, array in cut.items()})
        return self._numbers[key]


def decode_index(data: bytes, path: Path) -> Index:
    """The index of the checkpoint at `path` from its bytes; raises if they cannot be right."""
    where = f"index {INDEX_NAME!r} of {str(path)!r}"
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise ValueError("it is no index of a shardwise checkpoint")
        _check_version(body.get("version"), where)
        end = len(data) - len(f'{"0" * _DIGITS}"}}\n')
        if data[end:] != f'{xxhash.xxh3_64_hexdigest(data[:end])}"}}\n'.encode():
            raise ValueError("its checksum does not fit")
        return _decoded(body, path)
    except (*_WRONG, DamagedError) as error:
        told = f"{type(error).__name__}: " if not isinstance(error, ShardwiseError) else ""
        raise DamagedError(
            where,
            got=f"{told}{error}",
            fix="The index is damaged or was edited; take it from where it came from again.",
        ) from error


def _check_version(version: object, where: str) -> None:
    if type(version) is not int or version < 1:
        raise ValueError(f"version {version!r}")
    if version > VERSION:
        raise CheckpointError(
            where,
            expected=f"version {VERSION} or older",
            got=version,
            fix="A newer shardwise wrote it: pip install --upgrade shardwise.",
        )


def _decoded(body: dict[str, Any], path: Path) -> Index:
    files = tuple(_decoded_file(*entry) for entry in body["files"])
    if len({file.name for file in files}) < len(files):
        raise ValueError("a file is named twice")
    sizes = np.array([file.size for file in files], np.int64)
    first = np.array(body["first"], np.int64)
    if first.shape != sizes.shape or (first < 0).any() or (first > sizes).any():
        raise ValueError("files begin beyond their ends")
    checked: dict[tuple[int, tuple[int, ...]], tuple[Boxes, Ints]] = {}
    tensors = {}
    for name, entry in body["tensors"].items():
        shape = as_shape(entry["shape"])
        key = (entry["cut"], shape)
        if key not in checked:
            checked[key] = _decoded_cut(body["cuts"][entry["cut"]], shape, name, len(files))
        tensors[name] = _decoded_tensor(name, entry, shape, *checked[key], first, files, sizes)
    strangers = set(tensor_names(body["state"])) ^ set(tensors)
    if strangers:
        raise ValueError(f"state and tensors differ in {sorted(strangers)[:5]}")
    return Index(
        path, "shardwise", files, tensors, body["state"], int(body["world_size"]), body["version"]
    )


def _decoded_file(name: str, size: int, rank: int) -> SavedFile:
    is_inside = name == Path(name).name and name not in ("", ".", "..") and "\\" not in name
    if not is_inside or "\0" in name:
        raise ValueError(f"file {name!r} is not in the folder of the checkpoint")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (size, rank)):
        raise ValueError(f"file {name!r} of {size!r} bytes from rank {rank!r}")
    return SavedFile(name, size, rank)


def _decoded_cut(
    cut: dict[str, Any], shape: tuple[int, ...], name: str, num_files: int
) -> tuple[Boxes, Ints]:
    rows = len(cut["starts"])
    ends = [cut["starts"], cut["sizes"]]
    if any(len(row) != len(shape) for end in ends for row in end):
        raise ValueError(f"boxes of {name!r} are not of {len(shape)} dims")
    starts, sizes = (rows_of_ints(end, rows, len(shape)) for end in ends)
    if (starts < 0).any() or (sizes < 0).any() or (starts > 2**62).any() or (sizes > 2**62).any():
        raise ValueError(f"boxes of {name!r} have impossible sizes")
    boxes = Boxes(starts, starts + sizes)
    check_tiling(boxes, shape).raise_if_bad(f"boxes of {name!r}")
    files = np.array(cut["files"], np.int64)
    if files.shape != (rows,) or (files < 0).any() or (files >= num_files).any():
        raise ValueError(f"boxes of {name!r} are in files that are not listed")
    return boxes, files


def _decoded_tensor(
    name: str,
    entry: dict[str, Any],
    shape: tuple[int, ...],
    boxes: Boxes,
    numbers: Ints,
    first: Ints,
    files: Sequence[SavedFile],
    file_sizes: Ints,
) -> SavedTensor:
    dtype = dtype_of(entry["dtype"], name)
    starts = np.array(entry["start"], np.int64)
    if (starts < 0).any() or (starts > 2**62).any():
        raise ValueError(f"{name!r} starts at impossible bytes")
    starts = first[numbers] + starts
    sums = np.frombuffer(bytes.fromhex(entry["checksum"]), ">u8").astype(np.uint64)
    if not starts.shape == sums.shape == (len(boxes),):
        raise ValueError(f"{name!r} has {len(boxes)} boxes, but not as many places in files")
    sizes = boxes.volumes * dtype.itemsize
    is_beyond = starts > file_sizes[numbers] - sizes
    if is_beyond.any():
        row = int(is_beyond.argmax())
        raise ValueError(
            f"box {boxes[row]} of {name!r} is said to be at byte {starts[row]} of "
            f"{files[numbers[row]].name!r}, which has {file_sizes[numbers[row]]} bytes"
        )
    return SavedTensor(name, shape, dtype, boxes, numbers, starts, sums)
