"""Linear algebra: matrices are whole, batches of them taken one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardwise.ops.call_arguments import operands_named
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import listed_results, outlines
from shardwise.ops.pattern import Pattern
from shardwise.ops.phantoms import as_tie, unit_of
from shardwise.ops.rule import Call, Rule, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.phantoms import Phantom
    from shardwise.ops.rule import Decision, Operand

__all__: list[str] = []

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
        tensors = operands_named(call, names)
        if tensors is None or call.kwargs.get("left") is False:
            return None  # tolerances that are tensors, equations from the right
        outlines(call)
        decision = Pattern(_fitting(text, call, tensors), tuple(tensors)).decide(call)
        return None if decision is None else replace(decision, phantom=_phantom_of(call))

    return decide


def _phantom_of(call: Call) -> Phantom:
    """The function on small matrices with an inverse: torch would refuse those of zeros."""

    def phantom(*ties: torch.Tensor) -> list[torch.Tensor]:
        given = [
            _small(tie, operand.shape) for tie, operand in zip(ties, call.operands, strict=True)
        ]
        return [as_tie(result) for result in listed_results(call.invoke(*given))]

    return phantom


def _small(tie: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix, or a vector, whose eigenvalues differ, and which follows from the tie."""
    rows, columns = (1, *(min(size, 2) for size in shape))[-2:]
    diagonal = torch.eye(rows, columns, dtype=tie.dtype, device=tie.device)
    numbers = torch.arange(1, columns + 1, dtype=tie.dtype, device=tie.device)
    some = diagonal * numbers * unit_of([tie], ())
    return some.view((1,) * (len(shape) - 2) + (rows, columns)) if len(shape) > 1 else some[0]


def _fitting(text: str, call: Call, tensors: Sequence[Operand]) -> str:
    """The text for one right side in place of many: a vector, in `solve` only."""
    if call.name != "linalg_solve":
        return text
    left, right = (one.shape for one in tensors)
    is_vector = len(right) == 1 or right == left[:-1]
    return "...MN,...P->...Q" if is_vector else text


_OTHERS_OF_THE_NAME = (torch.lu, torch.Tensor.lu)  # which give pivots

for _names, (_tensors, _text) in _LINEAR_ALGEBRA.items():
    for _name in _names.split():
        _functions = [f for f in functions_named([_name]) if f not in _OTHERS_OF_THE_NAME]
        register(Rule(_name, _decide_matrices(_tensors, _text)), _functions)
