"""Samples of products of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

# Rows of x over one axis of a 2 x 2 mesh, columns of w over the other.
X_GRID, W_GRID = "grid([2, 1], ranks=[[0, 1], [2, 3]])", "grid([1, 2], ranks=[[0, 2], [1, 3]])"
ROWS, COLUMNS, ALL = "chunk(0)", "chunk(1)", "replicate()"
ADDED = 6 * 8  # bytes that 4 ranks send to add up a number


def _einsum(equation: str) -> Callable[..., torch.Tensor]:
    return lambda *operands: torch.einsum(equation, *operands)


def _in_place(name: str) -> Callable[..., torch.Tensor]:
    """The method on a copy, since what has a gradient may not be written."""

    def call(addend: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        copied = addend.clone()
        changed: torch.Tensor = getattr(copied, name)(*factors, beta=0.5, alpha=2)
        assert changed is copied
        return copied

    return call


SAMPLES: dict[str, list[Sample]] = {
    "matmul": [
        Sample(torch.matmul, ((4, 6), (6, 5)), keeps=(ROWS, ALL)),
        Sample(torch.matmul, ((4, 6), (6, 5)), keeps=(ALL, COLUMNS)),
        Sample(torch.matmul, ((4, 6), (6, 5)), keeps=(COLUMNS, ROWS)),
        Sample(torch.matmul, ((4, 6), (6, 5)), keeps=(X_GRID, W_GRID)),
        Sample(lambda x, w: x @ w, ((3, 4, 6), (6, 5)), keeps=("chunk(1)", ALL)),
        Sample(torch.Tensor.matmul, ((2, 1, 4, 3), (3, 3, 2)), keeps=("chunk(2)", ALL)),
        Sample(torch.linalg.matmul, ((6,), (2, 6, 3))),
        Sample(lambda x, w: torch.matmul(input=x, other=w), ((2, 4, 6), (6,))),
        Sample(torch.matmul, ((7,), (7,)), keeps=(ROWS, ROWS), most_bytes=ADDED),
        Sample(torch.matmul, ((4, 0), (0, 5))),
        Sample(torch.matmul, ((0, 4), (4, 5)), keeps=(ALL, COLUMNS)),
        Sample(torch.matmul, ((2, 3), (3, 2)), values="complex"),
    ],
    "__rmatmul__": [Sample(torch.Tensor.__rmatmul__, ((6, 5), (4, 6)), keeps=(ALL, ROWS))],
    "mm": [
        Sample(torch.mm, ((4, 6), (6, 5)), keeps=(COLUMNS, ROWS)),
        Sample(lambda x, w: x.mm(mat2=w), ((5, 3), (3, 2)), keeps=(ROWS, ALL)),
        Sample(torch.mm, ((4, 6), (6, 5)), values="bits", has_grad=False, keeps=(ROWS, ALL)),
    ],
    "bmm": [
        Sample(torch.bmm, ((3, 4, 2), (3, 2, 5)), keeps=(ROWS, ROWS)),
        Sample(torch.bmm, ((3, 4, 2), (3, 2, 5)), keeps=("chunk(2)", COLUMNS)),
    ],
    "mv": [Sample(torch.mv, ((4, 6), (6,)), keeps=(ROWS, ALL))],
    "dot": [Sample(torch.dot, ((7,), (7,)), keeps=(ROWS, ROWS), most_bytes=ADDED)],
    "vdot": [
        Sample(torch.vdot, ((5,), (5,)), values="complex"),
        Sample(torch.vdot, ((7,), (7,)), keeps=(ROWS, ROWS), most_bytes=ADDED),
    ],
    "outer": [
        Sample(torch.outer, ((4,), (5,)), keeps=(ROWS, ALL)),
        Sample(torch.ger, ((4,), (5,)), keeps=(ALL, ROWS)),
    ],
    "inner": [
        Sample(torch.inner, ((3, 4), (2, 2, 4)), keeps=(ROWS, ALL)),
        Sample(torch.inner, ((3, 4), ())),
        Sample(torch.inner, ((), ())),
    ],
    "tensordot": [
        Sample(
            lambda x, w: torch.tensordot(x, w, dims=2),
            ((2, 3, 4), (3, 4, 5)),
            keeps=("chunk(2)", COLUMNS),
        ),
        Sample(
            lambda x, w: torch.tensordot(x, w, ([0, -1], [1, 0])),
            ((2, 3, 4), (4, 2)),
            keeps=(COLUMNS, ALL),
        ),
        Sample(lambda x, w: torch.tensordot(x, w, dims=1), ((2, 1), (3, 2))),
    ],
    "vecdot": [
        Sample(torch.linalg.vecdot, ((3, 4), (3, 4)), keeps=(ROWS, ROWS)),
        Sample(lambda x, y: torch.linalg.vecdot(x, y, dim=0), ((4, 1), (4, 3)), values="complex"),
    ],
    "linear": [
        Sample(F.linear, ((4, 6), (5, 6)), keeps=(ROWS, ALL)),
        Sample(F.linear, ((4, 6), (5, 6), (5,)), keeps=(ROWS, ALL, ALL)),
        Sample(F.linear, ((4, 6), (5, 6), (5,)), keeps=(ALL, ROWS, ROWS)),
        Sample(F.linear, ((4, 6), (5, 6), (5,)), keeps=(COLUMNS, COLUMNS, ALL)),
        Sample(lambda x, w, b: F.linear(x, bias=b, weight=w), ((2, 3, 6), (5, 6), (5,))),
        Sample(F.linear, ((3, 2, 5), (5,))),
        Sample(F.linear, ((6,), (4, 6), (4,)), keeps=(ALL, ROWS, ROWS)),
        Sample(F.linear, ((3, 0), (4, 0), (4,))),
    ],
    "bilinear": [
        Sample(F.bilinear, ((4, 3), (4, 2), (5, 3, 2)), keeps=(ROWS, ROWS, ALL)),
        Sample(F.bilinear, ((4, 3), (4, 2), (5, 3, 2), (5,))),
    ],
    "addmm": [
        Sample(torch.addmm, ((4, 5), (4, 6), (6, 5)), keeps=(ROWS, ROWS, ALL)),
        Sample(torch.addmm, ((5,), (4, 6), (6, 5)), keeps=(ROWS, ALL, COLUMNS)),
        Sample(torch.addmm, ((4, 5), (4, 6), (6, 5)), keeps=(ALL, COLUMNS, ROWS)),
        Sample(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=3), ((4, 1), (4, 6), (6, 5))),
        Sample(lambda c, a, b: c.addmm(mat2=b, mat1=a, beta=2), ((), (3, 0), (0, 2))),
    ],
    "addmv": [
        Sample(
            lambda c, a, b: torch.addmv(c, a, b, alpha=2),
            ((4,), (4, 6), (6,)),
            keeps=(ROWS, ROWS, ALL),
        ),
        Sample(torch.addmv, ((), (4, 6), (6,)), keeps=(ALL, COLUMNS, ROWS)),
        Sample(torch.addmv, ((1,), (4, 6), (6,))),
    ],
    "addr": [Sample(torch.addr, ((4, 5), (4,), (5,)), keeps=(ROWS, ROWS, ALL))],
    "addbmm": [
        Sample(torch.addbmm, ((4, 5), (3, 4, 2), (3, 2, 5)), keeps=(ALL, ROWS, ROWS)),
        Sample(lambda c, a, b: torch.addbmm(c, a, b, beta=2), ((1, 5), (3, 4, 2), (3, 2, 5))),
    ],
    "baddbmm": [
        Sample(torch.baddbmm, ((3, 4, 5), (3, 4, 2), (3, 2, 5)), keeps=(ROWS, ROWS, ROWS)),
        Sample(lambda c, a, b: torch.baddbmm(c, a, b, beta=2), ((4, 1), (3, 4, 2), (3, 2, 5))),
    ],
    "addmm_": [Sample(_in_place("addmm_"), ((4, 5), (4, 6), (6, 5)), keeps=(ROWS, ROWS, ALL))],
    "addmv_": [Sample(_in_place("addmv_"), ((4,), (4, 6), (6,)), keeps=(ROWS, ROWS, ALL))],
    "addr_": [Sample(_in_place("addr_"), ((4, 5), (4,), (5,)), keeps=(ROWS, ROWS, ALL))],
    "addbmm_": [
        Sample(_in_place("addbmm_"), ((4, 5), (3, 4, 2), (3, 2, 5)), keeps=(ROWS, COLUMNS, ALL))
    ],
    "baddbmm_": [
        Sample(_in_place("baddbmm_"), ((3, 4, 5), (3, 4, 2), (3, 2, 5)), keeps=(ROWS,) * 3)
    ],
    "einsum": [
        Sample(_einsum("bk,nk->bn"), ((4, 6), (5, 6)), keeps=(COLUMNS, COLUMNS)),
        Sample(_einsum("bqhd,bkhd->bhqk"), ((2, 3, 4, 2), (2, 5, 4, 2)), keeps=("chunk(2)",) * 2),
        Sample(_einsum("...ij, ...jk"), ((2, 3, 4), (4, 5)), keeps=(COLUMNS, ALL)),
        Sample(_einsum("i...,...i->..."), ((3, 2, 1), (4, 3))),
        Sample(_einsum("ij->ji"), ((3, 4),), keeps=(ROWS,)),
        Sample(_einsum("ijk->j"), ((3, 4, 2),), keeps=(ROWS,)),
        Sample(_einsum("ii->i"), ((4, 4),), keeps=(ROWS,)),
        Sample(_einsum("iij,jk->ik"), ((3, 3, 4), (4, 2))),
        Sample(_einsum("ab,bc,cd->ad"), ((2, 3), (3, 4), (4, 5)), keeps=(ROWS, ALL, ALL)),
        Sample(_einsum("ab,cb,b,->c"), ((2, 3), (4, 3), (3,), ())),
        Sample(lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [2, 0]), ((3, 4), (4, 2))),
        Sample(lambda x, w: torch.einsum("ij,j", [x, w]), ((3, 4), (1,))),
        Sample(_einsum("ak,b->b"), ((2, 0), (3,))),
    ],
}
