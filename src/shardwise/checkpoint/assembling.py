"""Saved tensors, put together from the boxes that files of other writers say they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.checkpoint.index import SavedFile, SavedTensor
from shardwise.errors import DamagedError, ShardwiseError
from shardwise.geometry import Box
from shardwise.geometry.box import Boxes, rows_of_ints
from shardwise.geometry.tiling import check_tiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["FoundBox", "assembled", "found_file"]


class FoundBox(NamedTuple):
    """A box of a tensor at byte `position` of file number `file`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    position: int
    strides: tuple[int, ...] | None = None  # None: row-major


def assembled(
    name: str,
    dtype: torch.dtype,
    found: Sequence[FoundBox],
    shape: tuple[int, ...] | None = None,
) -> SavedTensor:
    """The tensor of these boxes, which must tile it; its `shape` is as large as they reach.

    A box that stands in two files is taken from the first.
    """
    reach = shape if shape is not None else _reach(found)
    kept = _kept(found, reach)
    try:
        starts = rows_of_ints((one.start for one in kept), len(kept), len(reach))
        sizes = rows_of_ints((one.shape for one in kept), len(kept), len(reach))
        boxes = Boxes(starts, starts + sizes)
        check_tiling(boxes, reach).raise_if_bad(f"boxes of {name!r}")
    except (ShardwiseError, ValueError, OverflowError) as error:
        raise DamagedError(
            f"tensor {name!r}",
            got=str(error),
            fix="A file of the checkpoint is missing, or files of several saves are mixed.",
        ) from error
    strides = None
    if any(one.strides is not None for one in kept):
        rows = (one.strides or _row_major(one.shape) for one in kept)
        strides = rows_of_ints(rows, len(kept), len(reach))
    files = np.array([one.file for one in kept], np.int64)
    positions = np.array([one.position for one in kept], np.int64)
    return SavedTensor(name, reach, dtype, boxes, files, positions, strides=strides)


def _reach(found: Sequence[FoundBox]) -> tuple[int, ...]:
    ends = [tuple(map(sum, zip(one.start, one.shape, strict=True))) for one in found]
    return tuple(map(max, zip(*ends, strict=False)))


def _kept(found: Sequence[FoundBox], shape: tuple[int, ...]) -> list[FoundBox]:
    """Each box once, without those that are empty; one box of a tensor without elements."""
    if 0 in shape:
        return [found[0]._replace(start=(0,) * len(shape), shape=shape, strides=None)]
    once: dict[tuple[tuple[int, ...], tuple[int, ...]], FoundBox] = {}
    for one in found:
        if 0 not in one.shape:
            once.setdefault((one.start, one.shape), one)
    return sorted(once.values(), key=lambda one: one.start)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(Box.whole(shape[dim + 1 :]).volume for dim in range(len(shape)))


def found_file(folder: Path, name: object, rank: int) -> SavedFile:
    """A file of the folder, of which others say only the name; raises if it cannot be one."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
        raise DamagedError(
            f"file {name!r} of {str(folder)!r}",
            expected="the name of a file in the folder of the checkpoint",
            fix="The checkpoint is damaged or was made to read other files; do not use it.",
        )
    try:
        return SavedFile(name, (folder / name).stat().st_size, rank)
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"file {name!r} of {str(folder)!r} cannot be read",
            got=getattr(error, "strerror", None) or str(error),
            fix="Put it back: every file of a checkpoint is needed.",
        ) from error
