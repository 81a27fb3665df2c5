"""Samples of softmax and normalisations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise.testing import Sample

if TYPE_CHECKING:
    from shardwise.testing.op_check import Values

_ROWS, _COLUMNS, _ALL = "chunk(0)", "chunk(1)", "replicate()"
_GRID = "grid([2, 2])"
_AFFINE = ((8, 12), (12,), (12,))
_RUNNING: tuple[Values, ...] = ("real", "real", "positive", "real", "real")


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, weight.shape, weight, bias)


def _batch_norm(x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
    """With what becomes of the running statistics."""
    mean, var = mean.detach().clone(), var.detach().clone()
    result = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3)
    return result, mean, var


def _instance_norm(x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
    mean, var = mean.detach().clone(), var.detach().clone()
    return F.instance_norm(x, mean, var, weight, bias, momentum=0.3), mean, var


# Bytes: 12 messages among 4 ranks, of rows by numbers per row.
SAMPLES: dict[str, list[Sample]] = {
    "softmax": [
        Sample(lambda x: torch.softmax(x, 1), ((8, 12),), keeps=(_ROWS,)),
        Sample(lambda x: F.softmax(x, dim=1), ((8, 12),), keeps=(_COLUMNS,), most_bytes=12 * 64),
        Sample(lambda x: x.softmax(-1), ((8, 12),), keeps=(_GRID,), most_bytes=4 * 32),
        Sample(lambda x: x.softmax(0), ((5, 4, 3),)),
        Sample(
            lambda x: torch.special.softmax(x, 1, dtype=torch.float64), ((5, 4),), "bits", False
        ),
        Sample(lambda x: x.masked_fill(x < 0.3, -torch.inf).softmax(0), ((6, 5),)),
        Sample(lambda x: x.softmax(1), ((6, 5),), "whole", False, dtype=torch.bfloat16),
        Sample(lambda x: x.softmax(0), ((),)),
    ],
    "log_softmax": [
        Sample(lambda x: x.log_softmax(1), ((8, 12),), keeps=(_COLUMNS,), most_bytes=12 * 64),
        Sample(lambda x: F.log_softmax(100 * x, 0), ((5, 4, 3),)),
        Sample(lambda x: torch.log_softmax(x, 1, dtype=torch.float32), ((4, 5),), has_grad=False),
    ],
    "softmin": [Sample(lambda x: F.softmin(x, 1), ((8, 12),), keeps=(_ROWS,))],
    "layer_norm": [
        Sample(_layer_norm, _AFFINE, keeps=(_ROWS, _ALL, _ALL)),
        Sample(_layer_norm, _AFFINE, keeps=(_COLUMNS, _ROWS, _ROWS), most_bytes=3 * 12 * 64),
        Sample(_layer_norm, _AFFINE, keeps=(_GRID, _ALL, _ALL), most_bytes=3 * 4 * 32),
        Sample(_layer_norm, ((5, 4, 3), (4, 3), (4, 3))),
        Sample(lambda x, b: torch.layer_norm(x, (3,), bias=b), ((5, 3), (3,))),
        Sample(lambda x: F.layer_norm(x, (4, 3)), ((4, 3),)),
    ],
    "rms_norm": [
        Sample(
            lambda x, w: F.rms_norm(x, (12,), w),
            ((8, 12), (12,)),
            keeps=(_COLUMNS, _ROWS),
            most_bytes=12 * 64,
        ),
        Sample(lambda x: F.rms_norm(x, (4, 3), eps=0.1), ((5, 4, 3),), keeps=(_ROWS,)),
    ],
    "group_norm": [
        Sample(
            lambda x, w, b: F.group_norm(x, 4, w, b),
            ((2, 8, 3), (8,), (8,)),
            keeps=(_COLUMNS, _ROWS, _ROWS),  # two channels each: their groups are whole
        ),
        Sample(
            lambda x, w, b: F.group_norm(x, 2, w, b),
            ((2, 8, 3), (8,), (8,)),
            keeps=(_COLUMNS, _ALL, _ALL),
            most_bytes=3 * 8 * 2 * 4,
        ),
        Sample(lambda x: F.group_norm(x, 3, eps=0.1), ((3, 6),)),
        Sample(lambda x: torch.group_norm(x, 2), ((3, 4, 2, 2),), keeps=(_ROWS,)),
    ],
    "batch_norm": [
        Sample(
            _batch_norm,
            ((8, 4, 3), (4,), (4,), (4,), (4,)),
            _RUNNING,
            keeps=(_ROWS, _ALL, _ALL, _ALL, _ALL),
            most_bytes=3 * 12 * 32,
        ),
        Sample(
            _batch_norm,
            ((8, 4, 3), (4,), (4,), (4,), (4,)),
            _RUNNING,
            keeps=(_COLUMNS, _ROWS, _ROWS, _ROWS, _ROWS),
        ),
        Sample(
            lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach(), w),
            ((5, 4, 2), (4,), (4,), (4,)),
            ("real", "real", "positive", "real"),
            keeps=(_ROWS, _ALL, _ALL, _ALL),
        ),
        Sample(lambda x: F.batch_norm(x, None, None, training=True), ((5, 6),)),
        Sample(
            lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0.1, 1e-5, False),
            ((8, 4, 3), (4,)),
            keeps=(_ROWS, _ALL),
            most_bytes=3 * 12 * 32,
        ),
    ],
    "instance_norm": [
        Sample(_instance_norm, ((3, 4, 5), (4,), (4,), (4,), (4,)), _RUNNING),
        Sample(F.instance_norm, ((4, 3, 2, 2),), keeps=(_ROWS,)),
        Sample(
            lambda x, w: torch.instance_norm(x, w, None, None, None, True, 0.1, 1e-5, False),
            ((4, 3, 2), (3,)),
            keeps=(_ROWS, _ALL),
        ),
    ],
    "normalize": [
        Sample(F.normalize, ((4, 6),), keeps=(_ROWS,)),
        Sample(lambda x: F.normalize(x, 1.5, 0), ((4, 3, 2),)),
    ],
}
