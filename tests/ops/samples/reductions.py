"""Samples of functions that reduce dims, or work along one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

_SHAPE = (5, 4, 3)
_ROWS, _COLUMNS = ("chunk(0)",), ("chunk(1)",)
# Bytes that 4 ranks send of a number: to add it up, or for each to have what all others know of it.
_ADDED, _TOLD = 6 * 8, 12 * 8


def _has_grad(call: Callable[[torch.Tensor], Any]) -> bool:
    """Whether this torch has gradients of it."""
    try:
        call(torch.ones(2, requires_grad=True)).backward()
    except RuntimeError:
        return False
    return True


_AMINMAX_HAS_GRAD = _has_grad(lambda x: torch.aminmax(x)[0])

SAMPLES: dict[str, list[Sample]] = {
    "sum": [
        Sample(torch.sum, ((8, 6),), keeps=_ROWS, most_bytes=_ADDED),
        Sample(lambda x: x.sum(0), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: x.sum(axis=1, keepdims=True), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: x.sum((0, -1)), (_SHAPE,), keeps=_COLUMNS),
        Sample(lambda x: torch.sum(x, dim=(), keepdim=True), (_SHAPE,)),
        Sample(lambda x: torch.sum(input=x, dim=1), (_SHAPE,), "bits", False),
        Sample(lambda x: x.sum(0, dtype=torch.float32), (_SHAPE,), "truth", False),
        Sample(lambda x: x.sum(-1), ((6, 4),), "complex"),
        Sample(torch.sum, ((),)),
    ],
    "mean": [
        Sample(torch.mean, ((8, 6),), keeps=_ROWS, most_bytes=_ADDED),
        Sample(lambda x: x.mean(0), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: x.mean((0, 2), keepdim=True), (_SHAPE,)),
        Sample(lambda x: x.mean(None, dtype=torch.float64), (_SHAPE,), "bits", False),
    ],
    "nansum": [
        Sample(lambda x: torch.where(x > 0, x, torch.nan).nansum(0), (_SHAPE,)),
        Sample(torch.nansum, ((8, 6),), keeps=_ROWS, most_bytes=_ADDED),
    ],
    "nanmean": [
        Sample(lambda x: torch.where(x > 0, x, torch.nan).nanmean((0, 1)), (_SHAPE,)),
        Sample(torch.nanmean, ((8, 6),), keeps=_ROWS, most_bytes=2 * _TOLD),
    ],
    "count_nonzero": [
        Sample(torch.count_nonzero, ((8, 6),), "ties", False, keeps=_ROWS, most_bytes=_ADDED),
        Sample(lambda x: x.count_nonzero((0, 2)), (_SHAPE,), "bits", False),
    ],
    "all": [
        Sample(torch.all, ((8, 6),), "bits", False, keeps=_ROWS, most_bytes=6),
        Sample(lambda x: x.all(1), (_SHAPE,), "truth", False),
        Sample(lambda x: (x > -1).all((0, 2), keepdim=True), (_SHAPE,), has_grad=False),
        Sample(lambda x: x.all(()), ((3, 4),), "bits", False),
    ],
    "any": [
        Sample(torch.any, ((8, 6),), "bits", False, keeps=_ROWS, most_bytes=6),
        Sample(lambda x: x.any(0), (_SHAPE,), "truth", False),
        Sample(lambda x: x.any(1), ((3, 4),), "bits", False),
    ],
    "amax": [
        Sample(torch.amax, ((8, 6),), "ties", keeps=_ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.amax(0), ((8, 6),), "ties", False, _ROWS, most_bytes=6 * _ADDED),
        Sample(lambda x: x.amax((0, 2)), (_SHAPE,), "ties"),
        Sample(lambda x: x.amax(1, keepdim=True), (_SHAPE,), keeps=_ROWS),
        Sample(lambda x: x.amax((0, 1)), (_SHAPE,), "bits", False),
    ],
    "amin": [
        Sample(torch.amin, ((8, 6),), "ties", keeps=_ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.amin(0), ((8, 6),), "ties", False, _ROWS, most_bytes=6 * _ADDED),
        Sample(lambda x: x.amin((0, 1)), (_SHAPE,), "ties"),
        Sample(lambda x: x.amin(-1), (_SHAPE,), "distinct", keeps=_ROWS),
    ],
    "aminmax": [
        Sample(torch.aminmax, ((8, 6),), "ties", _AMINMAX_HAS_GRAD),
        Sample(torch.aminmax, ((8, 6),), "ties", False, keeps=_ROWS, most_bytes=2 * _ADDED),
        Sample(lambda x: x.aminmax(dim=1), ((8, 6),), "ties", _AMINMAX_HAS_GRAD, keeps=_ROWS),
        Sample(lambda x: x.aminmax(dim=0, keepdim=True), (_SHAPE,), "ties", _AMINMAX_HAS_GRAD),
    ],
    "max": [
        Sample(torch.max, ((8, 6),), "ties", keeps=_ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.max(0), ((8, 6),), "ties", keeps=_ROWS, most_bytes=6 * 2 * _TOLD),
        Sample(lambda x: x.max(0), (_SHAPE,), "ties"),
        Sample(lambda x: torch.max(x, dim=1, keepdim=True), (_SHAPE,), keeps=_ROWS),
        Sample(torch.max, ((4, 6), (4, 6)), keeps=_ROWS * 2),
        Sample(lambda x: x.max(), ((5,),), "bits", False),
        Sample(lambda x: x.max(0), ((),)),
    ],
    "min": [
        Sample(torch.min, ((8, 6),), "ties", keeps=_ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.min(0), ((8, 6),), "ties", keeps=_ROWS, most_bytes=6 * 2 * _TOLD),
        Sample(lambda x: x.min(-1), (_SHAPE,), "ties", keeps=_ROWS),
        Sample(lambda x, y: x.min(y), ((4, 6), (6,)), keeps=("chunk(0)", "replicate()")),
        Sample(lambda x: x.min(0), ((5, 2),), "truth", False),
        Sample(lambda x: x.min(0), ((),), "truth", False),
    ],
    "argmax": [
        Sample(torch.argmax, ((8, 6),), "ties", False, _ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.argmax(0), (_SHAPE,), "ties", False),
        Sample(lambda x: x.argmax(-1, keepdim=True), (_SHAPE,), "ties", False, _ROWS),
        Sample(lambda x: x.argmax(keepdim=True), ((4, 3),), "bits", False),
    ],
    "argmin": [
        Sample(torch.argmin, ((8, 6),), "ties", False, _ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.argmin(0), (_SHAPE,), "ties", False),
        Sample(lambda x: x.argmin(1), (_SHAPE,), "ties", False, _ROWS),
    ],
    "topk": [
        Sample(lambda x: x.topk(3), ((4, 6),), "distinct", keeps=_ROWS),
        # Of 4 rows, 3 values and 3 indices from each of 3 ranks to the 2 others.
        Sample(
            lambda x: x.topk(3), ((4, 6),), "distinct", keeps=_COLUMNS, most_bytes=4 * 6 * 3 * 2 * 8
        ),
        Sample(lambda x: x.topk(4, 0, largest=False), (_SHAPE,), "distinct"),
        Sample(lambda x: x.topk(5, 0), ((5,),), "distinct"),
        Sample(lambda x: x.topk(0), ((),)),
    ],
    "prod": [
        Sample(torch.prod, ((8, 6),), keeps=_ROWS, most_bytes=_TOLD),
        Sample(lambda x: x.prod(0), ((8, 6),), "ties"),
        Sample(lambda x: x.prod(1, keepdim=True), (_SHAPE,), "ties"),
        Sample(lambda x: x.prod(dtype=torch.float64), ((3, 2),), "bits", False),
        Sample(lambda x: x.prod(0), ((3, 2),), "bits", False),
    ],
    "logsumexp": [
        Sample(lambda x: x.logsumexp((0, 1)), ((8, 6),), keeps=_ROWS, most_bytes=2 * _TOLD),
        Sample(lambda x: x.logsumexp(0), (_SHAPE,)),
        Sample(lambda x: torch.logsumexp(x.log(), (0, 2)), (_SHAPE,), "bits", False),
        Sample(lambda x: (1000 * x).logsumexp(-1, keepdim=True), (_SHAPE,), keeps=_ROWS),
    ],
    "var": [
        Sample(torch.var, ((8, 6),), keeps=_ROWS, most_bytes=3 * _TOLD),
        Sample(lambda x: x.var(0, unbiased=False), (_SHAPE,)),
        Sample(lambda x: x.var((0, 2), correction=2, keepdim=True), (_SHAPE,)),
        Sample(lambda x: torch.var(x, False), (_SHAPE,)),
        Sample(lambda x: x.var(0), ((5, 2),), "complex"),
    ],
    "std": [
        Sample(torch.std, ((8, 6),), keeps=_ROWS, most_bytes=3 * _TOLD),
        Sample(lambda x: x.std(1), ((4, 6),), keeps=_ROWS),
        Sample(lambda x: (0 * x).std(0), ((4, 6),)),
    ],
    "var_mean": [
        Sample(torch.var_mean, ((8, 6),), keeps=_ROWS, most_bytes=3 * _TOLD),
        Sample(lambda x: torch.var_mean(x, 1), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: torch.var_mean(x, 0), (_SHAPE,)),
        Sample(torch.var_mean, ((5, 2),), "complex"),
    ],
    "std_mean": [
        Sample(lambda x: torch.std_mean(x, (0, 1), keepdim=True), (_SHAPE,)),
        Sample(torch.std_mean, ((8, 6),), keeps=_ROWS, most_bytes=3 * _TOLD),
    ],
    "vector_norm": [
        Sample(torch.linalg.vector_norm, ((8, 6),), keeps=_ROWS, most_bytes=_TOLD),
        *(
            Sample(lambda x, p=p: torch.linalg.vector_norm(x, p, 0), ((5, 6),), values)
            for p in (0, 0.5, 1, 1.5, 2, 3, -1, math.inf, -math.inf)
            for values in ("real", "ties")
        ),
        Sample(lambda x: torch.linalg.vector_norm(x, math.inf), ((5, 2),), "complex"),
        Sample(lambda x: torch.linalg.vector_norm(0 * x, dim=(0, 1)), (_SHAPE,)),
    ],
    "norm": [
        Sample(torch.norm, ((8, 6),), keeps=_ROWS, most_bytes=_TOLD),
        Sample(lambda x: x.norm(1, 0), ((8, 6),)),
        Sample(lambda x: x.norm(math.inf, (0, 1), keepdim=True), (_SHAPE,), "ties"),
        Sample(lambda x: x.norm(p=0, dim=1), (_SHAPE,), "ties"),
        Sample(lambda x: x.norm("fro", dim=(0, 1), dtype=torch.float64), ((4, 3),)),
        Sample(lambda x: x.norm("nuc"), ((4, 3),)),
    ],
    "linalg_norm": [
        Sample(torch.linalg.norm, ((8, 6),), keeps=_ROWS, most_bytes=_TOLD),
        Sample(lambda x: torch.linalg.norm(x, 3, dim=1), ((8, 6),)),
        Sample(lambda x: torch.linalg.norm(x, math.inf), ((6,),)),
        Sample(lambda x: torch.linalg.norm(x, 1), ((4, 3),)),
    ],
    "dist": [Sample(torch.dist, ((8, 6), (8, 6)), keeps=_ROWS * 2, most_bytes=_TOLD)],
    "cumsum": [
        Sample(lambda x: x.cumsum(0), ((8, 6),), keeps=_ROWS, most_bytes=6 * _TOLD),
        Sample(lambda x: x.cumsum(1), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: torch.cumsum(x, -1), (_SHAPE,), "bits", False),
        Sample(lambda x: torch.cumsum(x, 0, dtype=torch.float64), ((5,),), "truth", False),
        Sample(lambda x: x.cumsum(0), ((),)),
    ],
    "cumsum_": [
        Sample(lambda x: (x * 1).cumsum_(0), ((8, 6),), keeps=_ROWS, most_bytes=6 * _TOLD),
    ],
    "cumprod_": [
        Sample(lambda x: (x * 1).cumprod_(0), ((8, 6),), keeps=_ROWS, most_bytes=6 * _TOLD),
        Sample(lambda x: (x * 1).cumprod_(1), ((5, 3),), keeps=_ROWS),
    ],
    "cumprod": [
        Sample(lambda x: x.cumprod(0), ((8, 6),), keeps=_ROWS, most_bytes=6 * _TOLD),
        Sample(lambda x: x.cumprod(0), (_SHAPE,), "ties"),
        Sample(lambda x: x.cumprod(1), (_SHAPE,), "bits", False),
    ],
    "cummax": [Sample(lambda x: x.cummax(1), ((4, 6),), "ties", keeps=_ROWS)],
    "cummin": [Sample(lambda x: x.cummin(1), ((4, 6),), "ties", keeps=_ROWS)],
    "logcumsumexp": [Sample(lambda x: x.logcumsumexp(1), ((4, 6),), keeps=_ROWS)],
    "median": [
        Sample(lambda x: x.median(1), ((4, 5),), "distinct", keeps=_ROWS),
        Sample(torch.median, ((3, 5),), "distinct"),
    ],
    "nanmedian": [Sample(lambda x: x.nanmedian(0, True), ((5, 4),), "distinct", keeps=_COLUMNS)],
    "mode": [Sample(lambda x: x.mode(1), ((4, 6),), "ties", keeps=_ROWS)],
    "kthvalue": [Sample(lambda x: x.kthvalue(2), ((4, 6),), "distinct", keeps=_ROWS)],
    "sort": [
        Sample(torch.sort, ((4, 6),), "distinct", keeps=_ROWS),
        Sample(lambda x: x.sort(0, descending=True), ((4, 6),), "distinct", keeps=_COLUMNS),
    ],
    "argsort": [Sample(lambda x: x.argsort(stable=True), ((4, 6),), "ties", False, _ROWS)],
}
