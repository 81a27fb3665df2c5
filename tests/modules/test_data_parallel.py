"""Beside DistributedDataParallel: pairs of ranks share the model, two pairs share the batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import ShardingPlan
from shardwise.sharded_tensor import ShardedTensor
from shardwise.testing.local_run import run_local

BATCH = [[0, 1], [2, 3]]  # the ranks of each half of the batch
MODEL = [[0, 2], [1, 3]]  # those of each half of the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))
        self.up = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.norm(self.up(x * self.scale))))
        return found


def _plan() -> ShardingPlan:
    rows, columns = shardwise.grid([2, 1], ranks=MODEL), shardwise.grid([1, 2], ranks=MODEL)
    halves, batch = shardwise.grid([2], ranks=MODEL), shardwise.grid([2, 1], ranks=BATCH)
    return ShardingPlan(
        {
            "scale": shardwise.replicate(),
            "up.weight": rows,
            "up.bias": halves,
            "norm.[wbr]*": halves,
            "down.weight": columns,
        },
        output_plan={"down": batch},
        input_plan={"": batch},
    )


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return whole.detach()


def _two_by_two(rank: int) -> None:
    torch.manual_seed(0)
    plain = Block().double()
    model = shardwise.shard_module(copy.deepcopy(plain), _plan())
    assert shardwise.ddp_ignore(model) is model
    wrapped = DistributedDataParallel(model)
    reduced = [name for name, p in model.named_parameters() if not isinstance(p, ShardedTensor)]
    assert reduced == ["down.bias"]
    assert wrapped.parameters_to_ignore >= {"scale", "up.weight", "norm.running_mean"}
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, wrapped)]
    for _ in range(3):
        x = torch.randn(6, 8, dtype=torch.float64)
        with shardwise.implicit_comm("error"):
            loss = wrapped(x).square().mean()
            loss.backward()
        expected = plain(x).square().mean()
        expected.backward()
        torch.testing.assert_close(_full(loss), expected.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(_full(parameter.grad), plain.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(_full(tensor), plain.state_dict()[name])


def test_two_pairs_of_pairs_train_as_one_process_does() -> None:
    run_local(_two_by_two, 4)
