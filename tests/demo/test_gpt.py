"""The plans of the demo's model fit it on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from shardwise.demo.gpt import GPT, PLANS, Config, plan_of


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_fits_any_number_of_ranks(name: str) -> None:
    with torch.device("meta"):
        model = GPT(Config())
    for world_size in (1, 2, 3, 4, 5, 10, 13):
        table = plan_of(name, model.config, world_size).explain(model, ranks=range(world_size))
        # So that the model can go from any plan to any other.
        assert all(row.spec is not None for row in table.rows), world_size
