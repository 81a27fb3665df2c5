"""Samples of look-ups and writes by indices that are tensors, embeddings among them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise.ops.embedding import scale_gradient
from shardwise.testing import Sample

ROWS, COLUMNS, ALL = "chunk(0)", "chunk(1)", "replicate()"
GRID = "grid([2, 2])"
OFFSETS, ENDS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 3, 9])

EMBEDDINGS: dict[str, list[Sample]] = {
    "embedding": [
        Sample(F.embedding, ((3, 4), (7, 5)), values=("bits", "real"), keeps=(ALL, ROWS)),
        Sample(F.embedding, ((3, 4), (7, 5)), values=("bits", "real"), keeps=(ALL, COLUMNS)),
        Sample(F.embedding, ((5,), (7, 5)), values=("bits", "real"), keeps=(ALL, GRID)),
        Sample(F.embedding, ((3, 4), (7, 5)), values=("bits", "real"), keeps=(ROWS, ALL)),
        Sample(
            F.embedding,
            ((8, 4), (7, 5)),
            values=("bits", "real"),
            keeps=(ROWS, ROWS),
            # Everybody's counts and row numbers, and at most 7 rows to each other rank.
            most_bytes=4 * 3 * 5 * 8 + 4 * 7 * 8 + 4 * 7 * 5 * 8,
        ),
        Sample(F.embedding, ((), (7, 5)), values=("bits", "real")),
        Sample(F.embedding, ((2, 0), (7, 5)), values=("bits", "real")),
        Sample(
            lambda ids, w: F.embedding(ids, w, padding_idx=-4, scale_grad_by_freq=True),
            ((3, 4), (7, 5)),
            values=("bits", "real"),
        ),
        Sample(lambda ids, w: torch.embedding(w, ids, 2), ((3,), (7, 5)), values=("bits", "real")),
    ],
    "embedding_bag": [
        Sample(F.embedding_bag, ((4, 3), (7, 5)), values=("bits", "real"), keeps=(ALL, COLUMNS)),
        Sample(F.embedding_bag, ((4, 3), (7, 5)), values=("bits", "real"), keeps=(ROWS, ALL)),
        Sample(
            lambda ids, w: F.embedding_bag(ids, w, OFFSETS),
            ((9,), (7, 5)),
            values=("bits", "real"),
            keeps=(ALL, COLUMNS),
        ),
        Sample(
            lambda ids, w: F.embedding_bag(
                ids, w, ENDS, mode="max", include_last_offset=True, padding_idx=3
            ),
            ((9,), (7, 5)),
            values=("bits", "real"),
        ),
        Sample(
            lambda ids, w, p: F.embedding_bag(
                ids, w, OFFSETS, mode="sum", per_sample_weights=p, padding_idx=-2
            ),
            ((9,), (7, 5), (9,)),
            values=("bits", "real", "real"),
        ),
        Sample(
            lambda ids, w, p: F.embedding_bag(ids, w, mode="sum", per_sample_weights=p),
            ((4, 3), (7, 5), (4, 3)),
            values=("bits", "real", "real"),
            keeps=(ALL, COLUMNS, ALL),
        ),
    ],
    "scale_gradient": [
        Sample(
            lambda x: scale_gradient(x, x.detach().abs()), ((3, 4),), keeps=(ROWS,), has_grad=False
        ),
    ],
}

SAMPLES: dict[str, list[Sample]] = {**EMBEDDINGS}
