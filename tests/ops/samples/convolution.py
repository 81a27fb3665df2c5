"""Samples of convolutions, pooling and resizing: pictures have to be whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, CHANNELS, ALL = "chunk(0)", "chunk(1)", "replicate()"
PICTURES = {1: (4, 4, 6), 2: (4, 4, 4, 6), 3: (4, 4, 2, 4, 3)}


def _conv(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    function = getattr(F, name)
    return lambda x, w, b: function(x, w, b, *args, **kwargs)


def _of(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    function = getattr(F, name)
    return lambda x: function(x, *args, **kwargs)


def _pooled(name: str, *args: Any, **kwargs: Any) -> list[Sample]:
    """A function of one picture of each number of dims, by batch and by channels."""
    ndim = int(name[name.index("d", -14 if "indices" in name else -1) - 1])
    shape = PICTURES[ndim]
    # Powers have no gradient of the roots of nothing.
    values: Any = "positive" if name.startswith("lp") else "distinct"
    return [
        Sample(_of(name, *args, **kwargs), (shape,), values, keeps=(BATCH,)),
        Sample(_of(name, *args, **kwargs), (shape[1:],), values, keeps=(BATCH,)),
    ]


def _unpooled(ndim: int) -> list[Sample]:
    pool, unpool = getattr(F, f"max_pool{ndim}d"), getattr(F, f"max_unpool{ndim}d")

    def call(x: torch.Tensor) -> Any:
        values, indices = pool(x, 2, return_indices=True)
        return unpool(values, indices, 2, output_size=x.shape)

    return [Sample(call, (PICTURES[ndim],), "distinct", keeps=(CHANNELS,))]


def _poolings(ndim: int) -> dict[str, list[Sample]]:
    one = f"pool{ndim}d"
    return {
        f"max_{one}": _pooled(f"max_{one}", 2) + _pooled(f"max_{one}", 2, 1, return_indices=True),
        f"max_{one}_with_indices": _pooled(f"max_{one}_with_indices", 2)[:1],
        f"avg_{one}": _pooled(f"avg_{one}", 2, 1, padding=1),
        f"lp_{one}": _pooled(f"lp_{one}", 2.0, 2),
        f"adaptive_avg_{one}": _pooled(f"adaptive_avg_{one}", 2),
        f"adaptive_max_{one}": _pooled(f"adaptive_max_{one}", 2)
        + _pooled(f"adaptive_max_{one}", 2, return_indices=True)[:1],
        f"adaptive_max_{one}_with_indices": _pooled(f"adaptive_max_{one}_with_indices", 2)[:1],
        f"max_unpool{ndim}d": _unpooled(ndim),
    }


def _sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, grid.tanh(), align_corners=False)


POOLINGS = _poolings(1) | _poolings(2) | _poolings(3)
SAMPLES: dict[str, list[Sample]] = {
    "conv1d": [
        Sample(_conv("conv1d"), ((4, 4, 6), (5, 4, 3), (5,)), keeps=(BATCH, ALL, ALL)),
        Sample(
            lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2),
            ((4, 9), (5, 4, 3)),
            keeps=(BATCH, CHANNELS),
        ),
        Sample(
            lambda x, w, b: F.conv1d(x, w, bias=b, groups=4),
            ((2, 4, 7), (8, 1, 3), (8,)),
            keeps=(CHANNELS, BATCH, BATCH),
        ),
        # Pictures cut over more ranks than the batch has, which share the groups.
        Sample(_conv("conv1d", groups=2), ((2, 6, 5), (4, 3, 3), (4,))),
        Sample(_conv("conv1d"), ((0, 4, 6), (5, 4, 3), (5,))),
    ],
    "conv2d": [
        Sample(
            _conv("conv2d", padding="same"),
            ((2, 4, 5, 5), (6, 4, 3, 3), (6,)),
            keeps=(ALL, BATCH, BATCH),
        ),
        Sample(
            _conv("conv2d", stride=2),
            ((2, 4, 5, 5), (6, 4, 3, 3), (6,)),
            keeps=(CHANNELS, CHANNELS, ALL),
        ),
        # Cut inside groups, and between them.
        Sample(_conv("conv2d", 1, 1, 1, 3), ((2, 6, 3, 3), (9, 2, 3, 3), (9,))),
        Sample(
            _conv("conv2d", 1, "valid", 1, 4),
            ((2, 8, 3, 3), (12, 2, 3, 3), (12,)),
            keeps=(CHANNELS, BATCH, BATCH),
        ),
        Sample(
            _conv("conv2d", groups=4),
            ((2, 8, 3, 3), (12, 2, 2, 2), (12,)),
            keeps=(ALL, "chunk(0, sizes=[1, 4, 5, 2])", ALL),
        ),
    ],
    "conv3d": [
        Sample(_conv("conv3d"), ((4, 3, 3, 3, 2), (2, 3, 2, 2, 2), (2,)), keeps=(BATCH, ALL, ALL))
    ],
    "conv_transpose1d": [
        Sample(
            _conv("conv_transpose1d", stride=2, output_padding=1),
            ((2, 4, 5), (4, 5, 3), (5,)),
            keeps=(CHANNELS, BATCH, ALL),
        ),
        Sample(
            _conv("conv_transpose1d", groups=2),
            ((4, 4, 3), (4, 3, 2), (6,)),
            keeps=(BATCH, ALL, ALL),
        ),
    ],
    "conv_transpose2d": [
        Sample(
            lambda x, w: F.conv_transpose2d(x, w, dilation=2),
            ((4, 3, 3), (4, 5, 2, 2)),
            keeps=(ALL, CHANNELS),
        )
    ],
    "conv_transpose3d": [
        Sample(
            _conv("conv_transpose3d"),
            ((4, 2, 2, 2, 3), (2, 3, 2, 2, 2), (3,)),
            keeps=(BATCH, ALL, ALL),
        )
    ],
    **POOLINGS,
    "interpolate": [
        Sample(_of("interpolate", 7, mode="linear"), (PICTURES[1],), keeps=(CHANNELS,)),
        Sample(_of("interpolate", scale_factor=2), (PICTURES[2],), keeps=(BATCH,)),
        Sample(
            _of("interpolate", scale_factor=1.5, mode="bilinear", align_corners=True),
            (PICTURES[2],),
            keeps=(CHANNELS,),
        ),
        Sample(
            _of("interpolate", (5, 3), mode="bicubic", antialias=True),
            (PICTURES[2],),
            keeps=(CHANNELS,),
        ),
        Sample(_of("interpolate", (3, 5, 2), mode="trilinear"), (PICTURES[3],), keeps=(BATCH,)),
        Sample(_of("interpolate", (3, 5, 2), mode="area"), (PICTURES[3],), keeps=(BATCH,)),
    ],
    "grid_sample": [
        Sample(_sampled, ((2, 4, 3, 3), (2, 4, 5, 2)), keeps=(CHANNELS, ALL)),
        Sample(_sampled, ((2, 4, 3, 3), (2, 4, 5, 2)), keeps=(ALL, "chunk(1)")),
        Sample(_sampled, ((2, 4, 3, 3, 2), (2, 4, 1, 2, 3))),
    ],
    "affine_grid": [
        Sample(
            lambda theta: F.affine_grid(theta, [4, 2, 3, 2], align_corners=False),
            ((4, 2, 3),),
            keeps=(BATCH,),
        )
    ],
    "unfold": [Sample(_of("unfold", 2), (PICTURES[2],), keeps=(BATCH,))],
    "fold": [Sample(_of("fold", (4, 4), 2), ((4, 8, 9),), keeps=(BATCH,))],
    "pixel_shuffle": [Sample(_of("pixel_shuffle", 2), ((4, 8, 2, 3),), keeps=(BATCH,))],
    "pixel_unshuffle": [Sample(_of("pixel_unshuffle", 2), ((2, 4, 6),), keeps=(BATCH,))],
    "channel_shuffle": [Sample(_of("channel_shuffle", 2), ((2, 8, 3),), keeps=(BATCH,))],
}
