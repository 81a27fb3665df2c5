"""Functions of lists that need all ranks: one exchange for a list, and whoever looks sees it."""

from __future__ import annotations

from typing import Any

import torch

import shardwise
from shardwise.comm.simulate import simulate


def gradients() -> list[Any]:
    ranks = [0, 1]
    parameters: list[Any] = [
        shardwise.distribute(torch.ones(4, 3).requires_grad_(), shardwise.chunk(0, ranks=ranks)),
        shardwise.distribute(torch.ones(5).requires_grad_(), shardwise.on_rank(1)),
    ]
    for one in parameters:
        one.grad = one.detach().clone()
    return parameters


def test_a_trace_shows_the_exchange_of_clipped_gradients() -> None:
    def run(_: int) -> list[tuple[str, int]]:
        parameters = gradients()
        with shardwise.trace(show=False) as seen:
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert abs(float(norm) - 17**0.5) < 1e-5
        return [(event.op, event.sent) for event in seen.events]

    # A number for each of the two tensors, to the other rank.
    assert simulate(run, 2).results == [[("torch._foreach_norm", 16)]] * 2


def test_a_trace_shows_the_exchange_of_scaled_gradients() -> None:
    def run(rank: int) -> list[str]:
        grads = [one.grad for one in gradients()]
        if rank == 1:
            grads[1].local_tensor()[0] = torch.inf
        found, scale = torch.zeros(()), torch.full((), 0.5)
        with shardwise.trace(show=False) as seen:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        assert found == 1  # on rank 0 too, which has finite ones only
        assert torch.equal(grads[0].full_tensor(), torch.full((4, 3), 0.5))
        return [event.op for event in seen.events]

    name = "torch._amp_foreach_non_finite_check_and_unscale_"
    assert simulate(run, 2).results == [[name]] * 2
