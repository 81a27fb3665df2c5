"""Samples of look-ups and writes by indices that are tensors, embeddings among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwise.ops.embedding import scale_gradient
from shardwise.ops.looking_up import take_along
from shardwise.ops.writing import write_at
from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.testing.op_check import Values

ROWS, COLUMNS, ALL = "chunk(0)", "chunk(1)", "replicate()"
GRID, GRID_3D = "grid([2, 2])", "grid([2, 1, 2])"
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
            # How many rows of whom, told to all; 14 rows of others: their numbers, and they.
            most_bytes=4 * 3 * 5 * 8 + 14 * 8 + 14 * 5 * 8,
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
        Sample(lambda x: scale_gradient(x, x.detach().abs()), ((3, 4),), keeps=(ROWS,)),
    ],
}


# -- look-ups --------------------------------------------------------------------------------------

X_IDS: tuple[Values, ...] = ("real", "bits")
X_IDS_V: tuple[Values, ...] = ("real", "bits", "real")
PLACES = torch.tensor([3, 0, 6, 1])
ASIDE = torch.stack([PLACES, PLACES.flip(0), 6 - PLACES])  # no index twice in a row
MASK = torch.tensor([[k % 3 == 1, k % 2 == 0, k > 4] for k in range(7)])

LOOK_UPS: dict[str, list[Sample]] = {
    "index_select": [
        Sample(
            lambda x, i: torch.index_select(x, 1, i),
            ((3, 7, 4), (5,)),
            values=X_IDS,
            keeps=(COLUMNS, ALL),
        ),
        Sample(
            lambda x, i: x.index_select(-3, i),
            ((7, 4, 2), (9,)),
            values=X_IDS,
            keeps=(COLUMNS, ALL),
        ),
        Sample(
            lambda x, i: torch.index_select(x, 0, i),
            ((7, 3), (5,)),
            values=("truth", "bits"),
            has_grad=False,
            keeps=(ROWS, ALL),
        ),
        Sample(lambda x: torch.index_select(x, 0, torch.tensor(2)), ((7, 3),)),
        Sample(lambda x: torch.index_select(x, 0, torch.tensor([0])), ((),)),
    ],
    "gather": [
        Sample(
            lambda x, i: torch.gather(x, 1, i), ((4, 7), (4, 3)), values=X_IDS, keeps=(ROWS, ROWS)
        ),
        Sample(
            lambda x, i: torch.gather(x, 1, i), ((3, 7), (3, 4)), values=X_IDS, keeps=(COLUMNS, ALL)
        ),
        Sample(lambda x, i: torch.gather(x, 0, i), ((7, 4), (9, 3)), values=X_IDS),
        Sample(
            lambda x, i: torch.gather(x, 0, i),
            ((7, 4), (2, 4)),
            values=("bits", "bits"),
            has_grad=False,
        ),
        # Without indices there may be any number of dims.
        Sample(lambda x, i: torch.gather(x, 1, i), ((7, 4), (0,)), values=X_IDS),
        Sample(lambda x, i: torch.gather(x, 0, i), ((7, 4), (9, 0, 2)), values=X_IDS),
        Sample(lambda x, i: torch.gather(x, 0, i), ((7, 4), (0, 5)), values=X_IDS),
        Sample(lambda x, i: torch.gather(x, 0, i), ((), (3, 0)), values=X_IDS),
        Sample(lambda x, i: torch.gather(x, 0, i), ((7,), ()), values=X_IDS),
    ],
    "take_along_dim": [
        Sample(
            lambda x, i: torch.take_along_dim(x, i, 1),
            ((3, 7, 2), (1, 4, 2)),
            values=X_IDS,
            keeps=(ROWS, ALL),
        ),
        Sample(lambda x, i: torch.take_along_dim(x, i), ((3, 7), (2,)), values=X_IDS),
    ],
    "take_along": [
        Sample(lambda x, i: take_along(x, i, 0), ((7, 1), (4, 3)), values=X_IDS, keeps=(ROWS, ALL))
    ],
    "take_at": [
        Sample(lambda x, i: x[i], ((7, 3), (2, 2)), values=X_IDS, keeps=(ROWS, ALL)),
        Sample(lambda x, i: x[:, -i], ((3, 7, 2), (4,)), values=X_IDS, keeps=(COLUMNS, ALL)),
        Sample(lambda x, i: x[1, :, i], ((3, 2, 7), (4,)), values=X_IDS),
        Sample(lambda x, i: x[None, i, 1:], ((7, 3), (4,)), values=X_IDS),
        Sample(
            lambda x, i, j: x[i, :, j],
            ((7, 3, 7), (2, 3), (3,)),
            values=("real", "bits", "bits"),
            keeps=(GRID_3D, ALL, ALL),
        ),
        Sample(lambda x, i: x[..., i, [0]], ((3, 7, 2), (4,)), values=X_IDS),
        Sample(lambda x: x[[0, -1]], ((7, 3),), keeps=(ROWS,)),
        Sample(lambda x: x[MASK], ((7, 3),), keeps=(ROWS,)),
        Sample(lambda x, mask: x[mask], ((7, 3), (7,)), values=("real", "truth")),
        Sample(torch.masked_select, ((7, 3), (3,)), values=("real", "truth")),
        Sample(lambda x, i: torch.take(x, -i), ((7, 3), (2, 4)), values=X_IDS, keeps=(ROWS, ALL)),
        Sample(torch.nonzero, ((7, 3),), values="ties", has_grad=False),
        Sample(lambda x: torch.nonzero(x, as_tuple=True), ((5,),), values="ties", has_grad=False),
    ],
}


# -- writes ----------------------------------------------------------------------------------------


def _changed(change: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A write in place, on a copy, since what has a gradient may not be written."""

    def call(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        copied = x.clone()
        change(copied, *operands)
        return copied

    return call


def _set(index: Any) -> Callable[..., torch.Tensor]:
    return _changed(lambda x, values: x.__setitem__(index, values))


WRITES: dict[str, list[Sample]] = {
    "write_at": [
        Sample(
            lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
            ((7, 3), (4,), (4, 3)),
            values=X_IDS_V,
            keeps=(ROWS, ALL, ALL),
        ),
        Sample(
            lambda x, i, j, v: write_at(x, (i, j), (0, 2), v, True),
            ((7, 3, 7), (2, 4), (4,), (2, 4, 3)),
            values=("real", "bits", "bits", "real"),
            keeps=(COLUMNS, ALL, ALL, "chunk(2)"),
        ),
        Sample(
            lambda x, i, j, v: write_at(x, (i, -j), (1, 2), v, True),
            ((3, 7, 7), (2, 4), (4,), (2, 1)),
            values=("real", "bits", "bits", "real"),
        ),
    ],
    "write_at_": [
        Sample(_set([0, 2, -1]), ((7, 3), (3, 3)), keeps=(ROWS, ALL)),
        Sample(_set((slice(None), [1, 0])), ((5, 3), (2,)), keeps=(ROWS, ALL)),
        Sample(_set(MASK), ((7, 3), ())),
        Sample(_set((slice(1, 3), [0, 2])), ((7, 3), (2,))),
        Sample(
            _changed(lambda x, mask: x.__setitem__(mask, 1.5)),
            ((7, 3), (7,)),
            values=("real", "truth"),
        ),
        Sample(
            _changed(lambda x, i, v: x.index_put_((i,), v, True)),
            ((7, 3), (4,), (3,)),
            values=X_IDS_V,
        ),
        Sample(_changed(lambda x, i, v: x.put_(i, v, True)), ((7, 3), (4,), (4,)), values=X_IDS_V),
    ],
    "index_add": [
        Sample(
            lambda x, i, v: torch.index_add(x, 0, i, v, alpha=2),
            ((7, 3), (9,), (9, 3)),
            values=X_IDS_V,
            keeps=(COLUMNS, ALL, COLUMNS),
        ),
    ],
    "index_add_": [
        Sample(
            _changed(lambda x, v: x.index_add_(1, PLACES, v)), ((3, 7), (3, 4)), keeps=(ROWS, ROWS)
        ),
    ],
    "index_copy": [
        Sample(
            lambda x, v: torch.index_copy(x, -1, PLACES, v), ((3, 7), (3, 4)), keeps=(ROWS, ROWS)
        ),
        Sample(lambda x, v: torch.index_copy(x, 0, PLACES[:1], v), ((7,), ())),
        Sample(lambda x, v: torch.index_copy(x, 0, torch.tensor(4), v), ((7,), ())),
        Sample(lambda x, v: torch.index_copy(x, 0, torch.tensor(0), v), ((), (1,))),
    ],
    "index_copy_": [
        Sample(
            _changed(lambda x, v: x.index_copy_(1, PLACES, v)), ((3, 7), (3, 4)), keeps=(ROWS, ROWS)
        ),
        Sample(_changed(lambda x, v: x.index_copy_(0, PLACES[:1], v)), ((7,), ())),
    ],
    "index_fill": [
        Sample(lambda x: torch.index_fill(x, 0, -PLACES - 1, 2.5), ((7, 3),), keeps=(ROWS,)),
    ],
    "index_fill_": [
        Sample(
            _changed(lambda x, i, v: x.index_fill_(0, i, v)),
            ((7, 3), (4,), ()),
            values=X_IDS_V,
            keeps=(ROWS, ALL, ALL),
        ),
    ],
    "scatter": [
        Sample(lambda x, v: torch.scatter(x, 1, ASIDE, v), ((3, 7), (3, 4)), keeps=(ROWS, ROWS)),
        Sample(
            lambda x, v: torch.scatter(x, 1, ASIDE[:2, :3], v), ((3, 7), (3, 4)), has_grad=False
        ),
        Sample(lambda x: torch.scatter(x, 1, ASIDE, 1.5), ((3, 7),), keeps=(COLUMNS,)),
        # Without indices there may be any number of dims.
        Sample(lambda x, i: torch.scatter(x, 1, i, 1.5), ((3, 7), (0,)), values=X_IDS),
    ],
    "scatter_": [
        Sample(
            _changed(lambda x, v: x.scatter_(1, ASIDE, v)), ((3, 7), (3, 4)), keeps=(ROWS, ROWS)
        ),
        Sample(_changed(lambda x, i: x.scatter_(0, i, 1.5)), ((3, 7), (2, 0, 1)), values=X_IDS),
    ],
    "scatter_add": [
        Sample(
            lambda x, i, v: torch.scatter_add(x, 0, i, v),
            ((7, 4), (6, 4), (6, 4)),
            values=X_IDS_V,
            keeps=(COLUMNS, COLUMNS, COLUMNS),
        ),
        Sample(
            lambda x, i, v: torch.scatter_add(x, 0, i, v),
            ((7, 4), (9, 0, 2), (9, 0, 2)),
            values=X_IDS_V,
        ),
    ],
    "scatter_add_": [
        Sample(
            _changed(lambda x, i, v: x.scatter_add_(0, i, v)),
            ((7, 5), (6, 3), (7, 4)),
            values=X_IDS_V,
            has_grad=False,
            keeps=(ROWS, ALL, ALL),
        ),
    ],
    "scatter_reduce": [
        Sample(
            lambda x, i, v: torch.scatter_reduce(x, 1, i, v, "prod"),
            ((3, 7), (3, 8), (3, 8)),
            values=X_IDS_V,
            keeps=(ROWS, ROWS, ROWS),
        ),
        Sample(
            lambda x, i, v: x.scatter_reduce(1, i, v, "mean", include_self=False),
            ((3, 7), (3, 8), (3, 8)),
            values=X_IDS_V,
        ),
    ],
    "scatter_reduce_": [
        Sample(
            _changed(lambda x, i, v: x.scatter_reduce_(1, i, v, "amax")),
            ((3, 7), (3, 8), (3, 8)),
            values=X_IDS_V,
            keeps=(ROWS, ROWS, ROWS),
        ),
    ],
}

SAMPLES: dict[str, list[Sample]] = {**EMBEDDINGS, **LOOK_UPS, **WRITES}
