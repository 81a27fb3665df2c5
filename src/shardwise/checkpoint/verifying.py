"""`verify`: whether the files of a checkpoint are what was saved; all that is wrong, not the first.

Shardwise keeps a checksum of every box, torch's archives one of every record. A safetensors file
has none: there only headers and sizes can be checked.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardwise import arguments
from shardwise.checkpoint.assembling import found_file
from shardwise.checkpoint.dcp_folder import METADATA_NAME, dcp_index, read_dcp_metadata
from shardwise.checkpoint.headers import read_header
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.safetensors_folder import SUFFIX, safetensors_index
from shardwise.checkpoint.torch_zips import check_archive
from shardwise.errors import CheckpointError, DamagedError
from shardwise.sharded_tensor.progress import bytes_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from shardwise.checkpoint.dcp_folder import DcpEntry
    from shardwise.checkpoint.index import Index, Kind, SavedTensor

__all__ = ["Problem", "Verified", "verify"]


class Problem(NamedTuple):
    """What is wrong with a checkpoint, with a file of it, or with a tensor in a file."""

    file: str | None
    tensor: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What was checked, and every problem that was found."""

    path: Path
    kind: Kind
    problems: tuple[Problem, ...]
    num_files: int
    num_tensors: int
    num_bytes: int  # of which checksums were compared

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: str | os.PathLike[str], *, jobs: int = 1, progress: bool | None = None
) -> Verified:
    """Checks sizes, headers and checksums of a checkpoint; `jobs` files are read at once.

    Of DCP's files the checksums of torch.save are compared. Safetensors files of others have none.
    Raises if there is no checkpoint at `path`; what is wrong with one is in `problems`.
    """
    workers = arguments.whole_number(jobs, "jobs", least=1)
    folder = arguments.path(path, "path of a checkpoint")
    if (folder / INDEX_NAME).is_file():
        return _verify_own(folder, workers, progress)
    if (folder / METADATA_NAME).is_file():
        return _verify_dcp(folder, workers, progress)
    return _verify_safetensors(folder)


# -- shardwise -------------------------------------------------------------------------------------


def _verify_own(folder: Path, workers: int, progress: bool | None) -> Verified:
    try:
        index = load_index(folder)
    except DamagedError as error:
        return Verified(folder, "shardwise", (Problem(INDEX_NAME, None, str(error)),), 0, 0, 0)
    pieces: list[list[tuple[SavedTensor, int]]] = [[] for _ in index.files]
    for tensor in index.tensors.values():
        for number, file in enumerate(tensor.files.tolist()):
            pieces[file].append((tensor, number))
    with bytes_bar("verify", index.nbytes, show=progress) as advance:
        tasks = [
            partial(_file_problems, index, number, held, advance)
            for number, held in enumerate(pieces)
        ]
        problems = _all_of(tasks, workers)
    files, tensors = len(index.files), len(index.tensors)
    return Verified(folder, index.kind, problems, files, tensors, index.nbytes)


def _all_of(tasks: Sequence[Callable[[], Iterable[Problem]]], workers: int) -> tuple[Problem, ...]:
    with ThreadPoolExecutor(workers) as pool:
        return tuple(problem for found in pool.map(_done, tasks) for problem in found)


def _done(task: Callable[[], Iterable[Problem]]) -> list[Problem]:
    return list(task())


def _file_problems(
    index: Index,
    number: int,
    pieces: Sequence[tuple[SavedTensor, int]],
    advance: Callable[[int], None],
) -> Iterable[Problem]:
    """What is wrong with a file and with the boxes in it."""
    name, size, _ = index.files[number]
    try:
        with index.file_path(number).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            yield from _header_problems(file, name, found, pieces)
    except OSError as error:
        yield Problem(name, None, f"cannot be read: {error.strerror}")
        return
    if found != size:
        yield Problem(name, None, f"has {found} bytes, expected {size}")
    with Reader(index) as reader:
        for tensor, row in pieces:
            piece = tensor.piece(row)
            advance(piece.nbytes)
            if piece.start + piece.nbytes > found:
                yield Problem(name, tensor.name, f"box {piece.box} is cut off")
            elif found == size:
                try:
                    reader.verify(tensor.name, row)
                except DamagedError as error:
                    yield Problem(name, tensor.name, str(error))


def _header_problems(
    file: BinaryIO, name: str, size: int, pieces: Sequence[tuple[SavedTensor, int]]
) -> Iterable[Problem]:
    """Where the header of a file says other than the index."""
    try:
        header = read_header(file, name, size)
    except DamagedError as error:
        yield Problem(name, None, str(error))
        return
    said = {(entry.start, entry.shape, entry.dtype): entry for entry in header.entries}
    for tensor, row in pieces:
        piece = tensor.piece(row)
        entry = said.get((piece.start, piece.box.shape, tensor.dtype))
        if entry is None and piece.nbytes:
            message = f"box {piece.box} is not at byte {piece.start} in the file's header"
            yield Problem(name, tensor.name, message)
        elif entry is not None and (entry.offset or piece.box.start) != piece.box.start:
            message = f"box {piece.box} stands in the file's header at {entry.offset}"
            yield Problem(name, tensor.name, message)


# -- others ----------------------------------------------------------------------------------------


def _verify_dcp(folder: Path, workers: int, progress: bool | None) -> Verified:
    try:
        entries = read_dcp_metadata(folder).entries
        damaged: dict[str, str] = {}
        index = dcp_index(folder, damaged=damaged)
    except CheckpointError as error:
        return Verified(folder, "dcp", (Problem(METADATA_NAME, None, str(error)),), 0, 0, 0)
    total = sum(entry.length for entry in entries.values())
    with bytes_bar("verify", total, show=progress) as advance:
        tasks = [
            partial(_archive_problems, folder, name, entry, advance)
            for (name, _), entry in entries.items()
        ]
        problems = _all_of(tasks, workers)
    told = {problem.tensor for problem in problems}
    listed = (Problem(None, name, why) for name, why in damaged.items() if name not in told)
    files, tensors = len(index.files), len(index.tensors)
    return Verified(folder, "dcp", (*listed, *problems), files, tensors, total)


def _archive_problems(
    folder: Path, name: str, entry: DcpEntry, advance: Callable[[int], None]
) -> Iterable[Problem]:
    """Reads every record of an archive, of which the checksums are compared on the way."""
    advance(entry.length)
    what = f"{name!r} at byte {entry.offset} of {entry.file!r}"
    try:
        file = found_file(folder, entry.file, 0)
        with (folder / file.name).open("rb") as opened:
            check_archive(opened.fileno(), entry.offset, entry.length, what)
    except (OSError, CheckpointError) as error:
        yield Problem(entry.file, name, str(error))


def _verify_safetensors(path: Path) -> Verified:
    try:
        index = load_index(path)
    except DamagedError as error:
        problems = tuple(_broken_files(path)) or (Problem(None, None, str(error)),)
        return Verified(path, "safetensors", problems, 0, 0, 0)
    problems = tuple(problem for file in index.files for problem in _holes(index, file.name))
    return Verified(path, "safetensors", problems, len(index.files), len(index.tensors), 0)


def _broken_files(folder: Path) -> Iterable[Problem]:
    """The files that alone are no safetensors files."""
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            safetensors_index(file)
        except CheckpointError as error:
            yield Problem(file.name, None, str(error))


def _holes(index: Index, name: str) -> Iterable[Problem]:
    """Bytes that no tensor has, or that two have: the format allows neither."""
    path = index.path / name
    size = path.stat().st_size
    with path.open("rb") as file:
        header = read_header(file, name, size)
    at = header.data_start
    for entry in sorted(header.entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != at:
            yield Problem(name, entry.key, f"begins at byte {entry.start}, expected {at}")
        at = max(at, entry.stop)
    if at != size:
        yield Problem(name, None, f"has {size - at} bytes behind its tensors")
