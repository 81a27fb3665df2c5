"""How the parts of reductions are put together: what each rank knows of its part is a partial.

Which formula is used matters to gradients: each is exact by composition, so that what autograd
makes of it is the gradient of the whole, where elements tie and where norms are zero too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from shardwise.ops.slots import Fold, wide_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.slots import Tensors
    from shardwise.ops.terms import Reduced

__all__ = [
    "NanGradient",
    "ResultDtype",
    "extreme",
    "index_of_extreme",
    "log_sum_exp",
    "lowest",
    "moments",
    "nan_mean",
    "product",
    "top",
    "vector_norm",
]

_LAST = torch.iinfo(torch.int64).max  # an index that no element has
# What elements get where the result is NaN: NaN all, the NaNs an equal share, or nothing.
NanGradient = Literal["nan", "share", "zero"]
# The dtype of the result, on a device: autocast changes that of some functions.
ResultDtype: TypeAlias = "Callable[[torch.device], torch.dtype]"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype in which partials lose nothing that matters."""
    return tensor.to(wide_dtype(tensor.dtype))


class _Attributed(torch.autograd.Function):
    """A value as it is, whose gradient goes to the parts that it was chosen from, by weights."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weights)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        (weights,) = ctx.saved_tensors
        return None, None, grad * weights


def lowest(dtype: torch.dtype, *, largest: bool = True) -> Any:
    """The value that is never the largest (or smallest) of several."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def product(reduced: Reduced, dtype: torch.dtype | None) -> Fold:
    """Products; exact where elements are zero, since torch's are, and where they are infinite."""

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        found = (
            piece.prod(reduced.dims[0], keepdim=True, dtype=dtype)
            if len(reduced.dims) == 1
            else piece.prod(dtype=dtype).reshape((1,) * piece.ndim)
        )
        return (found.unsqueeze(0),)

    return Fold(
        lift,
        lambda partials: (_multiplied(partials[0]),),
        lambda partial: (partial[0][0],),
        lambda _: ((1,),),
    )


def _multiplied(slots: torch.Tensor) -> torch.Tensor:
    """The product over the slots, two by two.

    The gradient of `prod` divides by a slot, which has no answer if that is infinite.
    """
    left = _wide(slots)
    while len(left) > 1:
        half = len(left) // 2
        pairs = left[:half] * left[half : 2 * half]
        left = torch.cat([pairs, left[2 * half :]]) if len(left) % 2 else pairs
    return left[0].to(slots.dtype)


def vector_norm(reduced: Reduced, p: float, dtype: torch.dtype | None) -> Fold:
    """The norm of norms, for finite `p`; its gradient at 0 is that of torch.

    For the 0-norm torch hands back no gradient at all, not one of zeros. That would end backward on
    ranks that have pieces, and leave the others waiting for them.
    """

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        norm = torch.linalg.vector_norm(piece, p, reduced.dims, keepdim=True, dtype=dtype)
        if p == 0:
            norm = _Attributed.apply(norm.detach(), torch.zeros_like(piece), piece)  # type: ignore[no-untyped-call]  # torch's
        return (norm.unsqueeze(0),)

    def merge(partials: Tensors) -> Tensors:
        if p == 0:  # a norm of 0 counts
            return (partials[0].sum(0),)
        return (_norm_of_norms(partials[0], p),)

    return Fold(
        lift,
        merge,
        lambda partial: (partial[0][0],),
        lambda _: ((0.0 if p >= 0 else math.inf,),),
        is_own=p == 0,
    )


def _norm_of_norms(norms: torch.Tensor, p: float) -> torch.Tensor:
    """The norm over the slots.

    An infinite norm of infinite ones hands its gradient on to these as it is, instead of infinity
    by infinity: torch's of the parts then is what it is of the whole.
    """
    if p == 1:
        return norms.sum(0)
    value = torch.linalg.vector_norm(norms.detach(), p, 0)
    is_infinite = value.isinf()
    finite = torch.linalg.vector_norm(torch.where(is_infinite, 1, norms), p, 0)
    beside = 0.0 if p > 1 else math.inf  # what finite norms have
    shares = torch.where(norms.detach().isinf(), 1.0, beside).to(norms.dtype)
    weights = torch.where(is_infinite, shares, 0)
    infinite = _Attributed.apply(value, weights, norms)  # type: ignore[no-untyped-call]  # torch's
    return torch.where(is_infinite, infinite, finite)


def log_sum_exp(reduced: Reduced, dtype: torch.dtype, result_dtype: ResultDtype) -> Fold:
    """The largest element, and the sum of exp(x - largest).

    The largest has no gradient, since it cancels out. Where it is infinite, 0 stands for it in the
    differences.
    """

    def finite(top: torch.Tensor) -> torch.Tensor:
        return torch.where(top.isinf(), 0, top)

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        wide = _wide(piece.to(dtype))
        top = wide.detach().amax(reduced.dims, keepdim=True)
        total = (wide - finite(top)).exp().sum(reduced.dims, keepdim=True)
        return (torch.stack([top, total]),)

    def merge(partials: Tensors) -> Tensors:
        tops, totals = partials[0].unbind(1)
        tops = tops.detach()
        top = tops.amax(0)
        # Differences of infinities say nothing.
        is_infinite = tops.isinf() | top.isinf()
        exact = (finite(tops) - finite(top)).exp()
        factor = torch.where(is_infinite, (tops == top).to(tops.dtype), exact)
        return (torch.stack([top, (totals * factor).sum(0)]),)

    def final(partial: Tensors) -> Tensors:
        top, total = partial[0].unbind(0)
        return ((total.log() + finite(top.detach())).to(result_dtype(top.device)),)

    return Fold(lift, merge, final, lambda _: ((-math.inf, 0.0),))


class _Deviations(torch.autograd.Function):
    """Sum of squared deviations, and mean: `torch.var_mean` is ten times as slow on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.dims = dims
        ctx.count = math.prod(x.shape[dim] for dim in dims)
        if x.is_cuda:
            var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
            return var * ctx.count, mean
        mean = x.mean(dims, keepdim=True)
        return (x - mean).square_().sum(dims, keepdim=True), mean

    @staticmethod
    def backward(
        ctx: Any, of_square: torch.Tensor, of_mean: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        deviation = x - x.mean(ctx.dims, keepdim=True)
        return torch.addcmul(of_mean / ctx.count, deviation, 2 * of_square), None


def moments(
    reduced: Reduced,
    dtypes: Sequence[torch.dtype],
    correction: float,
    *,
    is_std: bool,
    is_complex: bool,
) -> Fold:
    """Count, sum of squared deviations, and mean: two numbers if they are complex.

    `dtypes` are those of the results: variance, and mean if it is asked for.
    """

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        wide = _wide(piece)
        count = math.prod(piece.shape[dim] for dim in reduced.dims)
        if is_complex:
            var, mean = torch.var_mean(wide, reduced.dims, correction=0, keepdim=True)
            square, parts = var * count, [mean.real, mean.imag]
        else:
            square, *parts = _Deviations.apply(wide, reduced.dims)  # type: ignore[no-untyped-call]  # torch's
        return (torch.stack([torch.full_like(square, count), square, *parts]),)

    def merge(partials: Tensors) -> Tensors:
        counts, squares, *means = partials[0].unbind(1)
        count = counts.sum(0)
        merged = [(counts * part).sum(0) / count for part in means]
        between = [(part - one).square() for part, one in zip(means, merged, strict=True)]
        square = (squares + counts * torch.stack(between).sum(0)).sum(0)
        return (torch.stack([count, square, *merged]),)

    def final(partial: Tensors) -> Tensors:
        _, square, *means = partial[0].unbind(0)
        # Not a division of numbers, which would raise.
        found = square / square.new_tensor(max(reduced.count - correction, 0))
        if is_std:
            # The root has no gradient at 0; torch gives it 0.
            is_zero = found == 0
            found = torch.where(is_zero, 0, torch.where(is_zero, 1, found).sqrt())
        mean = torch.complex(*means) if is_complex else means[0]
        return tuple(one.to(dtype) for one, dtype in zip((found, mean), dtypes, strict=False))

    return Fold(lift, merge, final, lambda _: ((0.0,) * (4 if is_complex else 3),))


def nan_mean(reduced: Reduced, dtype: torch.dtype) -> Fold:
    """Sum and number of what is not NaN."""

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        wide = _wide(piece.to(dtype))
        total = wide.nansum(reduced.dims, keepdim=True)
        count = (~wide.isnan()).sum(reduced.dims, keepdim=True)
        return (torch.stack([total, count.to(total.dtype)]),)

    def final(partial: Tensors) -> Tensors:
        total, count = partial[0].unbind(0)
        return ((total / count).to(dtype),)

    return Fold(lift, lambda partials: (partials[0].sum(0),), final, lambda _: ((0.0, 0.0),))


def extreme(
    reduced: Reduced,
    result_dtype: ResultDtype,
    *,
    largest: bool,
    nan_gradient: NanGradient,
    of_abs: bool = False,
    norm_dtype: torch.dtype | None = None,
) -> Fold:
    """The largest (or smallest) element and how often it occurs, for its gradient.

    torch gives all elements that tie an equal share, so a part gets one per element of its own.
    """
    best = torch.amax if largest else torch.amin

    def pick(piece: torch.Tensor) -> torch.Tensor:
        if of_abs:
            p = math.inf if largest else -math.inf
            norm: torch.Tensor = torch.linalg.vector_norm(
                piece, p, reduced.dims, keepdim=True, dtype=norm_dtype
            )
            return norm
        if nan_gradient == "share":  # of a whole tensor
            found = piece.max() if largest else piece.min()
            return found.reshape((1,) * piece.ndim)
        return best(piece, reduced.dims, keepdim=True)

    def hits(values: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = values == value
        if nan_gradient == "share":
            same = same | (values.isnan() & value.isnan())
        return same

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        value = pick(piece)
        values = piece.detach().abs() if of_abs else piece.detach()
        count = hits(values.to(value.dtype), value.detach()).sum(reduced.dims, keepdim=True)
        wide = _wide(value)
        return (torch.stack([wide, count.to(wide.dtype)]),)

    def merge(partials: Tensors) -> Tensors:
        values, counts = partials[0].unbind(1)
        known = values.detach()
        value = best(known, 0)
        weights = hits(known, value) * counts.detach()
        total = weights.sum(0)
        weights = weights / total
        if nan_gradient == "zero":
            weights = weights.nan_to_num(0.0)
        found = _Attributed.apply(value, weights, values)  # type: ignore[no-untyped-call]  # torch's
        return (torch.stack([found, total]),)

    identity = (lowest(torch.float32, largest=largest), 0.0)

    def final(partial: Tensors) -> Tensors:
        value = partial[0][0]
        return (value.to(result_dtype(value.device)),)

    return Fold(lift, merge, final, lambda _: (identity,))


def index_of_extreme(reduced: Reduced, *, largest: bool, dim: int | None, has_value: bool) -> Fold:
    """The first of the largest (or smallest) elements along `dim`, and its index.

    Of the whole tensor, with `dim` None, the index is that of the flat tensor.
    """

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        if dim is not None:
            value, index = (torch.max if largest else torch.min)(piece, dim, keepdim=True)
            return value.unsqueeze(0), (index + box.start[dim]).unsqueeze(0)
        # Of booleans torch has no argmax, but `max` with an index of a number.
        bits = piece.byte() if has_value and piece.dtype == torch.bool else piece
        place = (torch.argmax if largest else torch.argmin)(bits)
        value = piece.reshape(-1)[place].reshape((1,) * (piece.ndim + 1))
        flat = _flat_index(place, piece.shape, box.start, reduced.shape)
        return value, flat.reshape((1,) * (piece.ndim + 1))

    def merge(partials: Tensors) -> Tensors:
        values, indices = partials
        known = values.detach()
        value = (torch.amax if largest else torch.amin)(known, 0)
        is_best = (known == value) | (known.isnan() & value.isnan())
        candidates = torch.where(is_best, indices, _LAST)
        slot = candidates.argmin(0, keepdim=True)
        return values.gather(0, slot)[0], candidates.gather(0, slot)[0]

    def final(partial: Tensors) -> Tensors:
        value, index = partial
        return (value[0], index[0]) if has_value else (index[0],)

    return Fold(lift, merge, final, lambda dtype: ((lowest(dtype, largest=largest),), (_LAST,)))


def _flat_index(
    place: torch.Tensor, shape: Sequence[int], start: Sequence[int], whole: Sequence[int]
) -> torch.Tensor:
    """Position in a flat tensor of shape `whole` of a position in a flat piece that starts there.

    A tensor all the way, so that nothing waits for a GPU.
    """
    index, rest, step = torch.zeros_like(place), place, 1
    for size, low, full in reversed(list(zip(shape, start, whole, strict=True))):
        index = index + (rest % size + low) * step
        rest, step = rest // size, step * full
    return index


def top(k: int, *, dim: int, largest: bool) -> Fold:
    """The `k` largest (or smallest) elements along `dim`, and their indices."""

    def lift(piece: torch.Tensor, box: Box) -> Tensors:
        value, index = piece.topk(min(k, piece.shape[dim]), dim, largest=largest)
        missing = [*value.shape]
        missing[dim] = k - value.shape[dim]
        filler = value.detach().new_full(missing, lowest(value.dtype, largest=largest))
        last = index.new_full(missing, _LAST)
        return (
            torch.cat([value, filler], dim).unsqueeze(0),
            torch.cat([index + box.start[dim], last], dim).unsqueeze(0),
        )

    def merge(partials: Tensors) -> Tensors:
        # (slots, 1, ..., k, ...) -> (1, ..., slots * k, ...)
        values, indices = (one.movedim(0, dim + 1).flatten(dim + 1, dim + 2) for one in partials)
        # By index, then by value: fillers come last among equals.
        order = indices.argsort(dim=dim + 1, stable=True)
        values, indices = values.gather(dim + 1, order), indices.gather(dim + 1, order)
        found = values.sort(dim=dim + 1, descending=largest, stable=True)
        order = found.indices.narrow(dim + 1, 0, k)
        return found.values.narrow(dim + 1, 0, k), indices.gather(dim + 1, order)

    return Fold(
        lift,
        merge,
        lambda partial: (partial[0][0], partial[1][0]),
        lambda dtype: ((lowest(dtype, largest=largest),), (_LAST,)),
    )
