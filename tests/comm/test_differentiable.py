"""Exchanges are kept by what they are, and gradients that are where they belong stay."""

from __future__ import annotations

import torch

import shardwise
from shardwise.comm import communicator, differentiable
from shardwise.comm.differentiable import Exchange, exchange, exchange_of
from shardwise.comm.simulate import simulate
from shardwise.geometry import Layout

CPU = (torch.device("cpu"),)
SHAPE = (4, 6)


def _everywhere() -> Layout:
    return Layout.replicated(SHAPE, (0, 1))


def _rows() -> Layout:
    return shardwise.chunk(0, ranks=[0, 1]).layout(SHAPE)


def _sum() -> Layout:
    boxes = _everywhere().boxes
    return Layout(SHAPE, boxes, [0, 1], terms=[0, 1], pending="sum")


def _kept(rank: int) -> None:
    members = communicator()
    one = exchange_of(_rows(), _everywhere(), CPU, CPU, members)
    assert exchange_of(_rows(), _everywhere(), CPU, CPU, members) is one  # of equal layouts
    assert exchange_of(_everywhere(), _rows(), CPU, CPU, members) is not one
    assert exchange_of(_rows(), _everywhere(), CPU, CPU, members, max_bytes=64) is not one
    assert one.members is members
    assert one.back.source == _everywhere()
    assert one.back.target == _rows()
    for size in range(differentiable._MOST_KEPT):
        layout = Layout.replicated((size + 1,), (0, 1))
        exchange_of(layout, layout, CPU, CPU, members)
    assert len(members.exchanges) <= differentiable._MOST_KEPT


def test_equal_exchanges_of_a_rank_are_one_and_not_too_many_are_kept() -> None:
    simulate(_kept, 2)


def _gradient_of_sum(rank: int) -> None:
    job = Exchange(_sum(), _everywhere(), CPU, CPU, communicator())
    term = torch.full(SHAPE, 1.0 + rank, requires_grad=True)
    (total,) = exchange(job, (term,))
    assert (total == 3.0).all()
    grad = torch.arange(24.0).view(SHAPE)
    (found,) = torch.autograd.grad(total, term, grad, create_graph=True)
    assert torch.equal(found, grad)
    (total,) = exchange(job, (term,))
    (found,) = torch.autograd.grad(total, term, grad)
    assert found.data_ptr() == grad.data_ptr()  # nothing was copied


def test_the_gradient_of_a_sum_that_went_to_all_ranks_stays_where_it_is() -> None:
    traffic = simulate(_gradient_of_sum, 2).traffic
    assert traffic.total_bytes == 2 * 2 * 96  # forward, twice
