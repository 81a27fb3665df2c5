"""Pieces of a weight that follow each other in memory are multiplied at once, and no others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.comm.load import new_tensors
from shardwise.comm.simulate import simulate
from shardwise.ops.stacking import side_by_side
from shardwise.sharding_spec import parse_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
RANKS = (0, 1)
WIDTH = 16  # of float64: rows of 128 bytes, so that all pieces start where tensors start
FUSED = "fused(0, [4, 4, 2])"


def test_new_pieces_of_a_tensor_are_one_tensor_without_a_copy() -> None:
    pieces = new_tensors([(2, 8), (3, 8)], torch.float64, CPU)
    for number, piece in enumerate(pieces):
        piece.fill_(number).requires_grad_()
    whole = side_by_side(pieces)
    assert whole is not None
    assert whole.data_ptr() == pieces[0].data_ptr()
    assert whole[:, 0].tolist() == [0, 0, 1, 1, 1]
    (whole * torch.arange(5.0).unsqueeze(1)).sum().backward()
    assert [piece.grad[:, 0].tolist() for piece in pieces if piece.grad is not None] == [
        [0, 1],
        [2, 3, 4],
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        list(torch.zeros(4, 8).chunk(2)[::-1]),
        list(torch.zeros(4, 8).chunk(2, 1)),
        list(torch.zeros(6, 8).chunk(3)[::2]),
        [torch.zeros(2, 8), torch.zeros(2, 8)],
        [torch.zeros(0, 8), torch.zeros(0, 8)],
    ],
)
def test_pieces_that_lie_apart_are_not(pieces: Sequence[torch.Tensor]) -> None:
    assert side_by_side(pieces) is None


def test_pieces_that_would_start_anywhere_have_memory_of_their_own() -> None:
    first, second = new_tensors([(3, 3), (3, 3)], torch.float32, CPU)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_what_is_written_into_one_piece_is_noticed_by_products_with_all() -> None:
    pieces = new_tensors([(2, 8), (2, 8)], torch.float64, CPU)
    x = torch.ones(3, 8, dtype=torch.float64, requires_grad=True)
    whole = side_by_side([piece.fill_(1.0) for piece in pieces])
    assert whole is not None
    out = F.linear(x, whole)
    pieces[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- on ranks --------------------------------------------------------------------------------------


def distributed(full: torch.Tensor, spec: str) -> Any:
    made = shardwise.distribute(full, parse_spec(spec, ranks=RANKS, device="cpu"))
    return made.requires_grad_()


def check(monkeypatch: pytest.MonkeyPatch, spec: str, x_spec: str, bias: str | None) -> int:
    """Compares values, gradients and second derivatives; how many products were of all pieces."""
    x, w, b = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, WIDTH), (10, WIDTH), (10,))
    )
    num_stacked = 0

    def counted(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
        nonlocal num_stacked
        found = side_by_side(pieces)
        num_stacked += found is not None
        return found

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor

    def results(*given: Any) -> list[torch.Tensor]:
        out = F.linear(*given)
        out.mul_(2)  # each piece, in place
        loss = (whole(out) ** 3).sum()
        grads = torch.autograd.grad(loss, given, create_graph=True)
        again = torch.autograd.grad((whole(grads[1]) ** 2).sum(), given[:2])
        return [whole(one).detach() for one in (out, *grads, *again)]

    full = [x, w] if bias is None else [x, w, b]
    expected = results(*full)
    monkeypatch.setattr("shardwise.ops.stacking.side_by_side", counted)

    def on_rank(rank: int) -> None:
        specs = [x_spec, spec, bias or ""]
        given = [distributed(one.detach(), s) for one, s in zip(full, specs, strict=False)]
        with shardwise.implicit_comm("allow"):
            torch.testing.assert_close(results(*given), expected)

    simulate(on_rank, len(RANKS))
    return num_stacked


@pytest.mark.parametrize("bias", [FUSED, "replicate()", "on_rank(1)", None])
def test_fused_sections_are_one_product_on_each_rank(
    monkeypatch: pytest.MonkeyPatch, bias: str | None
) -> None:
    assert check(monkeypatch, FUSED, "replicate()", bias) == len(RANKS)


def test_a_rank_with_an_empty_piece_multiplies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = "fused(0, [4, [3, 1], [0, 2]])"  # where the first rank has nothing of the last
    assert check(monkeypatch, uneven, "replicate()", uneven) == 1


@pytest.mark.parametrize(
    ("spec", "x_spec"),
    [
        ("fused(1, [8, 8])", "replicate()"),  # pieces are summed
        ("chunk(0)", "replicate()"),  # one piece
        ("grid([2, 1], ranks=[[0, 1], [0, 1]])", "replicate()"),  # both ranks compute the same
        (FUSED, "grid([2, 1], ranks=[[0, 1], [0, 1]])"),  # two pieces of the input
    ],
)
def test_other_pieces_are_multiplied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, spec: str, x_spec: str
) -> None:
    assert check(monkeypatch, spec, x_spec, None) == 0
