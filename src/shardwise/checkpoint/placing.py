"""Which rank writes which box into which file, at which byte: a pure function of layouts.

[Note: placing] Every rank computes the same from the layouts alone, so nothing is gathered to plan
a save. A box that several ranks hold is written by the one that has the least to write so far.
The k-th box that a rank writes of a tensor goes into its k-th file, because a safetensors file has
a name once, and readers of such files know a box by its file and name. Within a file tensors stand
by the size of their elements, largest first, so that each is aligned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Box
from shardwise.geometry.box import Boxes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints

__all__ = ["PlacedFile", "PlacedPiece", "PlacedTensor", "Placing", "Wanted", "before", "place"]

_MOST_FILES = 64  # of a rank: what a tensor has beyond goes into the last one, under other names


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is to be saved; nothing may be pending."""

    name: str
    layout: Layout
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """The `number`-th of the files that a rank writes, and how many bytes of data it gets."""

    rank: int
    number: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """Where the boxes of a tensor go. `starts` count from the start of a file's data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Boxes  # (n,), each once
    rows: Ints  # (n,): of the layout, the entry that is written
    files: Ints  # (n,): which of `Placing.files`
    starts: Ints  # (n,)
    turns: Ints  # (n,): how many boxes of this tensor the rank writes before this one

    @property
    def has_files_twice(self) -> bool:
        """Whether a file has several of the boxes."""
        return int(self.turns.max(initial=0)) >= _MOST_FILES


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """One box in one file, as its writer needs it."""

    tensor: PlacedTensor
    key: str  # its name in the file
    box: Box
    row: int  # the entry of the tensor's layout
    start: int  # in the file's data

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.box.volume * self.tensor.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Placing:
    """What goes where; the same on all ranks."""

    files: tuple[PlacedFile, ...]  # by rank and number
    tensors: tuple[PlacedTensor, ...]  # in their order in files

    @cached_property
    def is_unsharded(self) -> bool:
        """Whether every tensor is in one piece."""
        return all(len(tensor.files) == 1 for tensor in self.tensors)

    @cached_property
    def num_pieces(self) -> Ints:
        """How many boxes each file gets, (files,)."""
        counts = np.zeros(len(self.files), np.int64)
        for tensor in self.tensors:
            np.add.at(counts, tensor.files, 1)
        return counts

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """As in a Hugging Face folder where no tensor is cut, else as DCP writes shards of one."""
        if not self.is_unsharded:
            per_rank = max((file.number for file in self.files), default=0) + 1
            return tuple(
                f"shard-{file.rank + 1:05}-model-{file.number + 1:05}-of-{per_rank:05}.safetensors"
                for file in self.files
            )
        if len(self.files) == 1:
            return ("model.safetensors",)
        count = len(self.files)
        return tuple(f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count))

    def pieces_of(self, file: int) -> Iterator[PlacedPiece]:
        """What one file gets, in the order of its bytes."""
        for tensor in self.tensors:
            for number in np.flatnonzero(tensor.files == file).tolist():
                turn = int(tensor.turns[number])
                is_last = self.files[file].number == _MOST_FILES - 1
                suffix = f"#{turn}" if is_last and turn >= _MOST_FILES else ""
                yield PlacedPiece(
                    tensor,
                    tensor.name + suffix,
                    tensor.boxes[number],
                    int(tensor.rows[number]),
                    int(tensor.starts[number]),
                )


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The different boxes of a layout with elements, and where each can be written from."""

    boxes: Boxes  # (n,)
    volumes: Ints  # (n,)
    rows: Ints  # all entries of the layout of the first box, then of the second, ...
    owners: Ints  # of these
    first: Ints  # (n,): where the entries of each box begin
    counts: Ints  # (n,): how many there are

    @classmethod
    def of(cls, layout: Layout, first_rank: int) -> _Options:
        if 0 in layout.shape:  # nothing to write, but the file is to know its name
            boxes = Boxes.of([Box.whole(layout.shape)], layout.ndim)
            none, one = np.zeros(1, np.int64), np.ones(1, np.int64)
            owners = layout.owners[:1] if len(layout) else np.array([first_rank], np.int64)
            return cls(boxes, none, none, owners, none, one)
        is_full = layout.boxes.is_full
        rows = np.flatnonzero(is_full)
        first, counts = layout.box_rows[:-1], np.diff(layout.box_rows)
        counts = counts[is_full[first]]
        boxes = layout.boxes[first[is_full[first]]]
        return cls(
            boxes, boxes.volumes, rows, layout.owners[rows], np.cumsum(counts) - counts, counts
        )

    def choose(self, loads: Ints) -> _Chosen:
        """Each box once, from the rank of its owners that has the least to write."""
        at = self.first
        if len(self.owners) > len(at):
            have = loads[self.owners]
            is_least = have == np.repeat(np.minimum.reduceat(have, at), self.counts)
            places = np.where(is_least, np.arange(len(have)), len(have))
            at = np.minimum.reduceat(places, at)
        return _Chosen.of(self, self.rows[at], self.owners[at])


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """The entries of a layout that are written: each box once."""

    options: _Options
    rows: Ints
    writers: Ints
    turns: Ints
    most_turns: int

    @classmethod
    def of(cls, options: _Options, rows: Ints, writers: Ints) -> _Chosen:
        if int(np.bincount(writers).max()) == 1:
            return cls(options, rows, writers, np.zeros_like(writers), 0)
        turns = before(writers, np.ones_like(writers))
        return cls(options, rows, writers, turns, int(turns.max()))

    @property
    def file_numbers(self) -> Ints:
        """Which of its writer's files each box goes into."""
        return np.minimum(self.turns, _MOST_FILES - 1)


def place(tensors: Sequence[Wanted], ranks: Sequence[int]) -> Placing:
    """Where each box of the tensors is written by ranks among `ranks`."""
    largest_first = sorted(
        tensors,
        key=lambda one: (-one.dtype.itemsize, -math.prod(one.layout.shape), one.name),
    )
    writing = _Writing(ranks)
    written = [(wanted, writing.choose(wanted)) for wanted in largest_first]
    first = np.concatenate([[0], np.cumsum(writing.counts)])  # file of each rank's first
    ends = np.zeros(int(first[-1]), np.int64)
    files: dict[int, Ints] = {}  # of each different choice
    for _, known in written:
        if id(known) not in files:
            files[id(known)] = first[known.writers] + known.file_numbers
    placed = tuple(_placed(wanted, known, files[id(known)], ends) for wanted, known in written)
    listed = tuple(
        PlacedFile(rank, number, int(ends[first[rank] + number]))
        for rank in np.flatnonzero(writing.counts).tolist()
        for number in range(int(writing.counts[rank]))
    )
    return Placing(listed, placed)


class _Writing:
    """What ranks have to write so far."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._first = min(ranks)
        size = max(ranks) + 1
        self._loads = np.zeros(size, np.int64)  # bytes by rank
        self.counts = np.zeros(size, np.int64)  # files by rank
        self._options: dict[Layout, _Options] = {}
        self._only: dict[Layout, _Chosen] = {}  # of layouts that leave no choice

    def choose(self, wanted: Wanted) -> _Chosen:
        """The entries of the tensor that are written, which count from now on."""
        layout = wanted.layout
        known = self._only.get(layout)
        if known is None:
            known = self._chosen(layout)
            if known.most_turns:
                np.maximum.at(self.counts, known.writers, known.file_numbers + 1)
            else:
                self.counts[known.writers] = np.maximum(self.counts[known.writers], 1)
        sizes = known.options.volumes * wanted.dtype.itemsize
        if known.most_turns:
            np.add.at(self._loads, known.writers, sizes)
        else:  # each rank once, which is quicker
            self._loads[known.writers] += sizes
        return known

    def _chosen(self, layout: Layout) -> _Chosen:
        if layout not in self._options:
            self._options[layout] = _Options.of(layout, self._first)
        known = self._options[layout].choose(self._loads)
        if len(known.options.owners) == len(known.writers):
            self._only[layout] = known
        return known


def _placed(wanted: Wanted, known: _Chosen, files: Ints, ends: Ints) -> PlacedTensor:
    """The tensor behind what its files have so far; moves their `ends`."""
    sizes = known.options.volumes * wanted.dtype.itemsize
    starts = ends[files]
    if known.most_turns < _MOST_FILES:  # each file gets one box
        ends[files] += sizes
    else:
        starts = starts + before(files, sizes)
        np.add.at(ends, files, sizes)
    return PlacedTensor(
        wanted.name,
        wanted.layout.shape,
        wanted.dtype,
        known.options.boxes,
        known.rows,
        files,
        starts,
        known.turns,
    )


def before(keys: Ints, amounts: Ints) -> Ints:
    """Of each, the sum of the amounts that stand before it with the same key."""
    order = np.argsort(keys, kind="stable")
    total = np.cumsum(amounts[order]) - amounts[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    found = np.empty(len(keys), np.int64)
    found[order] = total - total[is_first][np.cumsum(is_first) - 1]
    return found
