"""Attention and convolution: dropout, what autocast makes of a phantom, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds

SHAPES = ((2, 4, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
# The last query may see no key.
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": MASK}, {"scale": 0.3}])
@pytest.mark.parametrize("kind", ["replicated", "dim 1 uneven, permuted, one empty"])
def test_dropout_is_of_the_weights(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dropout that doubles, the result is doubled."""
    monkeypatch.setattr(F, "dropout", lambda x, p: x * (1 / p))

    def call(q: Any, k: Any, v: Any) -> Any:
        is_plain = type(q) is torch.Tensor
        found = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.0 if is_plain else 0.5, enable_gqa=True, **options
        )
        return found * 2 if is_plain else found

    check_op(Sample(call, SHAPES), [layout_kinds(shape)[kind] for shape in SHAPES])


def test_ranks_without_a_piece_know_what_autocast_gives() -> None:
    def on_rank(rank: int) -> None:
        x: Any = shardwise.distribute(torch.ones(2, 3, 5, 5), shardwise.on_rank(1))
        w: Any = shardwise.distribute(torch.ones(4, 3, 3, 3), shardwise.on_rank(1))
        with torch.autocast("cpu", torch.bfloat16):
            found: Any = F.conv2d(x, w)
        assert found.dtype == torch.bfloat16
        assert found.full_tensor().shape == (2, 4, 3, 3)

    simulate(on_rank, 2)


def _masked(**options: Any) -> Any:
    return lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, **options)


@pytest.mark.parametrize("text", ["replicate()", "on_rank(1)", "chunk(0)"])
@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (_masked(), ((1, 4, 3, 2), (1, 4, 3, 2), (1, 4, 3, 2), (2, 4, 3, 3))),
        (_masked(dropout_p=0.5), ((4, 3, 2), (4, 3, 2), (4, 3, 2), (2, 4, 3, 3))),
        (_masked(), ((4, 3, 2), (4, 3, 2), (4, 3, 2), (1, 1, 3, 3))),
        (_masked(dropout_p=0.5, is_causal=True), ((2, 3, 2), (2, 3, 2), (2, 3, 2), (3, 3))),
        (_masked(dropout_p=1.5), ((2, 3, 2), (2, 3, 2), (2, 3, 2), (3, 3))),
        (F.conv1d, ((2, 4, 5), (6, 4, 3), (5,))),
        (F.conv1d, ((2, 4, 5), (6, 4, 3), (1,))),
        (F.conv1d, ((2, 4, 5), (6, 4, 3), (6, 1))),
        (F.conv1d, ((2, 4, 5), (6, 4))),
        (F.conv_transpose1d, ((2, 4, 5), (6, 4, 3))),
        (F.conv_transpose1d, ((2, 1, 5), (6, 4, 3))),
    ],
)
def test_all_ranks_refuse_what_torch_refuses(
    call: Any, shapes: tuple[tuple[int, ...], ...], text: str
) -> None:
    with pytest.raises(RuntimeError):
        call(*map(torch.zeros, shapes))

    spec = parse_spec(text, ranks=[0, 1], device="cpu")

    def on_rank(rank: int) -> None:
        given = [shardwise.distribute(torch.zeros(shape), spec) for shape in shapes]
        with pytest.raises(RuntimeError):
            call(*given)

    simulate(on_rank, 2)
