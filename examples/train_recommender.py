"""Trains a recommender: tables of very different sizes on several ranks, each cut its own way.

    torchrun --nproc-per-node 4 examples/train_recommender.py

Every rank reads its own clicks. The largest table is cut by rows, the next by columns, the small
ones stand whole on one rank each; half-way one of these moves to another rank while training goes
on. On rank 0 the same model is trained on all clicks without sharding, and the losses stand
side by side. Without torchrun it runs on one process, with the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import shardwise
from shardwise import ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = {"article": 5003, "reader": 997, "topic": 61, "hour": 24}
WIDTH, PER_BAG = 16, 3


class Recommender(nn.Module):
    """Bags of ids, a table per kind, to the chance of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows, WIDTH, mode="mean") for name, rows in ROWS.items()}
        )
        self.up = nn.Linear(len(ROWS) * WIDTH, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, *bags: torch.Tensor) -> torch.Tensor:
        found = [table(ids) for table, ids in zip(self.tables.values(), bags, strict=True)]
        chances: torch.Tensor = self.down(F.relu(self.up(torch.cat(found, 1))))
        return chances.squeeze(1)


def plan_of(world_size: int, *, hour_on: int) -> ShardingPlan:
    """Row-, column- and table-wise, and which rank has the table of hours.

    Each rank's rows of a batch look up in all tables, and get their own results back; what follows
    is small and on every rank.
    """
    return ShardingPlan(
        {
            "tables.article.weight": "chunk(0)",
            "tables.reader.weight": "chunk(1)",
            "tables.topic.weight": f"on_rank({1 % world_size})",
            "tables.hour.weight": f"on_rank({hour_on % world_size})",
            "up.*": "replicate()",
            "down.*": "replicate()",
        },
        input_plan={"": "local_rows"},
    )


def clicks(step: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The clicks of a step: ids for each table, and whether there was one."""
    generator = torch.Generator().manual_seed(step % 8)
    bags = [torch.randint(rows, (size, PER_BAG), generator=generator) for rows in ROWS.values()]
    taste = sum((bag.float() * (k + 1) % 7).sum(1) for k, bag in enumerate(bags))
    assert isinstance(taste, torch.Tensor)
    return bags, (taste > taste.median()).float()


def own_part(step: int, rank: int, world_size: int) -> slice:
    """The rows of a batch that a rank reads: as many as it happens to have."""
    shares = [1 + (step + other) % 3 for other in range(world_size)]
    ends = [96 * sum(shares[: k + 1]) // sum(shares) for k in range(world_size)]
    return slice(([0, *ends])[rank], ends[rank])


def loss_of(model: nn.Module, bags: Sequence[torch.Tensor], clicked: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(*bags), clicked)


def train(steps: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False, width=100)
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Recommender()
    beside = copy.deepcopy(model) if rank == 0 else None
    plan = plan_of(world_size, hour_on=2)
    console.print(f"\n[bold]{len(ROWS)} tables on {world_size} ranks[/]")
    console.print(plan.explain(model))
    shardwise.shard_module(model, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, foreach=True)
    other = None if beside is None else torch.optim.Adam(beside.parameters(), lr=0.02, foreach=True)

    console.print("\n  step      loss  one process")
    for step in range(steps):
        if step == steps // 2:
            moved = plan_of(world_size, hour_on=3)
            shardwise.reshard_module(model, moved, optimizer)
            before, after = 2 % world_size, 3 % world_size
            console.print(f"  the table of hours has moved from rank {before} to rank {after}")
        bags, clicked = clicks(step, 96)
        mine = own_part(step, rank, world_size)
        # The targets are cut like the rows that the ranks read; the loss is that of all clicks.
        targets = shardwise.as_local_rows(clicked[mine])
        loss = loss_of(model, [bag[mine] for bag in bags], targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        text = f"{step:6}  {loss.item():8.6f}"
        if beside is not None and other is not None:
            expected = loss_of(beside, bags, clicked)
            expected.backward()
            other.step()
            other.zero_grad()
            text += f"  {expected.item():11.6f}"
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            console.print(text)
    console.print()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80, help="steps of training (80)")
    steps = parser.parse_args(argv).steps
    if "RANK" in os.environ:  # torchrun has started us
        dist.init_process_group("gloo")
    else:
        shardwise.init_single()
    torch.set_num_threads(1)
    try:
        with shardwise.implicit_comm("error"):
            train(steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
