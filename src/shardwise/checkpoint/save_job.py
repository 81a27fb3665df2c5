"""What one rank does in a save: which files it writes, the copies it makes before, the writing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.checkpoint.headers import header_of
from shardwise.checkpoint.placing import place
from shardwise.checkpoint.writing import FileWriter, Staging
from shardwise.comm.checks import check_timeout
from shardwise.sharded_tensor.to_layouts import reshard_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardwise.checkpoint.background import Background
    from shardwise.checkpoint.collecting import Brought, Merged
    from shardwise.checkpoint.committing import Aside
    from shardwise.checkpoint.placing import PlacedPiece, Placing
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ranks import GroupRanks
    from shardwise.sharded_tensor.tensor import ShardedTensor

__all__ = ["LEAST_STAGING", "FileToWrite", "SaveJob", "save_job", "stage", "writing"]

LEAST_STAGING = 16  # bytes: the largest element
_SLOWEST = 20_000_000  # bytes per second of a disk for which the other ranks wait


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A file of this rank, and the tensors that go into it."""

    name: str
    header: bytes
    pieces: Sequence[PlacedPiece]
    tensors: list[torch.Tensor]  # of each piece; staged copies may take their place


@dataclass(slots=True)
class SaveJob:
    """One save on this rank."""

    merged: Merged
    placing: Placing
    aside: Aside
    files: Sequence[FileToWrite]
    rank_bytes: int  # of these files, on this rank
    staging: Staging
    problem: Exception | None = None
    is_committed: bool = False
    checksums: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of all ranks."""
        return sum(file.nbytes for file in self.placing.files)

    @property
    def patience(self) -> float:
        """Seconds for which ranks wait for the one that has most to write."""
        most: dict[int, int] = {}
        for file in self.placing.files:
            most[file.rank] = most.get(file.rank, 0) + file.nbytes
        return check_timeout() + max(most.values(), default=0) / _SLOWEST


def save_job(
    brought: Brought, merged: Merged, aside: Aside, members: Communicator, max_bytes: int | None
) -> SaveJob:
    """What this rank writes; nothing is written yet. Reduces what is pending."""
    sharded = _reduced(brought.sharded, merged, max_bytes)
    placing = place(merged.wanted, tuple(members.ranks))
    files = []
    for number, file in enumerate(placing.files):
        if file.rank == members.rank:
            pieces = tuple(placing.pieces_of(number))
            tensors = [_local(piece, brought, sharded) for piece in pieces]
            header = header_of(pieces, is_unsharded=placing.is_unsharded)
            files.append(FileToWrite(placing.file_names[number], header, pieces, tensors))
    rank_bytes = sum(file.nbytes for file in placing.files if file.rank == members.rank)
    return SaveJob(merged, placing, aside, files, rank_bytes, Staging(max_bytes))


def _reduced(
    sharded: Mapping[str, ShardedTensor], merged: Merged, max_bytes: int | None
) -> dict[str, ShardedTensor]:
    """The sharded tensors with nothing pending. Ranks of a tensor's group come together."""
    found = dict(sharded)
    layouts = {one.name: one.layout for one in merged.wanted}
    groups: dict[GroupRanks, list[str]] = {}
    for name in sorted(sharded.keys() & layouts):
        state = sharded[name]._state
        if state.layout.pending is not None:
            groups.setdefault(state.comm.ranks, []).append(name)
    with torch.no_grad():
        for names in groups.values():
            tensors = {name: sharded[name] for name in names}
            targets = {name: layouts[name] for name in names}
            found.update(reshard_all(tensors, targets, max_bytes=max_bytes, progress=False))
    return found


def _local(
    piece: PlacedPiece, brought: Brought, sharded: Mapping[str, ShardedTensor]
) -> torch.Tensor:
    """This rank's elements of a box that it writes."""
    name = piece.tensor.name
    if not piece.nbytes:
        return torch.empty(piece.box.shape, dtype=piece.tensor.dtype)
    if name in brought.plain:
        return brought.plain[name]
    state = sharded[name]._state
    at = int(np.searchsorted(state.layout.rows_of(state.rank), piece.row))
    return state.shards[at].detach()


def writing(job: SaveJob) -> Iterator[int]:
    """Writes the files, piece by piece; gives the bytes of each when it is written."""
    job.aside.make()
    for file in job.files:
        with FileWriter(job.aside.path / file.name, file.header, job.staging) as writer:
            for tensor, piece in zip(file.tensors, file.pieces, strict=True):
                job.checksums.append(writer.write(tensor))
                yield piece.nbytes


def stage(job: SaveJob, writing: Iterator[int], background: Background, most: int | None) -> None:
    """Copies what is not written yet, so that tensors may change; writes what is beyond `most`.

    The last pieces are the ones that are copied, since files are written in order.
    """
    places = [(file, number) for file in job.files for number in range(len(file.pieces))]
    staged: list[tuple[FileToWrite, int]] = []
    nbytes = 0
    while places and (most is None or nbytes + _room(*places[-1]) <= most):
        nbytes += _room(*places[-1])
        staged.append(places.pop())
    gpus = {tensor.device for file, k in staged if (tensor := file.tensors[k]).is_cuda}
    memory, at = background.memory(nbytes, is_pinned=bool(gpus)), 0
    for file, number in staged:
        tensor = file.tensors[number]
        part = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor, non_blocking=tensor.is_cuda)
        at += _room(file, number)
        file.tensors[number] = part
    for gpu in gpus:  # which need not be the current one
        torch.cuda.synchronize(gpu)
    for _ in places:
        next(writing)


def _room(file: FileToWrite, number: int) -> int:
    """Bytes that a copy takes, so that the next one is aligned."""
    return -(-file.pieces[number].nbytes // LEAST_STAGING) * LEAST_STAGING
