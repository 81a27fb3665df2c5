"""Fourier transforms and linear algebra: a few dims are whole, all others taken one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pattern import Pattern, along
from shardwise.ops.phantoms import tie_of
from shardwise.ops.rule import Call, Operand, Rule, register

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.ops.rule import Decision

__all__: list[str] = []

# -- Fourier transforms ----------------------------------------------------------------------------


def _decide_fourier(num_dims: int | None) -> Callable[[Call], Decision | None]:
    """Along the last `num_dims` dims, if nothing else is said; None: along all."""

    def decide(call: Call) -> Decision | None:
        given = arguments_of(call, "input s dim")
        x, size, dims = (given.get(name) for name in ("input", "s", "dim"))
        if not isinstance(x, Operand) or len(call.operands) != 1:
            return None  # `out`
        ndim = len(x.shape)
        count = (ndim if size is None else len(size)) if num_dims is None else num_dims
        if dims is None:
            dims = range(-count, 0)
        text = along(ndim, [dims] if isinstance(dims, int) else dims)
        return None if text is None else Pattern(text, (x,)).decide(call)

    return decide


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _end, _count in (("", 1), ("2", 2), ("n", None)):
        _rule = Rule(f"fft.{_name}{_end}", _decide_fourier(_count))
        register(_rule, [getattr(torch.fft, _name + _end)])


# -- linear algebra --------------------------------------------------------------------------------

_MATRIX, _SQUARE = "...MN->...PQ", "...MN->..."
# The names of the tensors of a function, and what it does to their dims.
_LINEAR_ALGEBRA = {
    "inv inverse": ("A", _MATRIX),
    "inv_ex cholesky_ex": ("A", "...MN->...PQ,..."),
    "pinv pinverse": ("A", _MATRIX),
    "cholesky": ("A", _MATRIX),
    "cholesky_inverse": ("L", _MATRIX),
    "matrix_exp": ("A", _MATRIX),
    "matrix_power": ("A", _MATRIX),
    "det": ("A", _SQUARE),
    "logdet": ("A", _SQUARE),
    "slogdet": ("A", _SQUARE),
    "cond": ("A", _SQUARE),
    "matrix_rank": ("A", _SQUARE),
    "qr": ("A", "...MN->...PQ,...RS"),
    "svd": ("A", "...MN->...PQ,...K,...RS"),
    "svdvals eigvals eigvalsh": ("A", "...MN->...K"),
    "eigh eig": ("A", "...MN->...K,...PQ"),
    "lu_factor": ("A", "...MN->...PQ,...K"),
    "lu": ("A", "...MN->...AB,...CD,...EF"),
    "solve": ("A B", "...MN,...Pk->...Qk"),
    "solve_triangular": ("A B", "...MN,...Pk->...Qk"),
    "cholesky_solve": ("B L", "...Pk,...MN->...Qk"),
    "cdist": ("x1 x2", "...pM,...rM->...pr"),
}


def _decide_matrices(names: str, text: str) -> Callable[[Call], Decision | None]:
    def decide(call: Call) -> Decision | None:
        given = arguments_of(call, names)
        tensors: list[Any] = [given.get(name) for name in names.split()]
        if not all(isinstance(one, Operand) for one in tensors):
            return None
        if len(tensors) != len(call.operands) or call.kwargs.get("left") is False:
            return None  # `out`, tolerances that are tensors, equations from the right
        results = outlines(call)
        decision = Pattern(_fitting(text, call, tensors), tuple(tensors)).decide(call)
        if decision is None:
            return None
        dtypes = [result.dtype for result in results]
        # Torch would refuse matrices of zeros, which have no inverse.
        return replace(decision, phantom=lambda *ties: [tie_of(ties, one) for one in dtypes])

    return decide


def _fitting(text: str, call: Call, tensors: list[Any]) -> str:
    """The text for one right side in place of many: a vector, in `solve` only."""
    if getattr(call.function, "__name__", "") != "linalg_solve":
        return text
    left, right = (one.shape for one in tensors)
    is_vector = len(right) == 1 or right == left[:-1]
    return "...MN,...P->...Q" if is_vector else text


_OTHERS_OF_THE_NAME = (torch.lu, torch.Tensor.lu)  # which give pivots

for _names, (_tensors, _text) in _LINEAR_ALGEBRA.items():
    for _name in _names.split():
        _functions = [f for f in functions_named([_name]) if f not in _OTHERS_OF_THE_NAME]
        register(Rule(_name, _decide_matrices(_tensors, _text)), _functions)
