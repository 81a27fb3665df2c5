"""Samples of linear algebra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, COLUMNS, ALL = "chunk(0)", "chunk(2)", "replicate()"
SQUARES = (4, 3, 3)


def _positive(x: torch.Tensor) -> torch.Tensor:
    """Matrices that have all that matrices may have."""
    return torch.einsum("...ij,...kj->...ik", x, x) + torch.eye(x.shape[-1], dtype=x.dtype)


def _matrices(function: Callable[..., Any], *, has_grad: bool = True) -> list[Sample]:
    return [
        Sample(function, (SQUARES,), has_grad=has_grad, keeps=(BATCH,)),
        Sample(function, ((3, 3),), has_grad=has_grad),
    ]


def _of(name: str, *args: Any) -> Callable[..., Any]:
    function = getattr(torch.linalg, name, None) or getattr(torch, name)
    return lambda x: function(_positive(x), *args)


def _signless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Vectors, of which only the size is defined."""

    def call(x: torch.Tensor) -> Any:
        return tuple(one.abs() for one in function(_positive(x)))

    return call


def _solved(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.linalg.solve(_positive(a), b)


SAMPLES: dict[str, list[Sample]] = {
    **{
        name: _matrices(_of(name))
        for name in ("inv", "inverse", "cholesky", "det", "logdet", "slogdet", "matrix_exp", "cond")
    },
    "inv_ex": _matrices(_of("inv_ex")),
    "cholesky_ex": _matrices(_of("cholesky_ex")),
    "pinv": _matrices(_of("pinv")),
    "pinverse": _matrices(_of("pinverse")),
    "cholesky_inverse": _matrices(
        lambda x: torch.cholesky_inverse(torch.linalg.cholesky(_positive(x)))
    ),
    "matrix_power": _matrices(_of("matrix_power", 3)),
    "matrix_rank": _matrices(_of("matrix_rank"), has_grad=False),
    "qr": _matrices(_signless(torch.linalg.qr)),
    "svd": _matrices(_signless(torch.linalg.svd), has_grad=False),
    "svdvals": _matrices(_of("svdvals")),
    "eigvals": _matrices(lambda x: torch.linalg.eigvals(_positive(x)).abs()),
    "eigvalsh": _matrices(_of("eigvalsh")),
    "eigh": _matrices(_signless(torch.linalg.eigh)),
    "eig": _matrices(_signless(torch.linalg.eig)),
    "lu_factor": _matrices(_of("lu_factor")),
    "lu": _matrices(_of("lu")),
    "solve": [
        Sample(_solved, (SQUARES, (3, 4)), keeps=(ALL, "chunk(1)")),
        Sample(_solved, (SQUARES, (4, 3)), keeps=(BATCH, BATCH)),
    ],
    "solve_triangular": [
        Sample(
            lambda a, b: torch.linalg.solve_triangular(_positive(a), b, upper=True),
            (SQUARES, (4, 3, 4)),
            keeps=(ALL, COLUMNS),
        )
    ],
    "cholesky_solve": [
        Sample(
            lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(_positive(a))),
            ((4, 3, 2), SQUARES),
            keeps=(BATCH, BATCH),
        )
    ],
    "cdist": [
        Sample(torch.cdist, ((2, 4, 3), (2, 5, 3)), keeps=("chunk(1)", ALL)),
        Sample(torch.cdist, ((4, 3), (5, 3)), keeps=(ALL, BATCH)),
    ],
}
