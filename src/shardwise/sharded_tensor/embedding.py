"""Embedding and embedding_bag of a table that is cut.

[Note: whose ids] Plain indices are this rank's own, or the same on all ranks (`plain_inputs`);
sharded ones are what their layout says. Where every rank that has indices has, too, what it takes
of the table to do its part, a rule does it and nothing moves: the indices are on all ranks, or
the table is. Else the ranks with indices fetch the rows, each that they need once, and work on
those: a full gather of the table, or a sum of masked rows, would be far more. What torch's options
mean is said once for both ways: `max_norm` is done to the table before, `padding_idx` and
`scale_grad_by_freq` to the gradient after.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.comm.fetching import ask, fetch, gather_ragged
from shardwise.comm.tracing import TRACES, doing
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError, OutOfRangeError
from shardwise.geometry import Box, Layout
from shardwise.ops.embedding import look_up, pool, scale_gradient
from shardwise.ops.looking_up import check_range, has_all
from shardwise.ops.pointwise import with_dims
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.implicit import announce_move
from shardwise.sharded_tensor.plain_inputs import are_rows, check_plain
from shardwise.sharded_tensor.resharding import (
    check_one_group,
    replicated_layout,
    reshard_state,
)
from shardwise.sharded_tensor.tensor import ShardedTensor, check_writable, live_state, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.fetching import Asks
    from shardwise.sharded_tensor.state import State

__all__ = ["with_columns"]

_TINY = 1e-7  # torch adds it to a norm before it divides by it


# -- whose indices ---------------------------------------------------------------------------------


class _Distinct(NamedTuple):
    """The different rows that a piece of indices names."""

    rows: torch.Tensor  # ascending
    places: torch.Tensor  # of the shape of the indices: where each stands among `rows`
    counts: torch.Tensor  # how often


class _Ids(NamedTuple):
    """Indices on this rank. [Note: whose ids]"""

    pieces: tuple[torch.Tensor, ...]  # int64
    asks: Asks
    own: tuple[int, ...]  # the ask of each piece
    members: Communicator
    state: State | None  # None: plain, this rank's own

    @property
    def are_everywhere(self) -> bool:
        """Whether every rank has them all."""
        if self.state is None:
            return len(self.members.ranks) == 1
        layout = self.state.layout
        return layout.is_replicated and len(layout.ranks) == len(self.members.ranks)

    def distinct(self) -> list[_Distinct]:
        """Of each piece."""
        return [_distinct(piece) for piece in self.pieces]


def _distinct(ids: torch.Tensor) -> _Distinct:
    if ids.device.type == "cpu":  # numpy sorts integers in less than half the time
        found = np.unique(ids.numpy(), return_inverse=True, return_counts=True)
        rows, places, counts = map(torch.from_numpy, found)
    else:
        rows, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return _Distinct(rows, places.view(ids.shape), counts)


def _own_ids(ids: torch.Tensor, members: Communicator) -> _Ids:
    ranks = sorted(members.ranks)
    asks = tuple((rank,) for rank in ranks)
    return _Ids((_whole_numbers(ids),), asks, (ranks.index(members.rank),), members, None)


def _shared_ids(state: State) -> _Ids:
    layout = state.layout
    numbers, asks = _asks_of(layout)
    own = tuple(numbers[box] for box in layout.boxes_of(state.rank))
    pieces = tuple(map(_whole_numbers, state.shards))
    return _Ids(pieces, asks, own, state.comm, state)


def _whole_numbers(ids: torch.Tensor) -> torch.Tensor:
    return ids.detach().long()


@lru_cache(maxsize=256)
def _asks_of(layout: Layout) -> tuple[dict[Box, int], Asks]:
    """The number of each box, and the ranks that have it: an ask each."""
    ranks: dict[Box, set[int]] = {}
    for box, rank, _ in layout:
        ranks.setdefault(box, set()).add(rank)
    return {box: k for k, box in enumerate(ranks)}, tuple(tuple(sorted(r)) for r in ranks.values())


@lru_cache(maxsize=256)
def _meet(ids: Layout, weight: Layout) -> bool:
    """Whether for every two boxes some rank has both."""
    sets = [[set(ranks) for ranks in _asks_of(layout.bar)[1]] for layout in (ids, weight)]
    return all(a & b for a, b in product(*sets))


def _settled(state: State, func: Any) -> State:
    """The tensor with nothing pending."""
    if state.layout.pending is None:
        return state
    announce_move(func, state, state.layout.bar)
    return reshard_state(state, state.layout.bar)


def _as_state(tensor: torch.Tensor, like: State) -> State:
    """A tensor that is sharded, or plain and the same on all ranks."""
    if isinstance(tensor, ShardedTensor):
        return live_state(tensor)
    return like.with_carriers(
        [tensor], layout=replicated_layout(tuple(tensor.shape), like), spec=None
    )


def _is_plain(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not isinstance(tensor, ShardedTensor)


# -- what torch's options mean ---------------------------------------------------------------------


class _Options(NamedTuple):
    """Of both functions."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


def _checked(what: str, ids: Any, weight: Any, options: _Options, rank: int) -> _Options:
    """The options with a padding index from 0; raises what every rank can see to be wrong."""
    if weight.dim() != 2:
        raise ArgumentValueError(
            f"{what}: 'weight' must be 2-D", rank=rank, got=f"shape {tuple(weight.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(
            f"{what}: indices",
            rank=rank,
            expected="dtype torch.int64 or torch.int32",
            got=ids.dtype,
        )
    if options.sparse and weight.requires_grad and torch.is_grad_enabled():
        raise OpError(
            f"{what}: sparse gradients of a ShardedTensor",
            rank=rank,
            got="sparse=True",
            fix="Pass sparse=False: only rows that were used are sent, whatever the gradient is.",
        )
    padding, size = options.padding_idx, weight.shape[0]
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


def _used_by_all(ids: _Ids, found: Sequence[_Distinct], *, what: str, size: int) -> torch.Tensor:
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


def _no_rows(ids: _Ids) -> torch.Tensor:
    device = ids.members.wire_device if ids.state is None else ids.state.device
    return torch.empty(0, dtype=torch.int64, device=device)


def _frequencies(ids: _Ids, found: Sequence[_Distinct]) -> list[torch.Tensor]:
    """Of each piece's distinct rows, how often all ranks name them."""
    first = [k for k, number in enumerate(ids.own) if ids.asks[number][0] == ids.members.rank]
    mine = [torch.stack([found[k].rows, found[k].counts], 1) for k in first]
    every = torch.cat(gather_ragged(torch.cat([_no_rows(ids).view(0, 2), *mine]), ids.members))
    rows, places = torch.unique(every[:, 0], return_inverse=True)
    totals = torch.zeros_like(rows).index_add_(0, places, every[:, 1])
    return [totals[torch.searchsorted(rows, one.rows)] for one in found]


def _factors(
    ids: _Ids, found: Sequence[_Distinct] | None, options: _Options, dtype: torch.dtype
) -> list[torch.Tensor]:
    """By what the gradient of each index's row is multiplied, (..., 1)."""
    made = [ids_.new_ones((*ids_.shape, 1), dtype=dtype) for ids_ in ids.pieces]
    if options.scale_grad_by_freq:
        assert found is not None
        totals = _frequencies(ids, found)
        made = [
            total.to(dtype).reciprocal()[one.places].unsqueeze(-1)
            for total, one in zip(totals, found, strict=True)
        ]
    if options.padding_idx is not None:
        made = [
            factor.masked_fill((piece == options.padding_idx).unsqueeze(-1), 0)
            for factor, piece in zip(made, ids.pieces, strict=True)
        ]
    return made


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


# -- embedding -------------------------------------------------------------------------------------


@handles(F.embedding)
def _torch_nn_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding`; a plain result for plain indices that are this rank's own."""
    options = _Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    with doing("torch.nn.functional.embedding") if TRACES else nullcontext():
        return _embedding(input, weight, options)


@handles(torch.embedding)
def _torch_embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx == -1 else padding_idx
    options = _Options(padding, None, 2.0, scale_grad_by_freq, sparse)
    with doing("torch.embedding") if TRACES else nullcontext():
        return _embedding(indices, weight, options)


def _embedding(input: Any, weight: Any, options: _Options) -> Any:
    table, ids = _operands("embedding", F.embedding, input, weight, [input])
    options = _checked("embedding", input, weight, options, table.rank)
    needs_grad = table.requires_grad and torch.is_grad_enabled()
    is_marked = options.padding_idx is not None or options.scale_grad_by_freq
    fetches = ids.state is None or not _meet(ids.state.layout, table.layout)
    is_scaled = needs_grad and is_marked
    needs_distinct = fetches or options.max_norm is not None or options.scale_grad_by_freq
    found = ids.distinct() if needs_distinct else None
    if options.max_norm is not None:
        assert found is not None
        check_writable(weight, F.embedding)
        rows = _used_by_all(ids, found, what="embedding", size=table.layout.shape[0])
        _renormalise(table, rows, options.max_norm, options.norm_type)
    factors = _factors(ids, found, options, table.dtype) if is_scaled else None
    if not fetches:
        assert ids.state is not None
        for piece in ids.pieces:  # not all of which a kernel may see
            check_range(piece, weight.shape[0], what="embedding")
        result: Any = look_up(wrap(ids.state), weight if not _is_plain(weight) else wrap(table))
        if factors is None:
            return result
        layout = with_dims(ids.state.layout, 1)
        return scale_gradient(result, wrap(_with_pieces(ids.state, factors, layout)))
    assert found is not None
    fetched, tie = _fetched(ids, _settled(table, F.embedding), found, "embedding")
    results = [_rows_at(one.places, rows) for one, rows in zip(found, fetched, strict=True)]
    if factors is not None:
        results = [scale_gradient(r, f) for r, f in zip(results, factors, strict=True)]
    if ids.state is None:
        return results[0]
    layout = with_columns(ids.state.layout, weight.shape[1])
    return _wrapped(ids.state, results or [tie], layout)


def _rows_at(places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if places.numel():
        return F.embedding(places, rows)
    # Of no places torch's embedding has no second derivative.
    return rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[1])


def _operands(
    what: str, func: Any, input: Any, weight: Any, with_ids: Sequence[Any]
) -> tuple[State, _Ids]:
    """The table, and the indices; `with_ids` are the tensors that belong to them."""
    sharded = [one for one in (*with_ids, weight) if isinstance(one, ShardedTensor)]
    states = [live_state(one) for one in sharded]
    check_one_group(what, states)
    if not isinstance(input, torch.Tensor) or not isinstance(weight, torch.Tensor):
        raise ArgumentTypeError(
            what, expected="tensors", got=f"{type(input).__name__} and {type(weight).__name__}"
        )
    table = _as_state(weight, states[0])
    if all(map(_is_plain, with_ids)) and are_rows():
        return table, _own_ids(input, table.comm)
    plain = [one for one in with_ids if one is not None and _is_plain(one)]
    if plain:
        check_plain(func, [states[0], *plain])
    return table, _shared_ids(_settled(_as_state(input, states[0]), func))


def _fetched(
    ids: _Ids, table: State, found: Sequence[_Distinct], what: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of each piece of indices; and for a rank without any, a tie."""
    adds = table.requires_grad and torch.is_grad_enabled()
    by_ask = dict(zip(ids.own, [one.rows for one in found], strict=True))
    asked = ask(table.layout, ids.asks, list(by_ask.values()), table.comm, adds=adds, what=what)
    fetched = fetch(asked, table.carriers)
    by_number = dict(zip(by_ask, fetched, strict=True)) if by_ask else {}
    return [by_number[number] for number in ids.own], fetched[0]


@lru_cache(maxsize=256)
def with_columns(layout: Layout, width: int) -> Layout:
    """The layout of what is found for indices of `layout`: rows of `width` columns each."""
    boxes = [Box((*box.start, 0), (*box.stop, width)) for box in layout.boxes]
    return Layout((*layout.shape, width), boxes, layout.owners)


def _with_pieces(like: State, pieces: Sequence[torch.Tensor], layout: Layout) -> State:
    held = pieces or [like.carriers[0].new_empty(0, dtype=torch.get_default_dtype())]
    return like.with_carriers(held, layout=layout, spec=None)


def _wrapped(like: State, pieces: Sequence[torch.Tensor], layout: Layout) -> ShardedTensor:
    made = like.with_carriers(pieces, layout=layout, spec=None)
    made.is_from_rows = made.is_special = like.is_from_rows
    return wrap(made)


# -- embedding_bag ---------------------------------------------------------------------------------


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
    options = _Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    bags = _Bags(mode, include_last_offset)
    with doing("torch.nn.functional.embedding_bag") if TRACES else nullcontext():
        return _embedding_bag(input, weight, offsets, per_sample_weights, bags, options)


def _embedding_bag(
    input: Any, weight: Any, offsets: Any, weights: Any, bags: _Bags, options: _Options
) -> Any:
    what, func = "embedding_bag", F.embedding_bag
    table, ids = _operands(what, func, input, weight, [input, offsets, weights])
    options = _checked(what, input, weight, options, table.rank)
    _check_bags(input, offsets, weights, bags, options, table.rank)
    if ids.state is not None:
        ids = _shared_ids(_with_whole_bags(ids.state, func))
    found = ids.distinct()
    if options.max_norm is not None:
        check_writable(weight, func)
        rows = _used_by_all(ids, found, what=what, size=table.layout.shape[0])
        _renormalise(table, rows, options.max_norm, options.norm_type)
    if ids.state is None:
        (rows,), _ = _rows_for_bags(ids, _settled(table, func), found, options)
        return _pooled(found[0], ids.pieces[0], rows, offsets, weights, bags, options)
    state = ids.state
    where = Layout(
        (0,) if offsets is None else tuple(offsets.shape),
        [Box.whole((0,) if offsets is None else tuple(offsets.shape))] * len(state.layout.ranks),
        state.layout.ranks,
    )
    at = None if offsets is None else reshard_state(_as_state(offsets, state), where)
    share = None if weights is None else reshard_state(_as_state(weights, state), state.layout)
    if _is_local(state.layout, table.layout) and not options.scale_grad_by_freq:
        return pool(
            wrap(state),
            wrap(table) if _is_plain(weight) else weight,
            None if at is None else wrap(at),
            None if share is None else wrap(share),
            bags.mode,
            bags.include_last_offset,
            options.padding_idx,
        )
    fetched, tie = _rows_for_bags(ids, _settled(table, func), found, options)
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
        results = [sum(one.reshape(-1)[:0] for one in ties)]  # type: ignore[list-item]
    return _wrapped(state, results, _layout_of_bags(state.layout, offsets, bags, weight.shape[1]))


def _check_bags(
    ids: Any, offsets: Any, weights: Any, bags: _Bags, options: _Options, rank: int
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
    full = [(box, owner) for box, owner, _ in layout if box.volume]
    if layout.pending is not None or not full or len(full) == len(layout):
        return layout
    return Layout(layout.shape, [box for box, _ in full], [owner for _, owner in full])


def _is_local(ids: Layout, weight: Layout) -> bool:
    """Whether ranks with bags have all rows of some columns, so that only columns are cut."""
    return weight.pending is None and has_all(weight, 0) and _meet(ids, weight)


def _rows_for_bags(
    ids: _Ids, table: State, found: Sequence[_Distinct], options: _Options
) -> tuple[list[torch.Tensor], torch.Tensor]:
    fetched, tie = _fetched(ids, table, found, "embedding_bag")
    if options.scale_grad_by_freq and table.requires_grad and torch.is_grad_enabled():
        totals = _frequencies(ids, found)
        fetched = [
            scale_gradient(rows, total.to(rows.dtype).reciprocal().unsqueeze(-1))
            for rows, total in zip(fetched, totals, strict=True)
        ]
    return fetched, tie


def _pooled(
    one: _Distinct,
    ids: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    bags: _Bags,
    options: _Options,
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
        return Layout(shape, [Box.whole(shape)] * len(ids.ranks), ids.ranks)
    boxes = [Box((box.start[0], 0), (box.stop[0], width)) for box in ids.boxes]
    return Layout((ids.shape[0], width), boxes, ids.owners)
