"""What torch's options of an embedding mean, whether rows are fetched or not.

`max_norm` is done to the table before, `padding_idx` and `scale_grad_by_freq` to the gradient
after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.comm.swapping import gather_ragged
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError, OutOfRangeError
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box
    from shardwise.sharded_tensor.embedding_ids import Distinct, Ids
    from shardwise.sharded_tensor.state import State

__all__ = ["Options", "checked_options", "frequencies", "keep_norms"]

_TINY = 1e-7  # torch adds it to a norm before it divides by it


class Options(NamedTuple):
    """Of both functions."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


def checked_options(func: Any, ids: Any, table: State, options: Options) -> Options:
    """The options with a padding index from 0; raises what every rank can see to be wrong."""
    what, rank, shape = func.__name__, table.rank, table.layout.shape
    if len(shape) != 2:
        raise ArgumentValueError(f"{what}: 'weight' must be 2-D", rank=rank, got=f"shape {shape}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(
            f"{what}: indices",
            rank=rank,
            expected="dtype torch.int64 or torch.int32",
            got=ids.dtype,
        )
    if options.sparse and table.requires_grad and torch.is_grad_enabled():
        raise OpError(
            f"{what}: sparse gradients of a ShardedTensor",
            rank=rank,
            got="sparse=True",
            fix="Pass sparse=False: only rows that were used are sent, whatever the gradient is.",
        )
    padding, size = options.padding_idx, shape[0]
    if padding is None:
        return options
    if not -size <= padding < size:
        raise ArgumentValueError(
            f"{what}: Padding_idx must be within num_embeddings",
            rank=rank,
            expected=f"{-size} to {size - 1}",
            got=padding,
        )
    return options._replace(padding_idx=padding % size)


def keep_norms(
    weight: Any, table: State, ids: Ids, found: Sequence[Distinct], options: Options, func: Any
) -> None:
    """Does to the rows that are used what `max_norm` says, if it says anything."""
    if options.max_norm is None:
        return
    check_writable(weight, func)
    rows = _used_by_all(ids, found, what=func.__name__, size=table.layout.shape[0])
    _renormalise(table, rows, options.max_norm, options.norm_type)


def _used_by_all(ids: Ids, found: Sequence[Distinct], *, what: str, size: int) -> torch.Tensor:
    """All rows that some rank uses, ascending, the same on every rank."""
    rows = torch.cat([one.rows for one in found] or [_no_rows(ids)])
    if not ids.are_everywhere:
        rows = torch.cat(gather_ragged(rows, ids.members))
    used: torch.Tensor = torch.unique(rows)
    if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < size:
        raise OutOfRangeError(
            f"{what}: index out of range in self",
            rank=ids.members.rank,
            expected=f"indices from 0 to {size - 1}",
            got=int(used[0]) if used[0] < 0 else int(used[-1]),
        )
    return used


def _no_rows(ids: Ids) -> torch.Tensor:
    device = ids.members.wire_device if ids.state is None else ids.state.device
    return torch.empty(0, dtype=torch.int64, device=device)


def _renormalise(weight: State, rows: torch.Tensor, most: float, order: float) -> None:
    """Scales these rows of the table, where their norm is larger, to `most`, in place."""
    with torch.no_grad():
        norms = _norms(reshard_state(weight, weight.layout.bar), rows, order)
        scales = torch.where(norms > most, most / (norms + _TINY), 1)
        for box, shard in zip(weight.boxes, weight.shards, strict=True):
            span, local = _rows_in(rows, box)
            # Also addends of a pending sum, which is scaled as they are.
            shard.index_copy_(0, local, shard[local] * scales[span, None])


def _rows_in(rows: torch.Tensor, box: Box) -> tuple[slice, torch.Tensor]:
    """Which of `rows`, ascending, are in a box, and where."""
    ends = torch.tensor([box.start[0], box.stop[0]], device=rows.device)
    low, high = torch.searchsorted(rows, ends).tolist()
    return slice(low, high), rows[low:high] - box.start[0]


def _norms(weight: State, rows: torch.Tensor, order: float) -> torch.Tensor:
    """The norms of these rows of the table; exact for all rows that this rank has some of."""
    nothing = torch.inf if order < 0 else 0.0
    is_cut = not weight.layout.is_whole(1)
    norms = weight.carriers[0].new_full((1, len(rows)), nothing)
    for box, shard in zip(weight.boxes, weight.shards, strict=True):
        if box.is_empty or (is_cut and weight.layout.replicas_of(box)[0] != weight.rank):
            continue  # of replicas, one counts
        span, local = _rows_in(rows, box)
        part = torch.linalg.vector_norm(shard[local], order, dim=1)
        norms[0, span] = _together(torch.stack([norms[0, span], part]), order)
    if is_cut:
        norms = torch.cat(gather_ragged(norms, weight.comm))
    return _together(norms, order)


def _together(parts: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of vectors from those of their parts, which are counts if `order` is 0."""
    return parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, dim=0)


def frequencies(ids: Ids, found: Sequence[Distinct]) -> list[torch.Tensor]:
    """Of each piece's distinct rows, how often all ranks name them."""
    first = [k for k, number in enumerate(ids.own) if ids.asks[number][0] == ids.members.rank]
    mine = [torch.stack([found[k].rows, found[k].counts], 1) for k in first]
    every = torch.cat(gather_ragged(torch.cat([_no_rows(ids).view(0, 2), *mine]), ids.members))
    rows, places = torch.unique(every[:, 0], return_inverse=True)
    totals = torch.zeros_like(rows).index_add_(0, places, every[:, 1])
    return [totals[torch.searchsorted(rows, one.rows)] for one in found]
