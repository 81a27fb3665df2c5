"""Samples of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.testing.op_check import Values

_ROWS, _COLUMNS, _ALL = "chunk(0)", "chunk(1)", "replicate()"
_TWO = ((4, 6), (4, 6))
_SUM = 6 * 8  # bytes that 4 ranks send to add up a number
_TARGETS = torch.tensor([3, 0, -100, 5, 2, 1, -100, 4])
_CLASSES: tuple[Values, ...] = ("real", "bits")  # which has 0 to 6


def _summed(call: Callable[..., Any], *more: tuple[int, ...], values: Values = "real") -> Sample:
    """Of two matrices and more, cut alike; what has no rows is everywhere."""
    shapes = (*_TWO, *more)
    keeps = tuple(_ROWS if shape[0] == _TWO[0][0] else _ALL for shape in shapes)
    return Sample(call, shapes, values, keeps=keeps, most_bytes=_SUM)


def _signs(x: Any) -> Any:
    return torch.where(x > 0, 1.0, -1.0)


SAMPLES: dict[str, list[Sample]] = {
    "cross_entropy": [
        # Numbers per row and rank: log-sum-exp, logit of the target, whether it is here.
        Sample(
            lambda x: F.cross_entropy(x, _TARGETS),
            ((8, 12),),
            keeps=(_COLUMNS,),
            most_bytes=3 * 12 * 64,
        ),
        Sample(
            lambda x: F.cross_entropy(x, _TARGETS), ((8, 12),), keeps=(_ROWS,), most_bytes=2 * _SUM
        ),
        Sample(
            lambda x, t: F.cross_entropy(x, t, ignore_index=2),
            ((8, 7), (8,)),
            _CLASSES,
            keeps=("grid([2, 1], ranks=[[0, 1], [2, 3]])", "grid([2], ranks=[[0, 1], [2, 3]])"),
            most_bytes=2 * 4 * 8,
        ),
        Sample(
            lambda x, w: F.cross_entropy(x, _TARGETS, w.detach(), label_smoothing=0.2),
            ((8, 6), (6,)),
            ("real", "positive"),
        ),
        Sample(
            lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
            ((3, 7, 2), (3, 2)),
            _CLASSES,
        ),
        Sample(
            lambda x, t: F.cross_entropy(x, t, reduction="sum"),
            ((2, 7, 2, 2), (2, 2, 2)),
            _CLASSES,
        ),
        Sample(F.cross_entropy, ((7,), ()), _CLASSES),
        Sample(
            lambda x, t, w: F.cross_entropy(x, t, w.detach()),
            ((7,), (), (7,)),
            (*_CLASSES, "positive"),
        ),
        Sample(
            lambda x, t, w: F.cross_entropy(x, t.softmax(1), w, label_smoothing=0.1),
            ((5, 6), (5, 6), (6,)),
        ),
        Sample(lambda x, t: F.cross_entropy(x, t, reduction="none"), ((3, 4, 2), (3, 4, 2))),
    ],
    "nll_loss": [
        Sample(
            lambda x: F.nll_loss(x, _TARGETS), ((8, 12),), keeps=(_COLUMNS,), most_bytes=2 * 12 * 64
        ),
        Sample(
            lambda x, t, w: F.nll_loss(x, t, w.detach(), ignore_index=1),
            ((3, 7, 2), (3, 2), (7,)),
            ("real", "bits", "positive"),
        ),
    ],
    "loss_elements": [
        Sample(lambda x, y: F.mse_loss(x, y, reduction="none"), _TWO, keeps=(_ROWS, _ROWS)),
    ],
    "mse_loss": [
        _summed(F.mse_loss),
        Sample(
            lambda x, y, w: F.mse_loss(x, y, weight=w),  # type: ignore[call-arg]  # stubs are behind
            (*_TWO, (4, 6)),
            "positive",
        ),
    ],
    "l1_loss": [_summed(lambda x, y: F.l1_loss(x, y, reduction="sum"))],
    "smooth_l1_loss": [_summed(lambda x, y: F.smooth_l1_loss(x, y, beta=0.5))],
    "huber_loss": [
        _summed(lambda x, y: F.huber_loss(x, y, delta=0.5)),
        Sample(
            lambda x, y, w: F.huber_loss(x, y, weight=w),  # type: ignore[call-arg]  # stubs are behind
            (*_TWO, (4, 6)),
            "positive",
        ),
    ],
    "binary_cross_entropy": [
        _summed(
            lambda x, y, w: F.binary_cross_entropy(x, y.detach(), w.detach()), (6,), values="unit"
        ),
    ],
    "binary_cross_entropy_with_logits": [
        _summed(
            lambda x, y, w, p: F.binary_cross_entropy_with_logits(
                x, y, w.detach(), pos_weight=p.detach()
            ),
            (6,),
            (6,),
            values="unit",
        ),
    ],
    "kl_div": [
        _summed(lambda x, y: F.kl_div(x, y, reduction="batchmean"), values="unit"),
        _summed(lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True), values="unit"),
    ],
    "poisson_nll_loss": [_summed(lambda x, y: F.poisson_nll_loss(x, y.detach()), values="unit")],
    "gaussian_nll_loss": [
        _summed(F.gaussian_nll_loss, (4, 1), values="unit"),
        Sample(lambda x, y: F.gaussian_nll_loss(x, y, 0.5, full=True), _TWO),
    ],
    "soft_margin_loss": [_summed(lambda x, y: F.soft_margin_loss(x, _signs(y)))],
    "hinge_embedding_loss": [_summed(lambda x, y: F.hinge_embedding_loss(x, _signs(y)))],
    "margin_ranking_loss": [
        _summed(lambda x, y, t: F.margin_ranking_loss(x, y, _signs(t), 0.1), (4, 6))
    ],
    "multilabel_soft_margin_loss": [
        _summed(lambda x, y, w: F.multilabel_soft_margin_loss(x, (y > 0) * 1.0, w), (6,))
    ],
    "cosine_similarity": [
        Sample(F.cosine_similarity, _TWO, keeps=(_ROWS, _ROWS)),
        Sample(lambda x, y: torch.cosine_similarity(x, y, -1), ((4, 6), (6,))),
    ],
    "pairwise_distance": [Sample(F.pairwise_distance, _TWO, keeps=(_ROWS, _ROWS))],
    "cosine_embedding_loss": [
        _summed(lambda x, y, t: F.cosine_embedding_loss(x, y, _signs(t), 0.1), (4,))
    ],
    "triplet_margin_loss": [
        _summed(lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True), (4, 6))
    ],
}
