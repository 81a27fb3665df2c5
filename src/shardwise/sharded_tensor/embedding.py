"""`F.embedding` of a table that is cut: by a rule, or by fetched rows.

[Note: whose ids] in `embedding_ids.py` says when rows are fetched.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwise.comm.agreement import heard_by_all
from shardwise.comm.differentiable import carriers_of
from shardwise.comm.tracing import TRACES, doing
from shardwise.ops.embedding import look_up, rows_at, scale_gradient
from shardwise.ops.looking_up import check_range
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.embedding_ids import (
    fetched_rows,
    is_plain,
    meet,
    operands_of,
    with_columns,
    wrapped,
)
from shardwise.sharded_tensor.embedding_options import (
    Options,
    checked_options,
    frequencies,
    keep_norms,
)
from shardwise.sharded_tensor.implicit import settle
from shardwise.sharded_tensor.tensor import wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharded_tensor.embedding_ids import Distinct, Ids

__all__: list[str] = []


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
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
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
    options = Options(padding, None, 2.0, scale_grad_by_freq, sparse)
    with doing("torch.embedding") if TRACES else nullcontext():
        return _embedding(indices, weight, options)


def _embedding(input: Any, weight: Any, options: Options) -> Any:
    table, ids = operands_of(F.embedding, input, weight, [input])
    options = checked_options(F.embedding, input, table, options)
    needs_grad = table.requires_grad and torch.is_grad_enabled()
    is_marked = options.padding_idx is not None or options.scale_grad_by_freq
    fetches = ids.state is None or not meet(ids.state.layout, table.layout)
    is_scaled = needs_grad and is_marked
    needs_distinct = fetches or options.max_norm is not None or options.scale_grad_by_freq
    found = ids.distinct() if needs_distinct else None
    if options.max_norm is not None:
        assert found is not None
        keep_norms(weight, table, ids, found, options, F.embedding)
    factors = _factors(ids, found, options, table.dtype) if is_scaled else None
    if not fetches:
        assert ids.state is not None
        with heard_by_all("embedding", ids.members):
            for piece in ids.pieces:  # not all of which a kernel may see
                check_range(piece, table.layout.shape[0], what="embedding")
        asked = wrap(ids.state) if is_plain(input) or input._state is not ids.state else input
        result: Any = look_up(asked, wrap(table) if is_plain(weight) else weight)
        if factors is None:
            return result
        carriers = carriers_of(factors, dtype=table.dtype, device=ids.state.device)
        layout = with_columns(ids.state.layout, 1)
        scales = ids.state.with_carriers(carriers, layout=layout, spec=None)
        return scale_gradient(result, wrap(scales))
    assert found is not None
    fetched, tie = fetched_rows(ids, settle(F.embedding, table), found, F.embedding)
    results = [rows_at(one.places, rows) for one, rows in zip(found, fetched, strict=True)]
    if factors is not None:
        results = [scale_gradient(r, f) for r, f in zip(results, factors, strict=True)]
    if ids.state is None:
        return results[0]
    layout = with_columns(ids.state.layout, weight.shape[1])
    return wrapped(ids.state, results or [tie], layout)


def _factors(
    ids: Ids, found: Sequence[Distinct] | None, options: Options, dtype: torch.dtype
) -> list[torch.Tensor]:
    """By what the gradient of each index's row is multiplied, (..., 1)."""
    made = [ids_.new_ones((*ids_.shape, 1), dtype=dtype) for ids_ in ids.pieces]
    if options.scale_grad_by_freq:
        assert found is not None
        totals = frequencies(ids, found)
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
