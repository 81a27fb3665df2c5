"""The index of a Hugging Face folder, of a single safetensors file, and of what DCP's Hugging Face
writer leaves: boxes of tensors over many files. Only the headers are read.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.assembling import FoundBox, assembled, found_file
from shardwise.checkpoint.headers import read_header
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.structure import flatten
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.checkpoint.headers import Header, HeaderEntry
    from shardwise.checkpoint.index import SavedFile, SavedTensor

__all__ = ["SUFFIX", "WEIGHT_MAP_SUFFIX", "index_of_files", "safetensors_index"]

SUFFIX = ".safetensors"  # of files with tensors
WEIGHT_MAP_SUFFIX = ".safetensors.index.json"  # which tensor is in which file
_ONE_FILE = "model.safetensors"
_SHARD = re.compile(r"shard-(\d{1,9})-")  # as DCP names the files of a rank, from 1


def safetensors_index(path: Path) -> Index:
    """What is in a safetensors file, or in those of a folder, as one checkpoint."""
    if path.is_file():
        return _index_of(path.parent, _found_files(path.parent, [path.name]), None)
    maps = sorted(one.name for one in path.glob(f"*{WEIGHT_MAP_SUFFIX}"))
    if len(maps) > 1:
        raise CheckpointError(
            f"folder {str(path)!r}",
            expected="one model",
            got=f"several: {', '.join(maps)}",
            fix="Move each into a folder of its own, or give the path of one .safetensors file.",
        )
    if maps:
        weight_map = _weight_map(path / maps[0])
        return _index_of(path, _found_files(path, dict.fromkeys(weight_map.values())), weight_map)
    names = sorted(one.name for one in path.glob(f"*{SUFFIX}"))
    names = [_ONE_FILE] if _ONE_FILE in names else names
    return _index_of(path, _found_files(path, names), None)


def index_of_files(paths: Sequence[Path]) -> Index:
    """What is in several safetensors files, of one folder or of several, as one checkpoint."""
    folder = Path(os.path.commonpath([one.absolute().parent for one in paths]))
    files = [
        found_file(one.parent, one.name, 0)._replace(
            name=one.absolute().relative_to(folder).as_posix()
        )
        for one in paths
    ]
    return _index_of(folder, files, None)


def _weight_map(file: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(file.read_bytes())["weight_map"]
        if not all(isinstance(text, str) for pair in found.items() for text in pair):
            raise TypeError("a weight_map that is not of strings")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"index {file.name!r} of {str(file.parent)!r}",
            expected="JSON with a weight_map from names of tensors to files",
            got=f"{type(error).__name__}: {error}",
            fix="Take the file from where it came from again.",
        ) from error
    return dict(found)


def _found_files(folder: Path, names: Iterable[str]) -> list[SavedFile]:
    return [found_file(folder, name, 0) for name in names]


def _index_of(folder: Path, files: Sequence[SavedFile], weight_map: dict[str, str] | None) -> Index:
    headers = [_header(folder, file) for file in files]
    files = [_of_rank(file, number, headers) for number, file in enumerate(files)]
    entries: dict[str, list[tuple[int, HeaderEntry]]] = {}
    for number, header in enumerate(headers):
        for entry in header.entries:
            if weight_map is None or weight_map.get(entry.key) == files[number].name:
                entries.setdefault(entry.key, []).append((number, entry))
    for name in weight_map or ():
        if name not in entries:
            raise DamagedError(
                f"tensor {name!r} of {str(folder)!r}",
                expected=f"in file {(weight_map or {})[name]!r}, as the folder's index says",
                got="none of that name there",
                fix="Take the folder from where it came from again.",
            )
    tensors = {name: _tensor(name, found, files) for name, found in entries.items()}
    leaf = torch.empty(0, device="meta")
    structure = flatten(dict.fromkeys(tensors, leaf)).structure
    world_size = max((file.rank for file in files), default=0) + 1
    return Index(folder, "safetensors", tuple(files), tensors, structure, world_size)


def _header(folder: Path, file: SavedFile) -> Header:
    try:
        with (folder / file.name).open("rb") as opened:
            return read_header(opened, file.name, file.size)
    except OSError as error:
        raise CheckpointError(
            f"file {file.name!r} of {str(folder)!r} cannot be read", got=error.strerror
        ) from error


def _of_rank(file: SavedFile, number: int, headers: Sequence[Header]) -> SavedFile:
    """The file with its rank: that of its name, or one each, where tensors are cut."""
    if all(entry.offset is None for entry in headers[number].entries):
        return file
    found = _SHARD.match(file.name)
    return file._replace(rank=max(int(found[1]) - 1, 0) if found else number)


def _tensor(
    name: str, found: Sequence[tuple[int, HeaderEntry]], files: Sequence[SavedFile]
) -> SavedTensor:
    first = found[0][1]
    in_files = [files[number].name for number, _ in found]
    if len(found) > 1 and any(entry.offset is None for _, entry in found):
        raise CheckpointError(
            f"tensor {name!r}",
            expected="in one file",
            got=f"whole in {', '.join(in_files[:4])}",
            fix="These are files of several models; give the path of one .safetensors file.",
        )
    for (_, entry), file in zip(found, in_files, strict=True):
        if entry.dtype != first.dtype or len(entry.shape) != len(first.shape):
            raise DamagedError(
                f"tensor {name!r} in file {file!r}",
                expected=f"{first.dtype} of {len(first.shape)} dims, as in {in_files[0]!r}",
                got=f"{entry.dtype} of {len(entry.shape)} dims",
                fix="Files of several saves are mixed.",
            )
    return assembled(
        name,
        first.dtype,
        [
            FoundBox(entry.offset or (0,) * len(entry.shape), entry.shape, number, entry.start)
            for number, entry in found
        ],
    )
