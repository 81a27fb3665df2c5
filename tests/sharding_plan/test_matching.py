"""Plans meet models: patterns, ties, and every way in which they do not fit. No processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import PlanNameError, ShardingPlanError
from shardwise.sharder import Sharder
from shardwise.sharding_plan import PlanSharder, ShardingPlan
from shardwise.sharding_plan.matching import Matched, match

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = shardwise.chunk(0, ranks=[0, 1], device="cpu")
COLUMNS = shardwise.chunk(1, ranks=[0, 1], device="cpu")


class Model(nn.Module):
    """Two layers of an MLP, a head that is tied to the embedding, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4, bias=False)})
            for _ in range(2)
        )
        self.fc1, self.fc10 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4, 4))


class Custom(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


@dataclass(frozen=True)
class Rows(PlanSharder):
    """All that the submodule has, by rows."""

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        return ShardingPlan({"*": f"chunk(0, ranks={list(ranks)})"}, {"": "replicate()"})


def matched(plan: Any = None, model: nn.Module | None = None, **fields: Any) -> Matched:
    return match(ShardingPlan(plan or {}, **fields), model or Model(), [0, 1], "cpu")


def cuts(found: Matched) -> dict[str, Any]:
    return {" ".join(one.names): one.spec for one in found.tensors}


def test_a_star_crosses_dots_and_one_pattern_is_for_many_tensors() -> None:
    assert list(cuts(matched({"layers.*.weight": ROWS}))) == [
        f"layers.{n}.{part}.weight" for n in range(2) for part in ("up", "down")
    ]
    assert cuts(matched({"layers.[1-9].up.*": "chunk(0)", "mask": COLUMNS})) == {
        "layers.1.up.weight": ROWS,
        "layers.1.up.bias": ROWS,
        "mask": COLUMNS,
    }


def test_a_tied_tensor_is_one_target_with_all_its_names() -> None:
    for keys in (["head.weight"], ["embedding.weight", "head.weight"], ["[eh]*.weight"]):
        assert cuts(matched(dict.fromkeys(keys, "chunk(0)"))) == {
            "embedding.weight head.weight": ROWS
        }
    message = (
        "'embedding.weight' = 'head.weight', one tied tensor, is claimed by 2 entries: expected "
        "one, got 'embedding.weight' of plan, 'head.weight' of plan"
    )
    with pytest.raises(ShardingPlanError, match=message):
        matched({"embedding.weight": ROWS, "head.weight": COLUMNS})


def test_two_entries_for_one_tensor_are_refused_even_if_they_agree() -> None:
    with pytest.raises(ShardingPlanError, match=r"'fc1.bias' is claimed by 2 entries.*'fc1\.\*'"):
        matched({"fc1.*": ROWS, "fc1.bias": ROWS})


def test_paths_of_submodules_mean_the_outermost_and_the_root_is_the_empty_name() -> None:
    found = matched(
        output_plan={"layers.*": "replicate()", "": ROWS},
        return_local_tensor=["fc1?", "layers.*.up"],
        input_plan={"": "local_rows", "fc1": "chunk(1)", "*.up": "replicated"},
    )
    everywhere = shardwise.replicate(ranks=[0, 1], device="cpu")
    assert found.outputs == (("layers.0", everywhere), ("layers.1", everywhere), ("", ROWS))
    assert found.locals == ("fc10", "layers.0.up", "layers.1.up")
    assert dict(found.inputs) == {
        "": "local_rows",
        "fc1": COLUMNS,
        "layers.0.up": "replicated",
        "layers.1.up": "replicated",
    }


def test_a_module_with_two_paths_gets_its_hooks_once() -> None:
    model = Model()
    model.fc10 = model.fc1
    found = matched({"fc1*": Rows()}, model, return_local_tensor=["fc1*"])
    assert [one.names for one in found.tensors] == [
        ("fc1.weight", "fc10.weight"),
        ("fc1.bias", "fc10.bias"),
    ]
    assert [path for path, _ in found.outputs] == ["fc1"]
    assert found.locals == ("fc1",)
    with pytest.raises(ShardingPlanError, match="'fc10', a module with several paths, is claimed"):
        matched(model=model, output_plan={"fc1": ROWS, "fc10": COLUMNS})


def test_a_sharder_with_a_plan_becomes_entries_and_another_stays() -> None:
    custom = Custom()
    found = matched({"layers.*.up": Rows(), "fc1": custom, "fc10.weight": ROWS})
    assert list(cuts(found)) == [
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.1.up.weight",
        "layers.1.up.bias",
        "fc10.weight",
    ]
    assert set(cuts(found).values()) == {ROWS}
    assert [path for path, _ in found.outputs] == ["layers.0.up", "layers.1.up"]
    assert found.sharders == (("fc1", custom),)


def test_a_sharded_parameter_matches_by_its_global_shape() -> None:
    def reshape(rank: int) -> tuple[int, ...]:
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(shardwise.distribute(model.weight.detach(), ROWS))
        (planned,) = matched({"weight": COLUMNS}, model).tensors
        assert planned.tensor is model.weight
        return planned.spec.layout(planned.tensor.shape).shape

    assert simulate(reshape, 2).results == [(6, 4)] * 2


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (AttributeError, "'fc1.wieght' of plan: the model has no attribute.*Nearest: 'fc1.weight'",
     {"plan": {"fc1.wieght": ROWS}}),
    (AttributeError, r"Nearest: 'layers\.\*\.up\.weight'", {"plan": {"layer.*.up.weight": ROWS}}),
    (AttributeError, "It is a submodule: take a Sharder, or name its tensors: 'fc1.weight', 'fc1",
     {"plan": {"fc1": ROWS}}),
    (AttributeError, "'fc1.weight' is a tensor: give it a spec", {"plan": {"fc1.weight": Rows()}}),
    (AttributeError, r"'layers\.x' of output_plan: the model has no attribute \(submodule\)",
     {"output_plan": {"layers.x": ROWS}}),
    (AttributeError, "of return_local_tensor.*Nearest: 'fc1', 'fc10'",
     {"return_local_tensor": ["fc11"]}),
    (ValueError, r"'fc1.bias' of shape \(4,\), by 'fc1.bias' of plan: .*Invalid sharding dim",
     {"plan": {"fc1.bias": COLUMNS}}),
    (ValueError, r"'mask' of shape \(4, 4\).*Global rank 5 does not exist.* of \[0, 1\], got \[5\]",
     {"plan": {"mask": "on_rank(5)"}}),
    (ValueError, "'mask' of plan: spec: expected one of .*chunk.*, got chnuk",
     {"plan": {"mask": "chnuk(0)"}}),
    (TypeError, "Only `ShardingSpec` and `Sharder` are supported to shard 'mask' of plan.*got int",
     {"plan": {"mask": 1}}),
    (TypeError, "Only `ShardingSpec` is supported as output_plan 'fc1' of output_plan: .*got Rows",
     {"output_plan": {"fc1": Rows()}}),
    (TypeError, "'fc1' of input_plan: expected .local_rows., .replicated. or a spec, got int",
     {"input_plan": {"fc1": 3}}),
    (ValueError, "'fc1' of input_plan: expected .local_rows.* got 'colums'",
     {"input_plan": {"fc1": "colums"}}),
    (TypeError, "key of plan: expected a dotted name, got 3", {"plan": {3: ROWS}}),
    (TypeError, r"ShardingPlan\.plan: expected a dict", {"plan": ["fc1"]}),
    (TypeError, "return_local_tensor: expected a list of names, got str",
     {"return_local_tensor": "fc1"}),
    (KeyError, "path must not be empty for custom sharder!", {"plan": {"": Custom()}}),
    (RuntimeError, "'fc1.weight' of plan should not conflict with the submodule tree",
     {"plan": {"fc1": Custom(), "fc1.weight": ROWS}}),
    (RuntimeError, "should not conflict with the submodule tree.*inside 'embedding'",
     {"plan": {"embedding": Custom(), "head.weight": ROWS}}),
    (RuntimeError, r"'layers\.0\.up' of plan should not conflict",
     {"plan": {"layers.0": Custom(), "layers.0.up": Custom()}}),
    (ValueError, "of the Rows at 'fc1'.*Invalid sharding dim.*0-d", {"plan": {"fc1": Rows()}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "fields"), WRONG, ids=[row[1] for row in WRONG])
def test_a_plan_that_does_not_fit_says_so(
    kind: type[Exception], message: str, fields: dict[str, Any]
) -> None:
    model = Model()
    if "0-d" in message:
        model.fc1.register_buffer("scale", torch.ones(()))
    with pytest.raises(kind, match=message) as caught:
        matched(model=model, **fields)
    assert isinstance(caught.value, ShardingPlanError)


def test_all_problems_are_in_one_error_of_the_type_of_the_first() -> None:
    plan = {
        "fc1": Custom(),
        "fc2.weight": ROWS,
        "fc10.bias": COLUMNS,
        "mask": None,
        "fc1.bias": ROWS,
    }
    with pytest.raises(
        PlanNameError, match="the plan does not fit the Model, 5 problems"
    ) as caught:
        matched(plan, output_plan={"nowhere": ROWS})
    for words in ("1. 'fc2.weight'", "2. 'fc10.bias'", "3. Only", "4. 'nowhere'", "5. 'fc1.bias'"):
        assert f"  {words}" in str(caught.value)


def test_parts_of_what_a_sharder_makes_are_taken_as_they_are() -> None:
    found = matched({"fc1": Custom()}, output_plan={"fc1.inner": ROWS})
    assert found.outputs == (("fc1.inner", ROWS),)
