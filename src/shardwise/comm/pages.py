"""Large pages for large new tensors: the first write to new memory is what much of a move costs.

The kernel hands memory out by pages of 4 KiB at the first touch of each, 32,768 times for 128 MiB.
Where it has pages of 2 MiB for those who ask (`transparent_hugepage` is "madvise" or "always"), 64
touches do. numpy asks for its arrays in the same way and from the same size on.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["new_like", "new_tensor", "packed"]

_LARGE = 4 << 20  # bytes; below, malloc reuses memory that was touched before
_PAGE = 2 << 20


def new_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """As `torch.empty`, which does not ask for large pages."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.nbytes >= _LARGE:
        _ask(made)
    return made


def new_like(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """As `tensor.new_empty`, which is quicker than to say dtype and device."""
    made = tensor.new_empty(shape)
    if made.nbytes >= _LARGE:
        _ask(made)
    return made


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor.contiguous()`: itself, or a copy."""
    if tensor.nbytes < _LARGE or tensor.is_contiguous():
        return tensor.contiguous()
    return new_like(tensor, tensor.shape).copy_(tensor)


def _ask(tensor: torch.Tensor) -> None:
    """For the pages that lie in the tensor as a whole. What the kernel answers does not matter."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    madvise = _madvise()
    if tensor.is_cpu and madvise is not None and first < last:
        madvise(first, last - first, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's call; None where it has no large pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
