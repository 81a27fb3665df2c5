"""Random numbers on a GPU are those of the CPU. Run where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardwise.geometry import Box
from shardwise.random import (
    Key,
    fill_bernoulli_,
    fill_cauchy_,
    fill_exponential_,
    fill_geometric_,
    fill_integers_,
    fill_log_normal_,
    fill_normal_,
    fill_trunc_normal_,
    fill_uniform_,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
CASES: list[tuple[Callable[..., torch.Tensor], list[torch.dtype], dict[str, Any]]] = [
    (fill_uniform_, FLOATS, {}),
    (fill_uniform_, FLOATS, {"low": -0.3, "high": 0.7}),
    (fill_normal_, FLOATS, {}),
    (fill_normal_, FLOATS, {"mean": 1.0, "std": 0.02}),
    (fill_trunc_normal_, FLOATS[:4], {"std": 1.5, "a": -2.0, "b": 1.0}),
    (fill_integers_, INTEGERS, {"low": 0, "high": 2}),
    (fill_integers_, [torch.int64], {"low": -(2**60), "high": 2**61}),
    (fill_bernoulli_, [torch.float32, torch.bool], {"p": 0.1}),
    (fill_bernoulli_, FLOATS[:4], {"p": 0.1, "value": 1 / 0.9}),
    (fill_exponential_, FLOATS[:4], {"rate": 2.0}),
    (fill_geometric_, [torch.float32, torch.int64], {"p": 0.1}),
    (fill_log_normal_, FLOATS[:4], {}),
    (fill_cauchy_, FLOATS[:4], {"median": 1.0, "sigma": 2.0}),
]


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((3000, 1000), Box((500, 0), (2900, 1000))),
        ((3000, 1001), Box((0, 250), (3000, 500))),
        ((100_000, 13), Box((0, 4), (100_000, 7))),
        ((5, 1 << 20), Box((0, 3), (5, (1 << 20) - 3))),  # more than a chunk
        ((), Box((), ())),
    ],
)
@pytest.mark.parametrize(("fill", "dtypes", "parameters"), CASES)
def test_the_gpu_has_the_numbers_of_the_cpu(
    fill: Callable[..., torch.Tensor],
    dtypes: list[torch.dtype],
    parameters: dict[str, Any],
    shape: tuple[int, ...],
    box: Box,
) -> None:
    for dtype in dtypes:
        on_cpu, on_gpu = (
            fill(
                torch.empty(box.shape, dtype=dtype, device=device),
                box,
                shape,
                Key(3, 4),
                **parameters,
            )
            for device in ("cpu", "cuda")
        )
        assert torch.equal(on_gpu.cpu(), on_cpu)
