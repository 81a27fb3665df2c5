"""What ranks report of the files that they wrote, and the index that is made of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.checkpoint.index import Index, SavedFile, SavedTensor
from shardwise.checkpoint.placing import before

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardwise.checkpoint.placing import Placing
    from shardwise.comm.communicator import Communicator
    from shardwise.geometry.box import Ints

__all__ = ["gather_reports", "hugging_face_index", "index_of", "report_of"]


def report_of(data_starts: Sequence[int], checksums: Sequence[int]) -> Ints:
    """Of a rank's files in order: where the data of each begins, then the checksum of each box."""
    sums = np.array(checksums, np.uint64).view(np.int64)
    return np.concatenate([np.array(data_starts, np.int64), sums])


def gather_reports(mine: Ints, placing: Placing, members: Communicator) -> dict[int, Ints]:
    """Everybody's report by rank, on the first rank of the group; all ranks call it."""
    first = members.ranks.rank_at(0)
    flight = members.flight()
    found = {}
    if members.rank == first:
        buffers = {
            rank: torch.empty(size, dtype=torch.int64, device=members.wire_device)
            for rank, size in _report_sizes(placing).items()
            if rank != first
        }
        for rank, buffer in buffers.items():
            flight.receive(rank, buffer)
        flight.launch()
        flight.finish()
        found = {rank: buffer.cpu().numpy() for rank, buffer in buffers.items()}
        found[first] = mine
        return found
    if len(mine):
        flight.send(first, torch.from_numpy(mine).to(members.wire_device))
    flight.launch()
    flight.finish()
    return found


def _report_sizes(placing: Placing) -> dict[int, int]:
    """How many numbers each rank with files reports."""
    sizes: dict[int, int] = {}
    for file, count in zip(placing.files, placing.num_pieces.tolist(), strict=True):
        sizes[file.rank] = sizes.get(file.rank, 0) + 1 + count
    return sizes


def index_of(
    placing: Placing,
    reports: Mapping[int, Ints],
    *,
    path: Path,
    structure: Any,
    same_as: Mapping[str, str],
    world_size: int,
) -> Index:
    """The index of files that were written as placed; `same_as` has names of tied tensors."""
    data_starts, flat, first = _joined(placing, reports)
    done = np.zeros(len(placing.files), np.int64)  # boxes of each file so far
    tensors = {}
    for placed in placing.tensors:
        files = placed.files
        rows = first[files] + done[files]
        if placed.has_files_twice:
            rows += before(files, np.ones_like(files))
            np.add.at(done, files, 1)
        else:
            done[files] += 1
        tensors[placed.name] = SavedTensor(
            placed.name,
            placed.shape,
            placed.dtype,
            placed.boxes,
            files,
            placed.starts + data_starts[files],
            flat[rows],
        )
    listed = tuple(
        SavedFile(name, int(start) + file.nbytes, file.rank)
        for name, start, file in zip(placing.file_names, data_starts, placing.files, strict=True)
    )
    for name, other in same_as.items():
        tensors[name] = tensors[other].renamed(name)
    return Index(path, "shardwise", listed, tensors, structure, world_size)


def _joined(placing: Placing, reports: Mapping[int, Ints]) -> tuple[Ints, Any, Ints]:
    """Of each file where its data begins; all checksums; of each file its first one's number."""
    num_files: dict[int, int] = {}
    for file in placing.files:
        num_files[file.rank] = num_files.get(file.rank, 0) + 1
    none = np.zeros(0, np.int64)
    # Files are numbered by rank, and so are reports.
    starts = [reports[rank][:count] for rank, count in sorted(num_files.items())]
    sums = [reports[rank][count:] for rank, count in sorted(num_files.items())]
    counts = placing.num_pieces
    first = np.cumsum(counts) - counts
    return np.concatenate([none, *starts]), np.concatenate([none, *sums]).view(np.uint64), first


def hugging_face_index(placing: Placing) -> bytes:
    """`model.safetensors.index.json` of files in which every tensor is in one piece."""
    names = {tensor.name: placing.file_names[int(tensor.files[0])] for tensor in placing.tensors}
    total = sum(file.nbytes for file in placing.files)
    body = {"metadata": {"total_size": total}, "weight_map": names}
    return json.dumps(body, indent=2, sort_keys=True).encode()
