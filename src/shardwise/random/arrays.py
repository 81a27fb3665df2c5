"""Arithmetic that is numpy's on the CPU and torch's elsewhere.

[Note: two libraries] A fill is many small operations on a chunk that fits in the cache. There
numpy's calls cost half of what torch's do, and its 64-bit product is twice as fast. Both have the
same operators, so the code is written once, for either. Every operation in use (integers that wrap
around, and + - * / sqrt of floats) is exact or rounded as IEEE 754 says, one at a time, so the bits
are the same in numpy and on CUDA, and in any chunk. That is why there is no `log` or `cos`
here, in which libraries differ; nothing that may fuse two operations into one; no division by a
scalar, which CUDA turns into a product; and no torch on the CPU, where even the last bit of a
square root may be wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = [
    "Array",
    "as_dtype",
    "as_tensor",
    "indices_where",
    "library",
    "repeated",
    "up_to",
    "viewed_as",
    "zeros_like",
]

Array = Any  # np.ndarray or torch.Tensor. [Note: two libraries]

_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def library(array: Array) -> Any:
    """The module that has `sqrt`, `take`, `clip` and the like for `array`."""
    return np if isinstance(array, np.ndarray) else torch


def as_tensor(array: Array) -> torch.Tensor:
    """`array` as a tensor on its device; shares its memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def as_dtype(array: Array, dtype: torch.dtype) -> Array:
    """New array of `dtype`, each number rounded to the nearest."""
    if isinstance(array, np.ndarray):
        return array.astype(_NUMPY_DTYPES[dtype])
    return array.to(dtype)


def viewed_as(array: Array, dtype: torch.dtype) -> Array:
    """The same memory, read as `dtype`; the low half of an int64 comes first."""
    return array.view(_NUMPY_DTYPES[dtype] if isinstance(array, np.ndarray) else dtype)


def up_to(count: int, *, like: Array) -> Array:
    """int64 numbers 0, 1, ... below `count`, where `like` is."""
    if isinstance(like, np.ndarray):
        return np.arange(count, dtype=np.int64)
    return torch.arange(count, device=like.device)


def zeros_like(array: Array, *, columns: int | None = None) -> Array:
    """Zeros of the dtype of the 1-d `array`, as long, in `columns` if given."""
    shape = (len(array),) if columns is None else (len(array), columns)
    if isinstance(array, np.ndarray):
        return np.zeros(shape, array.dtype)
    return array.new_zeros(shape)


def indices_where(mask: Array) -> Array:
    """Where the 1-d `mask` is true."""
    return mask.nonzero()[0] if isinstance(mask, np.ndarray) else mask.nonzero().squeeze(1)


def repeated(array: Array, counts: Array) -> Array:
    """Each number of `array` as often as `counts` says."""
    if isinstance(array, np.ndarray):
        return np.repeat(array, counts)
    return array.repeat_interleave(counts)
