"""Functions that autocast computes in another dtype: the same one on every rank.

CUDA's autocast has more of them than the CPU's; the test gives the CPU's some of CUDA's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WIDENED = ("cumsum", "cumprod", "logsumexp", "linalg_vector_norm")
FULL = (torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5).half()
ROWS = shardwise.chunk(0, ranks=[0, 1], device="cpu")


def _widened(function: Any) -> Callable[..., Any]:
    """As autocast has it: the function on float32, with autocast off."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return function(x.float(), *args, **kwargs)

    return run


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name in _WIDENED:
        library.impl(name, _widened(getattr(torch.ops.aten, name).default), "AutocastCPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(1),
        lambda x: x.cumprod(0),
        lambda x: x.logsumexp(0),
        lambda x: x.logsumexp(1),
        lambda x: torch.linalg.vector_norm(x, torch.inf),
        lambda x: torch.linalg.vector_norm(x, torch.inf, 0),
        lambda x: torch.linalg.vector_norm(x, 2, 1),
    ],
)
def test_the_dtype_is_that_of_autocast_on_every_rank(
    call: Callable[[Any], Any], requires_grad: bool
) -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.zeros(ROWS, 4, 6, dtype=torch.half).copy_(FULL)
        x.requires_grad_(requires_grad)
        assert call(x).dtype == torch.half  # what is kept of this call does not matter
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = call(x), call(FULL)
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found.full_tensor(), expected)

    simulate(on_rank, 3)  # the third has no piece
