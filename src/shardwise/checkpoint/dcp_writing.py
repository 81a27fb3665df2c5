"""Files that torch.distributed.checkpoint reads: archives of torch.save in a row, and metadata.

An archive is written from memory, so a box that is larger than the limit becomes several boxes.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise._torch_compat import dcp_metadata
from shardwise.checkpoint.dcp_folder import METADATA_NAME
from shardwise.checkpoint.structure import unflatten
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardwise.geometry import Box

__all__ = ["DcpFile", "WrittenBox", "dcp_file_name", "leaves_of", "write_dcp_metadata"]

Key = tuple[str | int, ...]


class WrittenBox(NamedTuple):
    """An archive in a file: of a box of a tensor, or of a plain value, which has none."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int


@dataclass(slots=True)
class DcpFile:
    """A new `.distcp` file, to which archives are appended. On disk when it is closed."""

    path: Path
    written: list[WrittenBox] = field(default_factory=list)
    _file: io.BufferedWriter = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("xb")

    def write(self, name: str, box: Box | None, value: Any) -> None:
        """Appends a tensor that has memory of its own, or a plain value."""
        offset = self._file.tell()
        torch.save(value, self._file)
        length = self._file.tell() - offset
        self.written.append(WrittenBox(name, box, self.path.name, offset, length))

    def __enter__(self) -> DcpFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def dcp_file_name(rank: int, number: int) -> str:
    """The file of a rank, as DCP names it."""
    return f"__{rank}_{number}.distcp"


class _Tensor(NamedTuple):
    name: str


def leaves_of(structure: Any) -> tuple[dict[str, Key], dict[str, Any]]:
    """How DCP nests the names of a state: the path of each, and the plain values among them.

    As its planner has it: dicts are taken apart, lists where tensors or dicts are in them.
    Nothing remains of an empty dict.
    """
    state = unflatten(structure, _Tensor)
    if not isinstance(state, dict):
        raise CheckpointError(
            "state of the checkpoint",
            expected="a dict, as torch.distributed.checkpoint has it",
            got=type(state).__name__,
        )
    paths: dict[str, Key] = {}
    values: dict[str, Any] = {}
    for path, value in _leaves(state, ()):
        name = ".".join(map(str, path))
        if name in paths:
            raise CheckpointError(
                f"two values of the state have the name {name!r}",
                expected="one, as torch.distributed.checkpoint has it",
            )
        paths[name] = path
        if not isinstance(value, _Tensor):
            values[name] = value
    return paths, values


def _leaves(value: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif type(value) in (list, tuple) and _has_tensors_or_dicts(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def _has_tensors_or_dicts(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_tensors_or_dicts, value))
    return isinstance(value, dict | _Tensor)


def write_dcp_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    paths: Mapping[str, Key],
    written: Sequence[WrittenBox],
) -> None:
    """`.metadata` of a folder with these archives: what makes it a checkpoint."""
    boxes: dict[str, list[WrittenBox]] = {}
    for one in written:
        boxes.setdefault(one.name, []).append(one)
    metadata = dcp_metadata(tensors, paths, boxes)
    with (folder / METADATA_NAME).open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
