"""Hugging Face's tensor-parallel dicts as plans."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sharders.test_sharders import Block, Heads, check, data
from torch import nn

import shardwise
from shardwise.errors import ShardingPlanError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.norm = Heads(4, 2, width=4), nn.LayerNorm(6)
        self.gate_up_proj, self.down_proj = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.norm(x))
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return x + self.down_proj(gate.sigmoid() * up)


def test_a_model_by_a_dict_of_styles() -> None:
    tp_plan = {
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.norm": "sequence_parallel",
        "layers.*.gate_up_proj": "packed_colwise",
        "layers.*.down_proj": "local_rowwise",
        "layers.*": "gather",
        "head": "colwise_rep",
    }
    plan = shardwise.from_tp_plan(tp_plan, prefix="model.")
    inner = Block(
        {"layers": nn.Sequential(Layer(), Layer()), "head": nn.Linear(6, 5)},
        lambda self, x: self.head(self.layers(x)),
    )
    model = Block({"model": inner}, lambda self, x: self.model(x))
    for world_size in (1, 2):
        check(model, plan, world_size, data(2, 3, 6))


def test_styles_of_local_code_are_refused_by_name() -> None:
    wrong = {"experts": "local", "router": "ep_router", "q": "colwise"}
    with pytest.raises(ShardingPlanError, match=r"got 'experts': 'local', 'router': 'ep_router'\."):
        shardwise.from_tp_plan(wrong)
    with pytest.raises(TypeError, match="expected a style by path, got 'q': 3"):
        shardwise.from_tp_plan({"q": 3})  # type: ignore[dict-item]  # wrong on purpose
    with pytest.raises(TypeError, match="tp_plan: expected a dict, got str"):
        shardwise.from_tp_plan("colwise")  # type: ignore[arg-type]  # wrong on purpose
