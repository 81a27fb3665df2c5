"""Checkpoints that one process writes for all ranks, in any layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.checkpoint.headers import header_of
from shardwise.checkpoint.index import INDEX_NAME, Index, SavedFile, SavedTensor, encode_index
from shardwise.checkpoint.placing import Wanted, place
from shardwise.checkpoint.structure import flatten
from shardwise.checkpoint.writing import FileWriter
from shardwise.geometry import Box, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["write_checkpoint"]


def write_checkpoint(
    folder: Path, state: Any, layouts: Mapping[str, Layout] | None = None, world_size: int = 4
) -> Path:
    """Saves a state of full tensors as ranks with these layouts would; others as rank 0 alone."""
    flat = flatten(state)
    wanted = []
    for name, tensor in flat.tensors.items():
        whole = Layout(tensor.shape, [Box.whole(tensor.shape)], [0])
        wanted.append(Wanted(name, (layouts or {}).get(name, whole), tensor.dtype))
    placing = place(wanted, range(world_size))
    folder.mkdir(parents=True, exist_ok=True)
    data_starts, sums, files = [], {}, []
    for number, file in enumerate(placing.files):
        pieces = list(placing.pieces_of(number))
        header = header_of(pieces, is_unsharded=placing.is_unsharded)
        data_starts.append(len(header))
        with FileWriter(folder / placing.file_names[number], header) as writer:
            for piece in pieces:
                data = flat.tensors[piece.tensor.name][piece.box.slices()].contiguous()
                sums[piece.tensor.name, piece.box] = writer.write(data)
        files.append(SavedFile(placing.file_names[number], writer.size, file.rank))
    tensors = {
        one.name: SavedTensor(
            one.name,
            one.shape,
            one.dtype,
            one.boxes,
            one.files,
            one.starts + np.array(data_starts, np.int64)[one.files],
            np.array([sums[one.name, box] for box in one.boxes], np.uint64),
        )
        for one in placing.tensors
    }
    index = Index(folder, "shardwise", tuple(files), tensors, flat.structure, world_size)
    (folder / INDEX_NAME).write_bytes(encode_index(index))
    return folder
