"""The losses of rows of logits, by targets that are classes.

[Note: losses of classes] With L the log-sum-exp of the logits of a row, its loss is L minus the
logit of the target. Of a piece that has some of the classes others need its own log-sum-exp, the
logit of the target if that is one of them, and what weights and label smoothing ask for: a few
numbers per row, which travel once. Ranks that hold parts of a row then compute the same loss, so
its gradient is on each of them, and the gradient of a piece needs nothing from elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from shardwise._torch_compat import autocast_dtype
from shardwise.geometry import Box
from shardwise.ops.beside import beside
from shardwise.ops.outlines import outlines
from shardwise.ops.own_functions import own_function
from shardwise.ops.phantoms import as_tie, unit_of
from shardwise.ops.reducing import everywhere
from shardwise.ops.rule import Decision, Need, Rule, register
from shardwise.ops.slots import Fold, Prepared, decide_slots, wide_dtype
from shardwise.ops.softmax import log_sum_of_own, softmax_of_piece, softmax_times
from shardwise.ops.terms import Reduced, terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Layout
    from shardwise.ops.beside import Beside
    from shardwise.ops.rule import Call, Invoke, Operand, OperandPieces, OutputPieces
    from shardwise.ops.slots import Tensors
    from shardwise.ops.terms import Terms

__all__ = ["Options", "class_dim", "row_losses"]


class Options(NamedTuple):
    """What the loss of a row depends on, beside its logits, target and weights."""

    ignore_index: int
    smoothing: float
    is_log: bool  # whether the input has logarithms already: nll_loss


# -- rows ------------------------------------------------------------------------------------------


@own_function
def row_losses(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    is_log: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every row, and the weight that it has in a mean."""
    losses = (
        F.nll_loss(input, target, weight, None, ignore_index, None, "none")
        if is_log
        else F.cross_entropy(
            input, target, weight, None, ignore_index, None, "none", label_smoothing=smoothing
        )
    )
    is_valid = target != ignore_index
    if weight is None:
        return losses, is_valid.to(losses.dtype)
    picked = torch.take(weight.detach(), torch.where(is_valid, target, 0))
    return losses, (picked * is_valid).to(losses.dtype)


def _decide_rows(call: Call) -> Decision | None:
    outlines(call)  # raises what torch raises
    x, target = call.operands[:2]
    if not math.prod(x.shape):
        return everywhere(call)
    dim = class_dim(len(x.shape))
    reduced = Reduced(x.shape, (dim,))
    layout = x.layout.bar
    terms = terms_of(layout, reduced, call.rank)
    besides = [beside(target, tuple(k for k in range(len(x.shape)) if k != dim), layout, call.rank)]
    if len(call.operands) == 3:
        besides.append(beside(call.operands[2], (dim,), layout, call.rank))
    if terms.is_whole:
        return _decide_whole(call, terms, layout, besides)
    options = Options(*call.args[3:])
    rows = _Rows(dim, x.shape[dim], options, len(besides) > 1)
    prepared = Prepared(
        (Need(layout), *[one.need for one in besides]),
        lambda pieces: _prepared(pieces, layout.boxes_of(call.rank), besides, rows),
        lambda ones: _known_of_ones(ones, rows),
    )
    return decide_slots(call, terms, layout, rows.fold(x), prepared=prepared)


def class_dim(ndim: int) -> int:
    """The dim of the classes: after that of the rows, if there is one."""
    return min(ndim - 1, 1)


def _decide_whole(call: Call, terms: Terms, layout: Layout, besides: Sequence[Beside]) -> Decision:
    """All classes of a row are in one piece: torch's own function on every piece."""
    output = terms.layout(None)
    boxes = output.boxes_of(call.rank)
    cells = {terms.reduced.result_box(cell): cell for cell in terms.holders}
    options = Options(*call.args[3:])

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        parts = [one.narrow_parts(held) for one, held in zip(besides, pieces[1:], strict=True)]
        given = list(zip(pieces[0], *parts, strict=True))
        rows = []
        for box in boxes:
            if box.volume:
                (share,) = terms.shares[cells[box], 0]
                rows.append(invoke(*given[share.piece]))
            else:
                rows.append([tie.reshape(box.shape) for tie in phantom(pieces[0][0])])
        return [list(column) for column in zip(*rows, strict=True)]

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        ndim = layout.ndim
        ones = unit_of(ties[:1], (1,) * ndim)
        target = torch.zeros((1,) * (ndim - 1), dtype=torch.int64, device=ones.device)
        weight = ones.detach().reshape(1) if len(besides) > 1 else None
        return [as_tie(one) for one in row_losses(ones, target, weight, *options)]

    return Decision(
        (Need(layout), *[one.need for one in besides]), (output, output), kernel, phantom=phantom
    )


def _result_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of losses, now: autocast may change it."""
    if autocast_dtype(x.device.type) is None:
        return x.dtype
    ones = torch.ones((1, 1), dtype=x.dtype, device=x.device)
    return F.cross_entropy(ones, torch.zeros(1, dtype=torch.int64, device=x.device)).dtype


# -- pieces with some of the classes ---------------------------------------------------------------


class _Rows(NamedTuple):
    """What is known of rows: one number of each kind, in this order. [Note: losses of classes]"""

    dim: int
    num_classes: int
    options: Options
    has_weight: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        found = [] if self.options.is_log else ["total"]
        found += ["picked", "valid"]
        if self.has_weight:
            found.append("weight")
        if self.options.smoothing:
            found.append("dense")  # the sum of all logits, by their weights
            if self.has_weight:
                found.append("weights")  # the sum of all weights
        return tuple(found)

    def fold(self, x: Operand) -> Fold:
        kinds = self.kinds

        def merged(
            partials: Tensors, log_sum: Callable[[torch.Tensor], torch.Tensor]
        ) -> list[torch.Tensor]:
            by_kind = zip(kinds, partials[0].unbind(1), strict=True)
            return [log_sum(one) if kind == "total" else one.sum(0) for kind, one in by_kind]

        def final(values: Sequence[torch.Tensor]) -> Tensors:
            loss, weight = self.loss(dict(zip(kinds, values, strict=True)))
            ones = torch.empty(0, dtype=x.dtype, device=loss.device)
            dtype = _result_dtype(ones)
            return loss.to(dtype), weight.detach().to(dtype)

        identity = tuple(-math.inf if kind == "total" else 0.0 for kind in kinds)
        return Fold(
            lambda partial, _: (partial,),
            lambda partials: (torch.stack(merged(partials, log_sum_of_own)),),
            lambda partial: final(partial[0].unbind(0)),
            lambda _: (identity,),
            conclude=lambda partials: final(merged(partials, lambda slots: slots.logsumexp(0))),
        )

    def loss(self, known: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each row, and its weight in a mean."""
        is_valid = known["valid"].detach() > 0
        weight = known["weight"] if self.has_weight else known["valid"]
        total = known.get("total", 0.0)
        found = total - known["picked"]
        if self.has_weight:
            found = weight.detach() * found
        smoothing = self.options.smoothing
        if smoothing:
            weights: Any = known["weights"].detach() if self.has_weight else self.num_classes
            smooth = weights * total - known["dense"]
            found = (1 - smoothing) * found + smoothing / self.num_classes * smooth
        return torch.where(is_valid, found, 0.0), weight


def _prepared(
    pieces: OperandPieces,
    boxes: Sequence[Box],
    besides: Sequence[Beside],
    rows: _Rows,
) -> list[torch.Tensor]:
    """What is known of the rows of each local piece."""
    parts = [one.parts(held) for one, held in zip(besides, pieces[1:], strict=True)]
    found = []
    for box, piece, *aside in zip(boxes, pieces[0], *parts, strict=True):
        dtype = wide_dtype(piece.dtype)
        if box.volume:
            found.append(_known_of(piece.to(dtype), box, rows, *aside))
        else:
            found.append(_known_of_ones(unit_of([piece], (1,) * piece.ndim), rows)[:0])
    return found


def _known_of_ones(ones: torch.Tensor, rows: _Rows) -> torch.Tensor:
    box = Box.whole(tuple(ones.shape))
    target = torch.zeros(ones.shape, dtype=torch.int64, device=ones.device)
    weight = ones.detach() if rows.has_weight else None
    return _known_of(ones.to(wide_dtype(ones.dtype)), box, rows, target, weight)


def _known_of(
    piece: torch.Tensor,
    box: Box,
    rows: _Rows,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    dim, options = rows.dim, rows.options
    shape = [1 if k == dim else n for k, n in enumerate(piece.shape)]
    target = target.expand(shape)
    is_valid = target != options.ignore_index
    is_wrong = is_valid & ((target < 0) | (target >= rows.num_classes))
    if is_wrong.is_cpu and is_wrong.any():
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")
    is_here = is_valid & (target >= box.start[dim]) & (target < box.stop[dim])
    index = torch.where(is_here, target - box.start[dim], 0)
    if not is_wrong.is_cpu:
        index = torch.where(is_wrong, -1, index)  # so that the device says it
    weight = None if weight is None else weight.detach().to(piece.dtype)
    values = _Values.apply(  # type: ignore[no-untyped-call]  # torch's
        piece, index, is_here, weight, dim, options.is_log, bool(options.smoothing)
    )
    known = dict(zip(("picked", "total", "dense"), values, strict=False))
    known["valid"] = is_here.to(piece.dtype)
    if weight is not None:
        known["weight"] = torch.take(weight, index) * is_here
        known["weights"] = weight.sum().expand(shape)
    return torch.stack([known[kind] for kind in rows.kinds])


class _Values(torch.autograd.Function):
    """Of a piece's rows the picked logit, then the log-sum-exp and the sum by weights.

    One function, so that backward makes one tensor of the size of the piece, which is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        index, is_here, weight, dim, is_log, is_dense = given
        picked = torch.where(is_here, x.gather(dim, index), 0.0)
        own, total = (None, picked.new_zeros(picked.shape)) if is_log else softmax_of_piece(x, dim)
        ctx.save_for_backward(x, own, index, is_here, weight)
        ctx.dim, ctx.is_log = dim, is_log
        ctx.set_materialize_grads(False)
        if not is_dense:
            return picked, total
        return picked, total, (x if weight is None else x * weight).sum(dim, keepdim=True)

    @staticmethod
    def backward(
        ctx: Any, of_picked: Any, of_total: Any, of_dense: Any = None
    ) -> tuple[torch.Tensor | None, ...]:
        x, own, index, is_here, weight = ctx.saved_tensors
        has_total = own is not None and of_total is not None
        found = softmax_times(ctx, x, own, of_total) if has_total else torch.zeros_like(x)
        if of_picked is not None:
            addend = torch.where(is_here, of_picked, 0.0)
            # In place also where gradients are followed: nothing so far needs what is overwritten.
            found.scatter_add_(ctx.dim, index, addend)
        if of_dense is not None:
            found.add_(of_dense if weight is None else of_dense * weight)
        return found, None, None, None, None, None, None


register(Rule("cross_entropy", _decide_rows), [row_losses])
