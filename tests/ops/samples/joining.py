"""Samples of functions that put tensors together or their elements elsewhere."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardwise.testing import Sample

_ROWS, _COLUMNS = ("chunk(0)",), ("chunk(1)",)
_SHAPE = (4, 3, 2)

SAMPLES: dict[str, list[Sample]] = {
    "cat": [
        Sample(lambda x, y: torch.cat([x, y]), ((8, 6), (5, 6)), keeps=_ROWS * 2),
        Sample(lambda x, y: torch.cat((x, y), dim=-1), ((8, 3), (8, 2)), keeps=_ROWS * 2),
        Sample(
            lambda x, y: torch.concatenate([x, y], axis=1),  # type: ignore[call-arg]  # numpy's
            ((8, 3), (8, 2)),
            keeps=("chunk(0)", "replicate()"),
        ),
        Sample(lambda x, y: torch.cat([x, y, x], 1), ((4, 3), (4, 2)), keeps=_ROWS + _COLUMNS),
        Sample(lambda x, y: torch.cat([y, x, y], 1), (_SHAPE, (4, 0, 2)), keeps=_COLUMNS * 2),
        Sample(lambda x, y: torch.cat([x, y]), ((4, 3), (0,))),  # which torch leaves out
        Sample(lambda x, y: torch.cat([x, y]), ((4, 3), (2, 3)), ("bits", "real")),
        Sample(lambda x, y: torch.concat([x, y]), ((3,), (2,)), "truth", False),
        Sample(lambda x: torch.cat(tensors=[x, x.exp()], dim=1), ((4, 3),), keeps=_ROWS),
    ],
    "stack": [
        Sample(lambda x, y: torch.stack([x, y]), ((8, 6), (8, 6)), keeps=_ROWS * 2),
        Sample(lambda x, y: torch.stack((x, y), -1), ((4, 3), (4, 3)), keeps=_ROWS + _COLUMNS),
        Sample(lambda x, y: torch.stack([x, y], dim=1), ((4, 3), (4, 3)), ("real", "bits")),
        Sample(lambda x, y: torch.stack([x, y, x]), ((), ()), keeps=("replicate()",) * 2),
    ],
    "hstack": [
        Sample(lambda x, y: torch.hstack([x, y]), ((4, 3), (4, 2)), keeps=_ROWS * 2),
        Sample(lambda x, y: torch.hstack([x, y]), ((), (2,))),
    ],
    "vstack": [
        Sample(lambda x, y: torch.vstack([x, y]), ((4, 3), (2, 3)), keeps=_ROWS * 2),
        Sample(lambda x, y: torch.vstack([x, y]), ((3,), (2, 3))),
    ],
    "dstack": [
        Sample(lambda x, y: torch.dstack([x, y]), (_SHAPE, (4, 3, 1)), keeps=_ROWS * 2),
        Sample(lambda x, y: torch.dstack([x, y]), ((3,), (1, 3))),
    ],
    "column_stack": [
        Sample(lambda x, y: torch.column_stack([x, y]), ((4,), (4, 2)), keeps=_ROWS * 2)
    ],
    "block_diag": [
        Sample(torch.block_diag, ((4, 3), (2, 3)), keeps=_ROWS * 2),
        Sample(torch.block_diag, ((3,), (), (2, 2))),
    ],
    "flip": [
        Sample(lambda x: x.flip(0), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: torch.flip(x, [0, -1]), (_SHAPE,), keeps=_COLUMNS),
    ],
    "fliplr": [Sample(torch.fliplr, ((4, 3),), keeps=_COLUMNS)],
    "flipud": [Sample(torch.flipud, ((4, 3),), "bits", False, keeps=_ROWS)],
    "rot90": [
        Sample(torch.rot90, ((5, 3),), keeps=_ROWS),
        Sample(lambda x: x.rot90(2, (1, 2)), (_SHAPE,), keeps=_COLUMNS),
        Sample(lambda x: x.rot90(-1, (2, 0)), (_SHAPE,), keeps=_ROWS),
        Sample(lambda x: torch.rot90(x, k=0), ((3, 2),)),
    ],
    "roll": [
        Sample(lambda x: x.roll(3, 0), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: torch.roll(x, (-1, 7), (0, 1)), ((5, 3),), keeps=_COLUMNS),
        Sample(lambda x: torch.roll(x, (1, 1), dims=(0, 0)), ((5, 3),), "bits", False),
        Sample(lambda x: x.roll(4), ((3, 2),)),
        Sample(lambda x: x.roll(2), ((5,),), keeps=_ROWS),
        Sample(lambda x: x.roll(1), ((),)),
    ],
    "repeat": [
        Sample(lambda x: x.repeat(2, 3), ((4, 3),), keeps=_ROWS),
        Sample(lambda x: x.repeat([2, 1, 2]), ((4, 3),), keeps=_COLUMNS),
        Sample(lambda x: x.repeat(0, 2), ((4, 3),)),
        Sample(lambda x: x.repeat(3), ((),)),
    ],
    "tile": [
        Sample(lambda x: x.tile(2), ((4, 3),), keeps=_ROWS),
        Sample(lambda x: torch.tile(x, [2, 1, 2]), ((4, 3),), keeps=_ROWS),
    ],
    "repeat_interleave": [
        Sample(lambda x: x.repeat_interleave(2, 0), ((4, 3),), keeps=_ROWS),
        Sample(lambda x: torch.repeat_interleave(x, 3, dim=-1), (_SHAPE,), keeps=_ROWS),
        Sample(lambda x: x.repeat_interleave(2), ((5,),), keeps=_ROWS),
        Sample(lambda x: x.repeat_interleave(2), ((3, 2),)),
        Sample(lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 0), ((3, 2),)),
        Sample(lambda x, n: x.repeat_interleave(n, 1), ((3, 2), (2,)), ("real", "bits")),
        Sample(torch.repeat_interleave, ((3,),), "bits", False),
    ],
    "pad": [
        Sample(lambda x: F.pad(x, (1, 2)), ((8, 6),), keeps=_COLUMNS),
        Sample(lambda x: F.pad(x, (0, 1, 3, 2), value=2.0), ((8, 6),), keeps=_ROWS),
        Sample(lambda x: F.pad(x, (-2, 1, 1, -3)), ((5, 3),), keeps=_ROWS),
        Sample(lambda x: F.pad(x, (-3, 2)), ((4, 3),)),
        Sample(lambda x: F.pad(x, (1, 1)), ((4, 0),)),
        Sample(lambda x: F.pad(x, (1, 1), value=True), ((4,),), "truth", False),
        *(
            Sample(lambda x, m=mode: F.pad(x, pad=(2, 1), mode=m), ((2, 3, 5),), keeps=keeps)
            for mode in ("reflect", "replicate", "circular")
            for keeps in (_ROWS, ("chunk(2)",))
        ),
        *(
            Sample(lambda x, m=mode: F.pad(x, (1, -1, -2, 1), m), ((1, 2, 4, 3),))
            for mode in ("reflect", "replicate", "circular")
        ),
    ],
    "constant_pad_nd": [
        Sample(lambda x: torch.constant_pad_nd(x, (1, 0, 2, 1), 3), ((4, 3),), keeps=_ROWS)
    ],
    "tril": [
        Sample(torch.tril, ((8, 6),), keeps=_ROWS),
        Sample(lambda x: x.tril(diagonal=-1), ((2, 4, 5),), keeps=_COLUMNS),
    ],
    "triu": [
        Sample(lambda x: torch.triu(x, 2), ((5, 8),), keeps=_COLUMNS),
        Sample(torch.triu, ((4, 4),), "bits", False),
    ],
    "tril_": [Sample(lambda x: x.clone().tril_(1), ((5, 4),), keeps=_ROWS)],
    "triu_": [Sample(lambda x: x.clone().triu_(), ((4, 5),), keeps=_COLUMNS)],
    "diag": [
        Sample(torch.diag, ((6,),), keeps=_ROWS),
        *(Sample(lambda x, k=k: torch.diag(x, k), ((3,),)) for k in (-2, 1)),
        *(Sample(lambda x, k=k: x.diag(k), ((5, 4),), keeps=_ROWS) for k in (-5, -1, 0, 2)),
    ],
    "diag_embed": [
        Sample(torch.diag_embed, ((4, 3),), keeps=_COLUMNS),
        Sample(lambda x: torch.diag_embed(x, 1, 0, 2), ((3, 4),), keeps=_ROWS),
        Sample(lambda x: x.diag_embed(-2, 2, 0), ((3, 4),)),
    ],
    "slice_scatter": [
        Sample(lambda x, y: torch.slice_scatter(x, y, 0, 2, 6), ((8, 3), (4, 3))),
        Sample(
            lambda x, y: x.slice_scatter(y, 1, start=1, step=2),
            ((8, 5), (8, 2)),
            keeps=("chunk(0)", "chunk(0)"),
        ),
        Sample(lambda x, y: torch.slice_scatter(x, y, dim=-1, start=-2), ((3, 5), (3, 2))),
        Sample(lambda x, y: torch.slice_scatter(x, y, 0, 3, 3), ((4, 2), (0, 2))),
    ],
    "select_scatter": [
        Sample(lambda x, y: x.select_scatter(y, 0, -1), ((5, 3), (3,))),
        Sample(
            lambda x, y: torch.select_scatter(x, y, dim=1, index=2),
            ((8, 3), (8,)),
            keeps=("chunk(0)", "chunk(0)"),
        ),
    ],
    "diagonal_scatter": [
        Sample(
            torch.diagonal_scatter,
            ((5, 4), (4,)),
            keeps=("chunk(0, sizes=[2, 1, 1, 1])", "chunk(0, sizes=[2, 1, 1, 0])"),
        ),
        Sample(lambda x, y: x.diagonal_scatter(y, -1, 2, 0), ((4, 2, 3), (2, 2))),
    ],
    "meshgrid": [
        Sample(
            lambda x, y: torch.meshgrid(x, y, indexing="ij"),
            ((4,), (3,)),
            keeps=("chunk(0)", "replicate()"),
        ),
        Sample(lambda *xs: torch.meshgrid(list(xs), indexing="xy"), ((4,), (), (2,))),
    ],
    "kron": [
        Sample(torch.kron, ((3, 2), (2, 4)), keeps=("chunk(0)", "replicate()")),
        Sample(torch.kron, ((3,), (2, 2))),
    ],
    "glu": [
        Sample(F.glu, ((4, 6),), keeps=_ROWS),
        Sample(lambda x: F.glu(x, 0), ((6, 3),)),
    ],
}
