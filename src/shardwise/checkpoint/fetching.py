"""Reading what ranks need of a checkpoint into their tensors, and passing on what several need."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.checkpoint.regions import overlapping, slices_in
from shardwise.checkpoint.sharing import Lot, filled_rows, lots, shard_of_box, single_rows
from shardwise.checkpoint.threads import in_threads, num_threads
from shardwise.comm.agreement import agreed_numbers
from shardwise.comm.differentiable import count_writes
from shardwise.comm.executor import execute_all
from shardwise.comm.load import Transfer
from shardwise.comm.reducing import fill_identity, rescale
from shardwise.errors import CheckpointError
from shardwise.geometry.splits import flat_range_boxes
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.steps import in_steps
from shardwise.transfer import plan_reshard
from shardwise.transfer.program import Scale
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardwise.checkpoint.mosaics import Mosaic
    from shardwise.checkpoint.reading import Reader
    from shardwise.checkpoint.sharing import Range
    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout
    from shardwise.transfer import TransferPlan

__all__ = ["TensorToFill", "fetch", "meet", "memory_of", "verify_pieces"]

_LEAST = 1 << 26  # bytes of a step: small tensors go together
_WORTH_A_THREAD = 1 << 16  # bytes of a tensor: smaller ones take longer to hand over than to read
_LEAST_CAP = 16  # bytes: of the largest element
_PARTLY = "The state is partly loaded: load again before it is used."
_NOTHING = "Nothing was loaded."


@dataclass(frozen=True, slots=True, eq=False)
class TensorToFill:
    """A tensor to fill: its layout, this rank's memory, and what it is made of."""

    name: str
    layout: Layout
    shards: tuple[torch.Tensor, ...]  # without autograd
    dtype: torch.dtype
    mosaic: Mosaic
    via: torch.dtype | None  # to which floating-point values are rounded on the way


def memory_of(shards: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """By which tensors that share memory are known; empty where there are no elements."""
    return tuple(
        (shard.data_ptr(), shard.dtype, shard.shape, shard.stride())
        for shard in shards
        if shard.numel()
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """A lot of a target, which is read and passed on."""

    target: TensorToFill
    lot: Lot

    @property
    def nbytes(self) -> int:
        return self.lot.size * self.target.dtype.itemsize


@contextmanager
def meet(what: str, members: Communicator, *, is_partly_loaded: bool) -> Iterator[None]:
    """All ranks come to the end of this block; what raises on one in it raises on all."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    told = agreed_numbers(what, {}, int(problem is not None), group=members, doing="meet")
    if not any(told):
        return
    fix = _PARTLY if is_partly_loaded else _NOTHING
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    stories = members.gather_objects(text)
    if isinstance(problem, CheckpointError):
        raise type(problem)(str(problem), rank=members.rank, fix=fix) from problem
    if problem is not None:
        raise CheckpointError(f"{what} failed: {text}", rank=members.rank, fix=fix) from problem
    failed = [rank for rank, one in zip(members.ranks, stories, strict=True) if one is not None]
    first = next(one for one in stories if one is not None)
    raise CheckpointError(f"{what} failed on {ranks_text(failed)}: {first}", fix=fix)


def verify_pieces(reader: Reader, mosaics: Sequence[Mosaic], members: Communicator) -> None:
    """Compares the checksum of each saved box that the mosaics touch, divided over the ranks."""
    touched = dict.fromkeys(
        (window.name, number)
        for mosaic in mosaics
        for window in mosaic.windows
        for number in overlapping(
            reader.index.tensors[window.name].boxes, window.source_of(window.into)
        )
    )
    pieces = list(touched)
    sizes = [reader.index.tensors[name].piece(number).nbytes for name, number in pieces]
    # Each rank takes those of which the middle lies in its part of all bytes.
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    parts = len(members.ranks)
    turns = (middles * parts // max(sum(sizes), 1)).clip(0, parts - 1)
    own = members.ranks.group_rank(members.rank)
    with meet("load", members, is_partly_loaded=False):
        for (name, number), turn in zip(pieces, turns.tolist(), strict=True):
            if turn == own:
                reader.verify(name, number)


def fetch(
    targets: Sequence[TensorToFill],
    reader: Reader,
    members: Communicator,
    *,
    max_bytes: int | None,
    progress: bool | None,
) -> None:
    """Fills the targets; all ranks of the group call it. [Note: sharing]"""
    # Of a lot there may be a copy, and of that what is on its way.
    cap = None if max_bytes is None else max(max_bytes // 2, _LEAST_CAP)
    passings = [
        _Passing(target, lot)
        for turn, target in enumerate(targets)
        for lot in lots(target.layout, target.dtype.itemsize, turn=turn, max_bytes=cap)
    ]
    own = _own_reads(targets, members.rank)
    own_bytes = sum(shard.nbytes for _, _, shard in own)
    threads = num_threads(members) if own_bytes >= _WORTH_A_THREAD * len(own) else 1
    total = own_bytes + sum(one.nbytes for one in passings)
    with progress_bar("loading", total, members, show=progress) as done:
        with meet("load", members, is_partly_loaded=True):
            for nbytes in in_threads(partial(_read_own, reader), own, threads):
                done(nbytes)
        for step in in_steps(passings, least=_LEAST, most=cap):
            _pass_on(step, reader, members, cap)
            done(sum(one.nbytes for one in step))
    for target in targets:
        _set_terms(target, members.rank)
        count_writes(target.shards)


def _read_own(reader: Reader, own: tuple[TensorToFill, Box, torch.Tensor]) -> int:
    target, box, shard = own
    _read(reader, target, box, shard)
    return shard.nbytes


def _own_reads(
    targets: Sequence[TensorToFill], rank: int
) -> list[tuple[TensorToFill, Box, torch.Tensor]]:
    """The boxes that only this rank holds, and its memory for them."""
    found = []
    for target in targets:
        shards = {row: k for k, row in enumerate(target.layout.rows_of(rank).tolist())}
        for row in single_rows(target.layout, rank):
            found.append((target, target.layout.boxes[row], target.shards[shards[row]]))
    return found


def _read(reader: Reader, target: TensorToFill, box: Box, out: torch.Tensor) -> None:
    """`out` becomes a box of the target."""
    for window in target.mosaic.windows:
        common = window.into & box
        if common is None:
            continue
        view = out if common == box else out[slices_in(common, box)]
        if not window.is_plain:  # the target's dims in the order of the saved tensor's
            view = view.permute(sorted(range(len(window.dims)), key=window.dims.__getitem__))
        reader.read(window.name, window.source_of(common), view, via=target.via)


def _pass_on(
    step: Sequence[_Passing], reader: Reader, members: Communicator, cap: int | None
) -> None:
    transfers: list[Transfer] = []
    staged: list[Callable[[], None]] = []
    with meet("load", members, is_partly_loaded=True):
        for passing in step:
            transfers.append(_read_lot(passing, reader, members.rank, staged))
    execute_all(transfers, group=members, max_bytes=cap)
    for land in staged:
        land()


def _read_lot(
    passing: _Passing, reader: Reader, rank: int, staged: list[Callable[[], None]]
) -> Transfer:
    """Reads this rank's ranges of a lot; how all get to the others."""
    target, layout = passing.target, passing.target.layout
    known = shard_of_box(layout, rank)
    shards, out = [], []
    for one in passing.lot.ranges:
        if rank not in one.owners:
            continue
        shard = target.shards[known[one.row]]
        if shard.is_contiguous():
            room = shard.view(-1)[one.start : one.stop]
        else:
            room = torch.empty(one.size, dtype=shard.dtype, device=shard.device)
            staged.append(partial(_land, shard, one, room))
        if one.reader == rank:
            box = layout.boxes[one.row]
            for part, piece in _pieces(shard, one, room):
                _read(reader, target, part.shift(box.start), piece)
            shards.append(room)
        else:
            out.append(room)
    plan = _plan(passing.lot, target.dtype.itemsize)
    return Transfer(plan, shards, out, target.dtype, name=target.name)


def _pieces(
    shard: torch.Tensor, one: Range, room: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a shard that a range consists of, and their memory in a row of elements."""
    at = 0
    for box in flat_range_boxes(shard.shape, one.start, one.stop):
        yield box, room[at : at + box.volume].view(box.shape)
        at += box.volume


def _land(shard: torch.Tensor, one: Range, room: torch.Tensor) -> None:
    for box, piece in _pieces(shard, one, room):
        shard[box.slices()].copy_(piece)


@lru_cache(maxsize=256)
def _plan(lot: Lot, itemsize: int) -> TransferPlan:
    """The same object for equal lots, by which its program is found again."""
    return plan_reshard(*lot.layouts(), itemsize)


def _set_terms(target: TensorToFill, rank: int) -> None:
    """Makes the reduction of a pending tensor's terms the values that the lowest terms got."""
    layout = target.layout
    if layout.pending is None:
        return
    filled = set(filled_rows(layout).tolist())
    boxes = np.repeat(np.arange(len(layout.box_rows) - 1), np.diff(layout.box_rows))
    for row, shard in zip(layout.rows_of(rank).tolist(), target.shards, strict=True):
        if row not in filled:
            fill_identity(shard, layout.pending)
        elif layout.pending == "avg":
            rescale(shard, Scale(int(layout.num_terms[boxes[row]]), 1))
