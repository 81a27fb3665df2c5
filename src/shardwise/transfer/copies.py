"""Copies: which holder each rank gets a region from when nothing has to be reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.transfer.moves import NO_GROUP, Moves, ragged

if TYPE_CHECKING:
    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints
    from shardwise.transfer.regions import Regions

__all__ = ["copies", "most_copies", "num_not_held"]

_LEAST_PART = 1 << 16  # bytes: a smaller piece is not split among its holders
_PARTS_OF_MEAN = 4  # a piece is split into parts of a quarter of the mean load
_TOLERANCE = 1.25  # how far above the mean the largest load may be before pieces are split


def copies(source: Layout, target: Layout, regions: Regions, itemsize: int) -> Moves:
    """Moves that fill the regions on every target rank: [Note: sources].

    [Note: sources] A rank that holds a region copies it from itself. Otherwise it comes from the
    holder that has the least to send so far, large regions first. If the largest sender is then
    far above the mean, large regions are split among their holders, in one part a holder.
    """
    regions, target_row = _on_every_rank(target, regions)
    box, dst = regions.source_box, target.owners[target_row]
    num_holders = np.diff(source.box_rows)[box]
    source_row = source.box_rows[box]
    if has_replicas := bool((num_holders > 1).any()):
        own_row = _row_on_rank(source, box, dst)
        source_row = np.where(own_row >= 0, own_row, source_row)
    moves = Moves(
        regions.starts,
        regions.stops,
        source_row,
        target_row,
        source.owners[source_row],
        dst,
        np.zeros(len(dst), np.int64),
        np.full(len(dst), NO_GROUP, np.int64),
    )
    if not has_replicas:
        return moves
    is_open = (own_row < 0) & (num_holders > 1)
    if not is_open.any():
        return moves
    return _balanced(source, moves, is_open, num_holders, itemsize)


def most_copies(source: Layout, target: Layout, regions: Regions, itemsize: int) -> Ints:
    """Moves that fill each region on every target rank, that many or fewer, (n,)."""
    nbytes = regions.volumes * itemsize
    longest = (regions.stops - regions.starts).max(axis=1, initial=1)
    parts = np.minimum(np.diff(source.box_rows)[regions.source_box], -(-nbytes // _LEAST_PART))
    most: Ints = np.diff(target.box_rows)[regions.target_box] * np.clip(parts, 1, longest)
    return most


def num_not_held(source: Layout, target: Layout, regions: Regions) -> Ints:
    """For every region, on how many ranks of the target it is not held before, (n,)."""
    first, count = target.box_rows[:-1], np.diff(target.box_rows)
    pick, target_row = ragged(first[regions.target_box], count[regions.target_box])
    own = _row_on_rank(source, regions.source_box[pick], target.owners[target_row])
    return np.bincount(pick[own < 0], minlength=len(regions)).astype(np.int64)


def _on_every_rank(target: Layout, regions: Regions) -> tuple[Regions, Ints]:
    """The regions, each once for every row of its target box, and these rows."""
    if target.has_every_box_once:  # the usual case, without a copy
        return regions, regions.target_box
    first, count = target.box_rows[:-1], np.diff(target.box_rows)
    pick, rows = ragged(first[regions.target_box], count[regions.target_box])
    return regions[pick], rows


def _row_on_rank(layout: Layout, box: Ints, rank: Ints) -> Ints:
    """Row of the distinct box `box[k]` on `rank[k]`, or -1, (n,); the first of its terms."""
    ranks = np.array(layout.ranks)
    num_rows = np.diff(layout.box_rows)
    keys = np.repeat(np.arange(len(num_rows)), num_rows) * len(ranks)
    keys += np.searchsorted(ranks, layout.owners)  # ascending: rows are in order of box, rank
    at = np.minimum(np.searchsorted(ranks, rank), len(ranks) - 1)
    wanted = box * len(ranks) + at
    row = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[row] == wanted) & (ranks[at] == rank), row, -1)


def _balanced(
    source: Layout, moves: Moves, is_open: np.ndarray, num_holders: Ints, itemsize: int
) -> Moves:
    """`moves` with a sender for the open ones, which have several holders and no own one."""
    open_rows = np.flatnonzero(is_open)
    jobs = _Jobs(
        first=source.box_rows[
            np.searchsorted(source.box_rows, moves.source_row[open_rows], side="right") - 1
        ],
        count=num_holders[open_rows],
        nbytes=moves.volumes[open_rows] * itemsize,
    )
    load = _Load(source, moves[~is_open & (moves.src != moves.dst)], itemsize)
    sender = load.share(jobs)
    num_parts = load.parts_wanted(jobs, moves, open_rows, sender, itemsize)
    if num_parts is None:
        return _with_senders(source, moves, open_rows, sender)
    split, parent = _split(moves, open_rows, num_parts)
    parts = _Jobs(jobs.first[parent], jobs.count[parent], split.volumes * itemsize)
    sender = load.share(parts)
    # Parts of one piece that have one sender become neighbours, then one part again.
    order = np.lexsort((sender, parent))
    split = _with_senders(source, split, np.arange(len(split)), sender[order])
    rest = moves[~is_open]
    return Moves.concatenate([rest, _merged(split, parent)], source.ndim).in_order()


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Pieces to send, each by one of the rows `first ... first + count - 1` of the source."""

    first: Ints
    count: Ints
    nbytes: Ints


class _Load:
    """Bytes that every rank has to send, before the open pieces are dealt out."""

    def __init__(self, source: Layout, fixed: Moves, itemsize: int) -> None:
        self.ranks = np.array(source.ranks)
        self.slot = np.searchsorted(self.ranks, source.owners)  # of every row of the source
        self.fixed = np.zeros(len(self.ranks), np.int64)
        np.add.at(self.fixed, np.searchsorted(self.ranks, fixed.src), fixed.volumes * itemsize)

    def share(self, jobs: _Jobs) -> Ints:
        """The row that sends each job: the holder with the least so far, large jobs first."""
        load = self.fixed.tolist()
        slot = self.slot.tolist()
        order = np.argsort(-jobs.nbytes, kind="stable")
        columns = (jobs.first[order], jobs.first[order] + jobs.count[order], jobs.nbytes[order])
        sender = []
        least = load.__getitem__
        for first, last, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            row = first
            if last - first == 2:  # most often, and quicker so
                row += load[slot[first + 1]] < load[slot[first]]
            else:
                slots = slot[first:last]
                row += slots.index(min(slots, key=least))
            load[slot[row]] += nbytes
            sender.append(row)
        found = np.empty(len(order), np.int64)
        found[order] = sender
        return found

    def parts_wanted(
        self, jobs: _Jobs, moves: Moves, open_rows: Ints, sender: Ints, itemsize: int
    ) -> Ints | None:
        """Into how many parts each job should be split, or None if the loads are even enough."""
        load = self.fixed.copy()
        np.add.at(load, self.slot[sender], jobs.nbytes)
        _, holders = ragged(jobs.first, jobs.count)
        able = np.unique(self.slot[holders])
        mean = load[able].mean()
        if load[able].max() <= _TOLERANCE * mean:
            return None
        part = max(mean / _PARTS_OF_MEAN, _LEAST_PART)
        longest = (moves.stops - moves.starts)[open_rows].max(axis=1, initial=1)
        parts = np.minimum(np.ceil(jobs.nbytes / part), _PARTS_OF_MEAN * jobs.count)
        wanted = np.clip(parts, 1, longest).astype(np.int64)
        return wanted if (wanted > 1).any() else None


def _with_senders(source: Layout, moves: Moves, rows: Ints, sender: Ints) -> Moves:
    source_row, src = moves.source_row.copy(), moves.src.copy()
    source_row[rows], src[rows] = sender, source.owners[sender]
    return replace(moves, source_row=source_row, src=src)


def _split(moves: Moves, rows: Ints, num_parts: Ints) -> tuple[Moves, Ints]:
    """Every move of `rows` in even parts along its first dim that has room for them, which one has.

    Returns the parts and which of `rows` each is of.
    """
    parent, part = ragged(np.zeros(len(rows), np.int64), num_parts)
    pieces = moves[rows[parent]]
    sizes = pieces.stops - pieces.starts
    dim = (sizes >= num_parts[parent][:, None]).argmax(axis=1)
    each = np.arange(len(parent))
    low, size = pieces.starts[each, dim], sizes[each, dim]
    starts, stops = pieces.starts.copy(), pieces.stops.copy()
    starts[each, dim] = low + part * size // num_parts[parent]
    stops[each, dim] = low + (part + 1) * size // num_parts[parent]
    return replace(pieces, starts=starts, stops=stops), parent


def _merged(parts: Moves, parent: Ints) -> Moves:
    """Neighbouring parts of one piece that have one sender, joined."""
    new = np.ones(len(parts), dtype=bool)
    new[1:] = (parent[1:] != parent[:-1]) | (parts.source_row[1:] != parts.source_row[:-1])
    last = np.append(np.flatnonzero(new)[1:], len(parts)) - 1
    return replace(parts[new], stops=parts.stops[last])
