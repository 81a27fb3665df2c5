"""Softmax and its logarithm: torch's kernel where the dim is whole, else of every piece.

[Note: softmax of pieces] All that others need of a piece is its log-sum-exp. With L the log-sum-exp
of those of all pieces, the logarithm of the softmax is x - L on every piece.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise.call_site import user_level
from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.phantoms import phantom_of_one
from shardwise.ops.reducing import decide_whole, everywhere
from shardwise.ops.rule import Rule, composite, register
from shardwise.ops.slots import wide_dtype
from shardwise.ops.statistics import Finish, decide_with_statistics
from shardwise.ops.terms import Reduced, terms_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.geometry import Box
    from shardwise.ops.rule import Call, Decision

__all__ = ["log_sum_of_own", "softmax_of_piece", "softmax_times"]


def softmax_of_piece(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece's own softmax, and its log-sum-exp; values only.

    Where all elements are -inf, the log-sum-exp is too, and 0 stands for the softmax: other pieces
    may have larger elements.
    """
    top = x.amax(dim, keepdim=True)
    own = torch.softmax(x, dim)
    # The largest is exp(0) / sum, which saves a pass over the exponents.
    total = top - own.amax(dim, keepdim=True).log()
    is_low = top == -math.inf
    if not is_low.is_cpu or is_low.any():
        own.masked_fill_(is_low, 0.0)
        total.masked_fill_(is_low, -math.inf)
    return own, total


def softmax_times(ctx: Any, x: torch.Tensor, own: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The softmax of a piece times `grad`, in a backward that has kept it as `own`.

    The first time it is written where it was kept, so that a gradient takes no memory of its own;
    after that, and for gradients of gradients, which follow from x, it is computed again.
    """
    if not torch.is_grad_enabled() and not getattr(ctx, "is_spent", False):
        ctx.is_spent = True
        return own.data.mul_(grad)  # not counted as a write: nobody reads it any more
    is_low = x.detach().amax(ctx.dim, keepdim=True) == -math.inf
    again = torch.softmax(x.masked_fill(is_low, 0.0), ctx.dim).masked_fill(is_low, 0.0)
    return again * grad


def log_sum_of_own(slots: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of those of pieces of one rank, of which other ranks may have larger ones.

    The gradient of torch's is NaN where all are -inf, even if that is nothing to the whole.
    """
    is_low = (slots.detach() == -math.inf).all(0)
    return _NoneOf.apply(slots.masked_fill(is_low, 0.0).logsumexp(0), slots, is_low)  # type: ignore[no-any-return, no-untyped-call]  # torch's


class _NoneOf(torch.autograd.Function):
    """A merged value; -inf where all slots are, which get nothing of a gradient but a NaN."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, slots: torch.Tensor, is_low: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(is_low)
        ctx.shape = slots.shape
        return value.masked_fill(is_low, -math.inf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (is_low,) = ctx.saved_tensors
        none = torch.where(is_low, grad, 0) * 0
        return grad.masked_fill(is_low, 0.0), none.expand(ctx.shape), None


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp of a piece, which keeps its softmax for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        own, total = softmax_of_piece(x, dim)
        ctx.save_for_backward(x, own)
        ctx.dim = dim
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, own = ctx.saved_tensors
        return softmax_times(ctx, x, own, grad), None


def _decide(call: Call, *, is_log: bool) -> Decision | None:
    given = known_arguments(call, "input dim dtype")
    if given is None or len(call.operands) != 1 or type(given.get("dim")) is not int:
        return None
    x = given["input"]
    torch.empty((1,) * len(x.shape)).softmax(given["dim"])  # raises if there is no such dim
    outlines(call)  # and this what else torch raises
    if not math.prod(x.shape):
        return everywhere(call)
    layout = x.layout.bar
    dim = given["dim"] % max(len(x.shape), 1)
    if not x.shape or layout.is_whole(dim):
        size, dims = (x.shape[dim], (dim,)) if x.shape else (1, ())
        along = Reduced(x.shape, dims, keepdim=True, width=size)
        terms = terms_of(layout, along, call.rank)
        return decide_whole(call, terms, layout, phantom_of_one(call))
    terms = terms_of(layout, Reduced(x.shape, (dim,), keepdim=True), call.rank)
    return decide_with_statistics(
        call, terms, layout, _finish(dim, given.get("dtype"), is_log=is_log)
    )


def _finish(dim: int, dtype: torch.dtype | None, *, is_log: bool) -> Finish:
    def statistics_dtype(given: torch.dtype) -> torch.dtype:
        return wide_dtype(given if dtype is None else dtype)

    def start(piece: torch.Tensor, box: Box) -> torch.Tensor:
        total: torch.Tensor = _LogSumExp.apply(piece, dim)  # type: ignore[no-untyped-call]  # torch's
        return total.unsqueeze(0)

    def end(piece: torch.Tensor, statistics: torch.Tensor, box: Box) -> torch.Tensor:
        found = piece - statistics[0]
        return found if is_log else found.exp_()

    def unit(ones: torch.Tensor) -> torch.Tensor:
        # By autocast, too: of a call with a dtype it is that one.
        return torch.softmax(ones, 0, dtype)

    return Finish(
        start,
        lambda slots: slots.logsumexp(0),
        (-math.inf,),
        end,
        unit,
        statistics_dtype,
        merge_own=log_sum_of_own,
    )


for _name in ("softmax", "log_softmax"):
    _functions = [f for f in functions_named([_name]) if f is not getattr(F, _name)]

    def _decided(call: Call, is_log: bool = _name == "log_softmax") -> Decision | None:
        return _decide(call, is_log=is_log)

    register(Rule(_name, _decided), _functions)


def _usual_dim(name: str, ndim: int) -> int:
    """The dim that torch takes if none is given, and warns."""
    warnings.warn(
        f"Implicit dimension choice for {name} has been deprecated. Change the call to include "
        "dim=X as an argument.",
        stacklevel=user_level(),
    )
    return 0 if ndim in (0, 1, 3) else 1


def _with_usual_dim(name: str, function: Callable[..., torch.Tensor]) -> None:
    @composite(name, [getattr(F, name)])
    def run(
        input: torch.Tensor,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dim = _usual_dim(name, input.dim()) if dim is None else dim
        return function(input, dim) if dtype is None else function(input, dim, dtype)


_with_usual_dim("softmax", torch.softmax)
_with_usual_dim("log_softmax", torch.log_softmax)
_with_usual_dim("softmin", lambda x, *how: torch.softmax(-x, *how))
