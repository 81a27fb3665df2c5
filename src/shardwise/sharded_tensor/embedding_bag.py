"""`F.embedding_bag` of a table that is cut: whoever has some of a bag pools all of it.

[Note: whose ids] in `embedding_ids.py` says when rows are fetched.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from shardwise.comm.agreement import heard_by_all
from shardwise.comm.tracing import TRACES, doing
from shardwise.errors import ArgumentValueError
from shardwise.geometry import Box, Layout
from shardwise.ops.embedding import pool, scale_gradient
from shardwise.ops.looking_up import check_range, has_all
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.embedding_ids import (
    as_state,
    fetched_rows,
    is_plain,
    meet,
    operands_of,
    shared_ids,
    wrapped,
)
from shardwise.sharded_tensor.embedding_options import (
    Options,
    checked_options,
    frequencies,
    keep_norms,
)
from shardwise.sharded_tensor.implicit import announce_move, settle
from shardwise.sharded_tensor.resharding import replicated_layout, reshard_state
from shardwise.sharded_tensor.tensor import wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharded_tensor.embedding_ids import Distinct, Ids
    from shardwise.sharded_tensor.state import State

__all__: list[str] = []


class _Bags(NamedTuple):
    """How indices are pooled."""

    mode: str
    include_last_offset: bool


@handles(F.embedding_bag)
def _torch_nn_embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`F.embedding_bag`; a plain result for plain indices that are this rank's own."""
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    bags = _Bags(mode, include_last_offset)
    with doing("torch.nn.functional.embedding_bag") if TRACES else nullcontext():
        return _embedding_bag(input, weight, offsets, per_sample_weights, bags, options)


def _embedding_bag(
    input: Any, weight: Any, offsets: Any, weights: Any, bags: _Bags, options: Options
) -> Any:
    func = F.embedding_bag
    table, ids = operands_of(func, input, weight, [input, offsets, weights])
    options = checked_options(func, input, table, options)
    _check_bags(input, offsets, weights, bags, options, table.rank)
    if ids.state is not None:
        ids = shared_ids(_with_whole_bags(ids.state, func))
    found = ids.distinct()
    keep_norms(weight, table, ids, found, options, func)
    if ids.state is None:
        (rows,), _ = _rows_for_bags(ids, settle(func, table), found, options)
        return _pooled(found[0], ids.pieces[0], rows, offsets, weights, bags, options)
    state = ids.state
    at = None
    if offsets is not None:
        where = Layout.replicated(tuple(offsets.shape), state.layout.ranks)
        at = reshard_state(as_state(offsets, state), where)
    share = None if weights is None else reshard_state(as_state(weights, state), state.layout)
    if _is_local(state.layout, table.layout) and not options.scale_grad_by_freq:
        with heard_by_all("embedding_bag", ids.members):
            for one in found:
                check_range(one.rows, table.layout.shape[0], what="embedding_bag")
        return pool(
            wrap(state),
            wrap(table) if is_plain(weight) else weight,
            None if at is None else wrap(at),
            None if share is None else wrap(share),
            bags.mode,
            bags.include_last_offset,
            options.padding_idx,
        )
    fetched, tie = _rows_for_bags(ids, settle(func, table), found, options)
    results = [
        _pooled(
            one,
            piece,
            rows,
            None if at is None else at.shards[0],
            None if share is None else share.shards[k],
            bags,
            options,
        )
        for k, (one, piece, rows) in enumerate(zip(found, ids.pieces, fetched, strict=True))
    ]
    if not results:
        ties = [tie] if share is None else [tie, share.carriers[0]]
        results = [sum(one.reshape(-1)[:0] for one in ties)]  # type: ignore[list-item]  # ties is not empty
    return wrapped(state, results, _layout_of_bags(state.layout, offsets, bags, weight.shape[1]))


def _check_bags(
    ids: Any, offsets: Any, weights: Any, bags: _Bags, options: Options, rank: int
) -> None:
    """Raises, on every rank, what torch raises of arguments that do not fit together."""

    def wrong(what: str, got: object) -> ArgumentValueError:
        return ArgumentValueError(f"embedding_bag: {what}", rank=rank, got=got)

    if bags.mode not in ("sum", "mean", "max"):
        raise wrong("mode has to be one of sum, mean or max", repr(bags.mode))
    if ids.dim() not in (1, 2):
        raise wrong("input has to be 1D or 2D Tensor", f"{ids.dim()} dims")
    if (ids.dim() == 1) != (offsets is not None):
        raise wrong("offsets has to be a 1D Tensor for 1D input, None for 2D", type(offsets))
    if offsets is not None and offsets.dim() != 1:
        raise wrong("offsets has to be a 1D Tensor", f"{offsets.dim()} dims")
    if weights is not None and weights.shape != ids.shape:
        raise wrong("per_sample_weights must have the shape of input", tuple(weights.shape))
    if weights is not None and bags.mode != "sum":
        raise wrong("per_sample_weights are for mode='sum' only", repr(bags.mode))
    if bags.mode == "max" and options.scale_grad_by_freq:
        raise wrong("max mode does not support scaling the gradient by the frequency", True)


def _with_whole_bags(ids: State, func: Any) -> State:
    """The indices such that whoever has some of a bag has all of it."""
    layout = _without_empty(ids.layout)
    if not (layout.is_replicated or (layout.ndim == 2 and layout.is_whole(1))):
        layout = replicated_layout(layout.shape, ids)
        announce_move(func, ids, layout)
    return ids if layout is ids.layout else reshard_state(ids, layout)


@lru_cache(maxsize=256)
def _without_empty(layout: Layout) -> Layout:
    """The layout less boxes without elements, in which bags that are elsewhere would be empty."""
    full = [entry for entry in layout if entry.box.volume]
    if layout.pending is not None or not full or len(full) == len(layout):
        return layout
    return Layout.of(layout.shape, full)


def _is_local(ids: Layout, weight: Layout) -> bool:
    """Whether ranks with bags have all rows of some columns, so that only columns are cut."""
    return weight.pending is None and has_all(weight, 0) and meet(ids, weight)


def _rows_for_bags(
    ids: Ids, table: State, found: Sequence[Distinct], options: Options
) -> tuple[list[torch.Tensor], torch.Tensor]:
    fetched, tie = fetched_rows(ids, table, found, F.embedding_bag)
    if options.scale_grad_by_freq and table.requires_grad and torch.is_grad_enabled():
        totals = frequencies(ids, found)
        fetched = [
            scale_gradient(rows, total.to(rows.dtype).reciprocal().unsqueeze(-1))
            for rows, total in zip(fetched, totals, strict=True)
        ]
    return fetched, tie


def _pooled(
    one: Distinct,
    ids: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    bags: _Bags,
    options: Options,
) -> torch.Tensor:
    """The bags, by torch's own function on the rows that were fetched."""
    places, padding = one.places, None
    if options.padding_idx is not None or not len(rows):
        # torch wants a row to be there; padding gets one that nothing else has.
        padding = len(rows)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        if options.padding_idx is not None:
            places = torch.where(ids == options.padding_idx, padding, places)
    return pool(
        places,
        rows,
        None if offsets is None else offsets.long(),
        weights,
        bags.mode,
        bags.include_last_offset,
        padding,
    )


def _layout_of_bags(ids: Layout, offsets: Any, bags: _Bags, width: int) -> Layout:
    if offsets is not None:
        shape = (offsets.shape[0] - bool(bags.include_last_offset), width)
        return Layout.replicated(shape, ids.ranks)
    boxes = [Box((box.start[0], 0), (box.stop[0], width)) for box in ids.boxes]
    return Layout((ids.shape[0], width), boxes, ids.owners)
