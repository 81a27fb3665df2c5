"""What a plain tensor means beside sharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ArgumentValueError, OpError
from shardwise.sharded_tensor import ShardedTensor

WEIGHT = torch.arange(15.0).view(3, 5) / 4


def _own_rows(rank: int) -> None:
    """Row counts 1, 2 and 3: the result is the batch of all ranks, as is every gradient."""
    full = torch.arange(30.0).view(6, 5).sin()
    mine = [full[:1], full[1:3], full[3:]][rank].clone().requires_grad_()
    plain, weight = full.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    for spec in (shardwise.replicate(), shardwise.chunk(0), shardwise.chunk(1)):
        mine.grad = plain.grad = weight.grad = None
        w: Any = shardwise.distribute(WEIGHT, spec).requires_grad_()
        with shardwise.implicit_comm("allow"):
            y: Any = F.linear(mine, w)
            assert isinstance(y, ShardedTensor)
            expected = F.linear(plain, weight)
            torch.testing.assert_close(y.full_tensor(), expected)
            y.square().sum().backward()
            expected.square().sum().backward()
            parts: Any = plain.grad
            torch.testing.assert_close(mine.grad, [parts[:1], parts[1:3], parts[3:]][rank])
            torch.testing.assert_close(w.grad.full_tensor(), weight.grad)
            transposed = shardwise.as_replicated(WEIGHT.t())
            for product in (torch.matmul, torch.mm):
                found: Any = product(mine, transposed)
                torch.testing.assert_close(found.full_tensor(), expected)
            bias = torch.zeros(3)
            by_name: list[Any] = [
                F.linear(input=mine, weight=w),
                torch.matmul(input=mine, other=transposed),
                torch.addmm(bias, mat1=mine, mat2=transposed),
            ]
            for named in by_name:
                torch.testing.assert_close(named.full_tensor(), expected)
            row: Any = F.linear(mine[0], w)  # one row per rank
            torch.testing.assert_close(row.full_tensor(), expected[[0, 1, 3]])


def test_the_first_matrix_of_a_product_is_this_ranks_rows() -> None:
    shardwise.run_local(_own_rows, 3)


def _meanings(rank: int) -> None:
    w: Any = shardwise.distribute(WEIGHT, shardwise.chunk(0)).requires_grad_()
    x = torch.ones(2, 5, requires_grad=True)
    bias = torch.arange(3.0, requires_grad=True)
    with shardwise.plain_inputs("replicated"):
        y: Any = F.linear(x, w, bias)
        assert y.shape == (2, 3)
        y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, WEIGHT.sum(0).expand(2, 5))  # the whole, on every rank
    torch.testing.assert_close(bias.grad, torch.full((3,), 2.0))
    with shardwise.plain_inputs("error"):
        assert (w * torch.tensor(2.0)).shape == (3, 5)  # a number
        for call in (lambda: F.linear(x, w), lambda: w + torch.ones(5)):
            with pytest.raises(OpError, match=r"\[rank .\].*plain.*as_local_rows.*as_replicated"):
                call()
    with pytest.raises(ArgumentValueError, match=r"plain_inputs.*rows, replicated, error"):
        shardwise.plain_inputs("colums")  # type: ignore[arg-type]  # wrong on purpose


def test_the_meaning_can_be_set() -> None:
    shardwise.run_local(_meanings, 2)


def _ambiguous(rank: int) -> None:
    w: Any = shardwise.as_replicated(WEIGHT)
    batch: Any = F.linear(torch.ones(2, 5), w)
    assert batch.shape == (4, 3)
    assert (batch + torch.ones(3)).shape == (4, 3)  # fewer dims: the same for all rows
    hidden = F.gelu(batch)
    with pytest.raises(
        OpError, match=r"add of a batch of rows.*one row for all or this rank's.*as_"
    ):
        torch.add(hidden, torch.ones(1, 3))
    with pytest.raises(OpError, match=r"shapes do not fit.*\(4, 3\) and \(2, 3\).*as_local_rows"):
        hidden * torch.ones(2, 3)
    assert (hidden + shardwise.as_local_rows(torch.ones(2, 3))).shape == (4, 3)
    assert (hidden + shardwise.as_replicated(torch.ones(1, 3))).shape == (4, 3)
    with shardwise.plain_inputs("replicated"):
        assert (hidden + torch.ones(1, 3)).shape == (4, 3)


def test_what_may_be_a_row_of_this_rank_has_to_be_named() -> None:
    shardwise.run_local(_ambiguous, 2)


def _hinge(rank: int) -> tuple[bool, float | None]:
    """Whether the target has a gradient, and this rank's part of that of the input."""
    x: Any = shardwise.distribute(torch.tensor(0.7), shardwise.on_rank(1)).requires_grad_()
    target = torch.tensor(1.0, requires_grad=True)
    with shardwise.plain_inputs("replicated"), shardwise.implicit_comm("allow"):
        F.hinge_embedding_loss(x, target).backward()
    shards = x.grad.local_shards()
    return target.grad is not None, shards[0].tensor.item() if shards else None


def test_a_target_without_gradient_keeps_no_rank_waiting() -> None:
    """Ranks that hold nothing of the input have it in no graph either."""
    assert simulate(_hinge, 2).results == [(False, None), (False, 1.0)]
