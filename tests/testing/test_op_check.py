"""The checker of ops finds what is wrong; a test by it is worth what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.errors import ArgumentValueError, RankFailure
from shardwise.sharded_tensor import ShardedTensor
from shardwise.testing import Sample, check_op

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = shardwise.chunk(0, ranks=[0, 1], device="cpu").layout((4, 6))


def on_sharded(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Something else on sharded tensors than on plain ones, which get doubled."""
    return lambda x: call(x) if isinstance(x, ShardedTensor) else 2 * x


class _Halved(torch.autograd.Function):
    """Doubles, with the gradient of something else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def _with_wrong_gradient(x: Any) -> Any:
    apply: Any = _Halved.apply
    spec = shardwise.chunk(0)
    return shardwise.local_map(apply, in_specs=spec, out_specs=spec)(x)


def test_what_is_right_passes_with_the_bytes_that_were_sent() -> None:
    assert check_op(Sample(lambda x: 2 * x, ((4, 6),)), [ROWS], world_size=2) == 0
    whole = Sample(lambda x: x.sum(), ((4, 6),))
    assert check_op(whole, [ROWS], world_size=2) == 16  # a float64 each way


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: 3 * x, r"output 0, \[0:2, 0:6\] on rank 0: Tensor-likes are not close"),
        (lambda x: (2 * x).float(), "output 0: torch.float32 is not torch.float64"),
        (lambda x: 2 * x[:2], r"output 0: torch.Size\(\[2, 6\]\) is not torch.Size\(\[4, 6\]\)"),
        (lambda x: 2 * x.detach(), "the result does not require grad"),
        (_with_wrong_gradient, r"gradient 0, \[0:2, 0:6\] on rank 0: Tensor-likes are not close"),
    ],
)
def test_what_is_wrong_is_told(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RankFailure) as caught:
        check_op(Sample(on_sharded(call), ((4, 6),)), [ROWS], world_size=2)
    cause = caught.value.__cause__
    assert isinstance(cause, AssertionError)
    with pytest.raises(AssertionError, match=message):
        raise cause


def test_communication_that_is_not_allowed_is_found() -> None:
    columns = shardwise.chunk(1, ranks=[0, 1], device="cpu").layout((4, 6))
    sample = Sample(lambda x, y: x + y, ((4, 6), (4, 6)))
    assert check_op(sample, [ROWS, columns], world_size=2) > 0
    with pytest.raises(RankFailure, match="moves its tensors"):
        check_op(sample, [ROWS, columns], world_size=2, policy="error")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(lambda x: x.argmax(), ((4, 6),)), r"Write: Sample\(\.\.\., has_grad=False\)"),
        (Sample(lambda x, y: x + y, ((4, 6), (4, 6))), "layouts: expected 2, got 1"),
    ],
)
def test_a_sample_that_cannot_be_checked_says_why(sample: Sample, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        check_op(sample, [ROWS], world_size=2)
    assert isinstance(caught.value.__cause__, ArgumentValueError)
