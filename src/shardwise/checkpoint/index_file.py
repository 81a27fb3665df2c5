"""The file of an index: its JSON, written and read.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardwise.checkpoint.dtypes import code_of, dtype_of
from shardwise.checkpoint.index import INDEX_NAME, VERSION, Index, SavedFile, SavedTensor
from shardwise.checkpoint.structure import tensor_names
from shardwise.errors import CheckpointError, DamagedError, ShardwiseError
from shardwise.geometry import Boxes, check_tiling
from shardwise.geometry.box import as_shape, rows_of_ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry.box import Ints

__all__ = ["decode_index", "encode_index"]

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
