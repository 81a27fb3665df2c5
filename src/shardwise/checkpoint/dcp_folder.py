"""The index of a folder that torch.distributed.checkpoint (DCP) wrote: `.metadata` and `.distcp`.

The metadata is a pickle ([Note: restricted pickles]), and each box of a tensor an archive within a
file ([Note: zips]). Plain values are pickles too; those that torch reads with weights_only are kept
in the structure, others are named as unreadable.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.checkpoint.assembling import FoundBox, assembled, found_file
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.restricted_pickles import StandIn, read_pickle
from shardwise.checkpoint.structure import flatten
from shardwise.checkpoint.torch_zips import Slice, find_chunk
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardwise.checkpoint.index import SavedFile, SavedTensor

__all__ = ["METADATA_NAME", "DcpEntry", "DcpMetadata", "dcp_index", "read_dcp_metadata"]

METADATA_NAME = ".metadata"  # the file by which DCP knows its folders
_FILE_OF_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")


class DcpEntry(NamedTuple):
    """Where an archive is: bytes of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What `.metadata` says."""

    tensors: dict[str, StandIn]
    values: tuple[str, ...]
    paths: dict[str, tuple[str | int, ...]]  # how names nest; one that is absent stands alone
    entries: dict[tuple[str, tuple[int, ...] | None], DcpEntry]  # by name and offsets of the box


# -- the metadata ----------------------------------------------------------------------------------


class _Metadata(StandIn): ...


class _Tensor(StandIn): ...


class _Bytes(StandIn): ...


class _Properties(StandIn): ...


class _Chunk(StandIn): ...


class _Key(StandIn): ...


class _Info(StandIn): ...


def _size(values: Any = ()) -> tuple[int, ...]:
    """torch.Size as a tuple."""
    return tuple(values)


_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_KNOWN = {
    (_MODULE, "Metadata"): _Metadata,
    (_MODULE, "TensorStorageMetadata"): _Tensor,
    (_MODULE, "BytesStorageMetadata"): _Bytes,
    (_MODULE, "TensorProperties"): _Properties,
    (_MODULE, "ChunkStorageMetadata"): _Chunk,
    (_MODULE, "MetadataIndex"): _Key,
    (_MODULE, "StorageMeta"): StandIn,
    (_MODULE, "_MEM_FORMAT_ENCODING"): StandIn,
    (_OLD_MODULE, "TensorProperties"): _Properties,
    (_OLD_MODULE, "MEM_FORMAT_ENCODING"): StandIn,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.serialization", "_get_layout"): StandIn,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): StandIn
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def _known(module: str, name: str) -> Any:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else _KNOWN.get((module, name))


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """What `.metadata` of a folder says; runs nothing of it."""
    what = f"{METADATA_NAME!r} of {str(folder)!r}"
    found = read_pickle((folder / METADATA_NAME).read_bytes(), what, _known)
    with _damaged(what):
        listed = found.get("state_dict_metadata")
        return DcpMetadata(
            {name: one for name, one in listed.items() if isinstance(one, _Tensor)},
            tuple(name for name, one in listed.items() if isinstance(one, _Bytes)),
            _paths(found.get("planner_data")),
            dict(_entry(key, info) for key, info in found.get("storage_data").items()),
        )


@contextmanager
def _damaged(what: str) -> Iterator[None]:
    """Whatever goes wrong with values of a stranger is a damaged file."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise DamagedError(
            what,
            expected="what torch.distributed.checkpoint writes",
            got=f"{type(error).__name__}: {error}",
            fix="Take the checkpoint from where it came from again.",
        ) from error


def _paths(found: Any) -> dict[str, tuple[str | int, ...]]:
    """How names nest; other planners keep other things there, which say nothing of it."""
    if not isinstance(found, dict):
        return {}
    return {
        name: path
        for name, path in found.items()
        if isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
    }


def _entry(key: StandIn, info: StandIn) -> tuple[tuple[str, tuple[int, ...] | None], DcpEntry]:
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{key.get('fqn')!r} of a checkpoint of torch.distributed.checkpoint",
            expected="data as it is",
            got=f"transformed by {info.get('transform_descriptors')}",
            fix="Load it with torch.distributed.checkpoint and save it without extensions.",
        )
    offset = key.get("offset")
    place = DcpEntry(
        str(info.get("relative_path")), _whole(info.get("offset")), _whole(info.get("length"))
    )
    return (key.get("fqn"), None if offset is None else tuple(offset)), place


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError(f"{number!r} is no size")
    return number


# -- the index -------------------------------------------------------------------------------------


def dcp_index(folder: Path, *, damaged: dict[str, str] | None = None) -> Index:
    """What is in a folder of torch.distributed.checkpoint.

    Raises about the first damaged tensor, or puts all by name into `damaged`.
    """
    metadata = read_dcp_metadata(folder)
    unreadable: dict[str, str] = {}
    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Any] = {}
    with _Files(folder) as files:
        for name, described in metadata.tensors.items():
            try:
                with _damaged(f"{name!r} in {METADATA_NAME!r} of {str(folder)!r}"):
                    tensors[name] = _tensor(name, described, metadata, files)
            except DamagedError as error:
                if damaged is None:
                    raise
                damaged[name] = str(error)
            except CheckpointError as error:
                unreadable[name] = str(error)
        for name in metadata.values:
            try:
                values[name] = _value(metadata.entries[name, None], files, name)
            except (CheckpointError, KeyError) as error:
                unreadable[name] = str(error)
        found = tuple(files.listed)
    structure = _structure(metadata, tensors, values)
    world_size = max((file.rank for file in found), default=0) + 1
    return Index(folder, "dcp", found, tensors, structure, world_size, unreadable=unreadable)


@dataclass(slots=True)
class _Files:
    """The files of a folder, opened when they are first asked for."""

    folder: Path
    listed: list[SavedFile] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _handles: list[int] = field(default_factory=list)

    def opened(self, entry: DcpEntry, what: str) -> tuple[int, int]:
        """Number and handle of the file of an entry, which must lie in it."""
        if entry.file not in self._numbers:
            rank = _FILE_OF_RANK.fullmatch(str(entry.file))
            file = found_file(self.folder, entry.file, int(rank[1]) if rank else 0)
            self._handles.append(os.open(self.folder / file.name, os.O_RDONLY))
            self._numbers[entry.file] = len(self.listed)
            self.listed.append(file)
        number = self._numbers[entry.file]
        if entry.offset + entry.length > self.listed[number].size:
            raise DamagedError(
                what,
                expected=f"bytes {entry.offset} to {entry.offset + entry.length} of {entry.file!r}",
                got=f"a file of {self.listed[number].size} bytes",
                fix="The file is cut off; take it from where it came from again.",
            )
        return number, self._handles[number]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            os.close(handle)


def _tensor(name: str, described: StandIn, metadata: DcpMetadata, files: _Files) -> SavedTensor:
    shape = tuple(map(_whole, described.get("size")))
    dtype = described.get("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {dtype!r}")
    boxes = [
        (tuple(map(_whole, chunk.get("offsets"))), tuple(map(_whole, chunk.get("sizes"))))
        for chunk in described.get("chunks")
    ]
    full = [box for box in boxes if 0 not in box[1]] or boxes[:1]
    found = [_found(name, dtype, *box, metadata, files) for box in full]
    return assembled(name, dtype, found, shape)


def _found(
    name: str,
    dtype: torch.dtype,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    metadata: DcpMetadata,
    files: _Files,
) -> FoundBox:
    what = f"{name!r} at {start} of {str(files.folder)!r}"
    entry = metadata.entries.get((name, start)) or metadata.entries.get((name, None))
    if entry is None:
        raise DamagedError(what, expected="its place in a file", got="none in the metadata")
    number, handle = files.opened(entry, what)
    chunk = find_chunk(handle, entry.offset, entry.length, what)
    if (chunk.dtype, chunk.shape) != (dtype, shape):
        raise DamagedError(
            what,
            expected=f"{dtype} of shape {shape}",
            got=f"{chunk.dtype} of shape {chunk.shape} in file {entry.file!r}",
            fix="Files of several saves are mixed, or the metadata is damaged.",
        )
    return FoundBox(start, shape, number, chunk.start, chunk.strides)


def _value(entry: DcpEntry, files: _Files, name: str) -> Any:
    """A plain value; raises if it is something else."""
    _, handle = files.opened(entry, f"{name!r} of {str(files.folder)!r}")
    data = Slice(handle, entry.offset, entry.length).read(entry.length)
    try:
        value = torch.load(io.BytesIO(data or b""), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, TypeError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError("a pickled object, which is not read", got=told[0][:200]) from error
    if flatten([value]).tensors:
        raise CheckpointError("a pickled object with tensors in it, which is not read")
    return value


def _structure(
    metadata: DcpMetadata, tensors: dict[str, SavedTensor], values: dict[str, Any]
) -> Any:
    """The nested state as DCP's planner had it; flat if what is said of it does not fit."""
    leaf = torch.empty(0, device="meta")
    leaves: dict[str, Any] = dict.fromkeys(tensors, leaf) | values
    try:
        nested = _nested({metadata.paths.get(name, (name,)): leaves[name] for name in leaves})
        flat = flatten(nested)
    except (CheckpointError, TypeError, ValueError, RecursionError):
        flat = None
    if flat is None or set(flat.tensors) != set(tensors):
        flat = flatten(leaves)
    return flat.structure


def _nested(leaves: dict[tuple[str | int, ...], Any]) -> Any:
    """Dicts and lists from values by path: numbers are positions in lists."""
    if () in leaves:
        if len(leaves) > 1:
            raise ValueError("a value that is also a container")
        return leaves[()]
    groups: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    if any(isinstance(key, int) for key in groups):
        if set(groups) != set(range(len(groups))):
            raise ValueError("a list of which an item is absent")
        return [_nested(groups[key]) for key in range(len(groups))]
    return {key: _nested(group) for key, group in groups.items()}
