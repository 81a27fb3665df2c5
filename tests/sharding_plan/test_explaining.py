"""The table of a plan: every tensor, and what each rank holds of it now and after."""

from __future__ import annotations

import json

import torch
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharder import Sharder
from shardwise.sharders import MLP
from shardwise.sharding_plan import ShardingPlan


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Mlp() for _ in range(12))
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


PLAN = ShardingPlan({"layers.*": MLP("up", "down"), "embedding.weight": "chunk(0)"})


TABLE = """\
Model, 27 tensors

parameter                        shape   spec       now / rank   after / rank
─────────────────────────────────────────────────────────────────────────────
embedding.weight = head.weight   10x8    chunk(0)        320 B   32 B to 96 B
layers.*.up.weight (x12)         24x8    chunk(0)      9.0 KiB        2.2 KiB
layers.*.down.weight (x12)       8x24    chunk(1)      9.0 KiB        2.2 KiB
head.bias                        10      -                40 B           40 B
steps                            0-d     -                 8 B            8 B

now   73.4 KiB on 4 ranks, 18.4 KiB each
after 18.5 KiB on 4 ranks, the fullest is rank 0 with 4.6 KiB"""


def test_the_table_folds_layers_and_names_the_fullest_rank() -> None:
    assert str(PLAN.explain(Model(), ranks=range(4))) == TABLE


def test_the_same_as_plain_values_for_programs() -> None:
    found = PLAN.explain(Model(), ranks=[3, 5]).to_dict()
    json.dumps(found)
    assert len(found["tensors"]) == 27
    assert found["tensors"][0] == {
        "names": ["embedding.weight", "head.weight"],
        "shape": [10, 8],
        "dtype": "float32",
        "spec": "chunk(0)",
        "bytes_now": {3: 320, 5: 320},
        "bytes_after": {3: 160, 5: 160},
    }
    whole = 320 + 24 * 768 + 40 + 8
    assert found["now"] == {"bytes": {3: whole, 5: whole}, "total": 2 * whole, "fullest_rank": 3}
    assert found["after"]["total"] == 320 + 24 * 768 + 2 * 48


def test_a_model_without_data_holds_nothing_yet() -> None:
    with torch.device("meta"):
        model = Model()
    table = PLAN.explain(model, ranks=range(4))
    assert set(table.bytes_now.values()) == {0}
    assert table.bytes_after == PLAN.explain(Model(), ranks=range(4)).bytes_after


class Custom(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


def test_what_a_sharder_decides_about_counts_as_it_is() -> None:
    table = ShardingPlan({"layers.3": Custom()}).explain(Model(), ranks=[0])
    assert table.bytes_after == table.bytes_now
    assert [row.spec for row in table.rows if row.names[0].startswith("layers.3.")] == [
        "by Custom",
        "by Custom",
    ]
    assert str(table).endswith("as now: what Sharders decide about, layers.3")


def test_a_sharded_model_is_counted_by_its_layout() -> None:
    def explained(rank: int) -> tuple[dict[int, int], dict[int, int], str | None]:
        model = nn.Linear(4, 6, bias=False)
        rows = shardwise.chunk(0, sizes=[5, 1], ranks=[0, 1], device="cpu")
        model.weight = nn.Parameter(shardwise.distribute(model.weight.detach(), rows))
        table = ShardingPlan({"weight": shardwise.on_rank(1, device="cpu")}).explain(model)
        return table.bytes_now, table.bytes_after, table.rows[0].spec

    found = simulate(explained, 2).results
    assert found == [({0: 80, 1: 16}, {0: 0, 1: 96}, "on_rank(1)")] * 2
