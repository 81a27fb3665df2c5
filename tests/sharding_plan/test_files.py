"""Plans in files: what is saved comes back, and what cannot be is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.errors import ShardingPlanError
from shardwise.sharder import Sharder
from shardwise.sharders import (
    MLP,
    Attention,
    Columnwise,
    EmbeddingTables,
    Fused,
    Replicated,
    Rowwise,
    SequenceNorm,
)
from shardwise.sharding_plan import ShardingPlan
from shardwise.sharding_spec import ChunkShardingSpec, ShardingSpec, parse_spec
from shardwise.sharding_spec.text import spec_text
from shardwise.testing import strategies

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

SPECS = strategies.shapes().flatmap(
    lambda shape: st.tuples(st.just(shape), strategies.specs(shape, world_size=4))
)
RANKS = st.none() | st.lists(st.integers(0, 3), min_size=1, unique=True)
TEXTS = st.sampled_from(["replicate()", "chunk(1)", "grid([2, 1], ranks=[[0, 1], [2]])"])
OUTPUTS = st.none() | TEXTS
NAMES = st.text("abc.*[]0", min_size=1, max_size=6)
CUT = st.none() | st.lists(st.integers(0, 9), min_size=1)
SHARDERS: st.SearchStrategy[Sharder] = st.one_of(
    st.builds(Columnwise, OUTPUTS, CUT, st.none() | st.integers(-2, 2), RANKS),
    st.builds(Rowwise, OUTPUTS, CUT, st.none() | st.integers(-2, 2), RANKS),
    st.builds(Fused, st.integers(1, 4) | st.lists(st.integers(0, 9), min_size=1), OUTPUTS),
    st.builds(Replicated, OUTPUTS, RANKS),
    st.builds(SequenceNorm, OUTPUTS, RANKS),
    st.builds(MLP, NAMES | st.lists(NAMES, min_size=1), NAMES, st.integers(1, 3), OUTPUTS, RANKS),
    st.builds(Attention, st.none() | st.integers(1, 8), q=NAMES, qkv=st.none() | NAMES),
    st.builds(
        EmbeddingTables,
        st.dictionaries(NAMES, st.sampled_from(["row", "column", "table", 3])),
        OUTPUTS,
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ShardingPlan, list[tuple[int, ...]]]:
    """A plan, and for each of its specs a shape that it fits."""
    drawn = draw(st.dictionaries(NAMES, SPECS, max_size=4))
    entries: dict[str, Any] = {name: spec for name, (_, spec) in drawn.items()}
    sharders = draw(st.dictionaries(NAMES.map(lambda name: f"s{name}"), SHARDERS, max_size=3))
    words = st.sampled_from(["local_rows", "replicated", "chunk(0)"])
    plan = ShardingPlan(
        {**entries, **sharders},
        draw(st.none() | st.dictionaries(NAMES | st.just(""), TEXTS)),
        draw(st.none() | st.lists(NAMES)),
        draw(st.none() | st.dictionaries(NAMES | st.just(""), words)),
    )
    return plan, [shape for shape, _ in drawn.values()]


@given(drawn=plans(), suffix=st.sampled_from([".yaml", ".json"]))
def test_a_plan_comes_back_from_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[ShardingPlan, list[tuple[int, ...]]],
    suffix: str,
) -> None:
    plan, shapes = drawn
    path = tmp_path_factory.mktemp("plans", numbered=True) / f"plan{suffix}"
    plan.save(path)
    again = ShardingPlan.load(path)
    assert again.to_dict() == plan.to_dict()
    assert again.output_plan == plan.output_plan
    assert again.input_plan == plan.input_plan
    assert again.return_local_tensor == plan.return_local_tensor
    assert list(again.plan) == list(plan.plan)
    specs = [one for one in plan.plan.values() if isinstance(one, ShardingSpec)]
    back = [one for one in again.plan.values() if not isinstance(one, Sharder)]
    for shape, spec, other in zip(shapes, specs, back, strict=True):
        found = parse_spec(other) if isinstance(other, str) else other
        assert found == spec
        assert found.layout(shape) == spec.layout(shape)
    sharders = [one for one in plan.plan.values() if isinstance(one, Sharder)]
    assert [one for one in again.plan.values() if isinstance(one, Sharder)] == sharders


@given(SPECS)
def test_text_of_a_spec_leaves_out_what_is_known(drawn: tuple[Any, ShardingSpec]) -> None:
    _, spec = drawn
    text = spec_text(spec)
    if text is None:
        assert type(spec).__name__ in ("EnumerableShardingSpec", "MeshShardingSpec")
        return
    assert parse_spec(text) == spec
    ranks = [2, 0, 1]
    short = spec_text(spec, ranks=ranks, device="cpu")
    assert short is not None
    assert "device" not in short
    assert parse_spec(short, ranks=ranks, device="cpu") == spec


def test_a_file_reads_as_a_person_would_write_it(tmp_path: Path) -> None:
    plan = ShardingPlan(
        {
            "embedding": Rowwise(),
            "layers.*.mlp": MLP(["up"], "down", output="chunk(1)"),
            "head.weight": shardwise.chunk(0, ranks=[0, 1], device="cpu"),
            "head.bias": "chunk(0)",
        },
        input_plan={"": "local_rows"},
    )
    plan.save(tmp_path / "plan.yml")
    assert (
        (tmp_path / "plan.yml").read_text()
        == """\
plan:
  embedding: Rowwise()
  layers.*.mlp: MLP(up=['up'], down='down', output='chunk(1)')
  head.weight: chunk(0, ranks=[0, 1], device='cpu')
  head.bias: chunk(0)
input_plan:
  '': local_rows
"""
    )
    assert ShardingPlan.load(tmp_path / "plan.yml").plan["embedding"] == Rowwise()


class Own(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


class OwnSpec(ChunkShardingSpec):
    pass


class Columns(Columnwise):
    """A user's own, under another name."""


@pytest.mark.parametrize(
    "entry", [Own(), OwnSpec(0, ["rank:0/cpu"]), Columns()], ids=lambda one: type(one).__name__
)
def test_what_only_your_code_knows_cannot_be_saved(entry: Any, tmp_path: Path) -> None:
    name = type(entry).__name__
    with pytest.raises(ShardingPlanError, match=f"'x' of plan cannot be saved.*a {name} of your"):
        ShardingPlan({"x": entry}).save(tmp_path / "plan.yaml")
    assert not (tmp_path / "plan.yaml").exists()


WRONG = [
    ("plan: {a: chunk(0), a: chunk(1)}", r"plan in .*plan.yaml: 'a' stands twice in the file"),
    ("plan: {a: chnuk(0)}", r"'a' of plan of .*plan.yaml: spec: expected one of .*got chnuk"),
    ("plan: {a: 'chunk(0, cuts=2)'}", "unexpected keyword argument 'cuts'"),
    ("plan: {a: Rowise()}", "no Sharder is called 'Rowise'. Nearest: 'Rowwise'"),
    ("plan: {a: Rowwise(rows=2)}", "unexpected keyword argument 'rows'"),
    ("plan: {a: 'Rowwise(output=3)'}", "expected text of a spec"),
    ("plan: {a: from_tp_plan()}", "expected one of .*, got from_tp_plan"),
    ("plan: {a: 3}", r"'a' of plan of .*plan.yaml: spec: expected text, got int"),
    ("plan: {3: chunk(0)}", "expected a dotted name, got 3"),
    ("plan: [a]", r"plan of .*plan.yaml: expected a mapping, got list"),
    ("plan: {a: {ChunkShardingSpec: {dims: 0}}}", "'a' of plan of .*ChunkShardingSpec: got TypeE"),
    ("plan: {a: {ChunkShardingSpec: [0]}}", "ChunkShardingSpec: expected its arguments by name"),
    ("plan: {a: {Popen: {}}}", "expected one of .*ChunkShardingSpec.*, got 'Popen'"),
    ("plan: {}\noutputs: {}", "expected keys plan, .*got 'outputs'"),
    ("output_plan: {}", r"plan.yaml: expected a mapping with `plan`"),
    ("plan: {}\noutput_plan: {a: Rowwise()}", "expected one of .*chunk.*, got Rowwise"),
    ("plan: {}\nreturn_local_tensor: a", "expected a list of names, got str"),
    ("plan: {a: !!python/object/apply:os.getcwd []}", "could not determine a constructor"),
    ("plan: {", r"plan.yaml: expected the node content.*: line 1 column 8$"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_a_wrong_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        ShardingPlan.load(path)


def test_json_refuses_a_key_twice_and_other_suffixes_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"plan": {"a": "chunk(0)", "a": "chunk(1)"}}')
    with pytest.raises(ShardingPlanError, match="'a' stands twice"):
        ShardingPlan.load(path)
    path.write_text("{")
    with pytest.raises(ShardingPlanError, match=r"plan in .*plan\.json"):
        ShardingPlan.load(path)
    with pytest.raises(ShardingPlanError, match=r"expected \.yaml, \.yml or \.json, got '\.toml'"):
        ShardingPlan({}).save(tmp_path / "plan.toml")
    path.write_text(json.dumps(ShardingPlan({"a": "flat()"}).to_dict()))
    assert ShardingPlan.load(path) == ShardingPlan({"a": "flat()"})
