"""Specs as plain values, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

from shardwise.errors import ShardwiseError, SpecError
from shardwise.sharding_spec import ChunkShardingSpec, FixedShardingSpec
from shardwise.sharding_spec.plain import plain_spec, spec_from_plain
from shardwise.testing import strategies

if TYPE_CHECKING:
    from shardwise.geometry import Layout
    from shardwise.sharding_spec import ShardingSpec


@given(strategies.shapes().flatmap(lambda shape: strategies.specs(shape, world_size=4)))
def test_every_built_in_spec_comes_back_from_json(spec: ShardingSpec) -> None:
    plain = plain_spec(spec)
    assert plain is not None
    assert spec_from_plain(*json.loads(json.dumps(plain))) == spec


@given(strategies.layouts(world_size=4))
def test_a_spec_of_a_layout_comes_back_from_json(layout: Layout) -> None:
    fixed = FixedShardingSpec(layout, "meta")
    plain = plain_spec(fixed)
    assert plain is not None
    assert spec_from_plain(*json.loads(json.dumps(plain))) == fixed


class _Own(ChunkShardingSpec):
    """A user's subclass, whose name alone would not bring it back."""


def test_a_users_spec_is_not_plain_and_unknown_names_are_refused() -> None:
    assert plain_spec(_Own(0, ["rank:0/cpu"])) is None
    with pytest.raises(SpecError, match=r"expected one of .*ChunkShardingSpec.*, got 'os\.system'"):
        spec_from_plain("os.system", {})
    with pytest.raises(SpecError, match="saved placement of a mesh axis: got 'eval'"):
        spec_from_plain("MeshShardingSpec", {"mesh": [0], "placements": [["eval"]]})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ChunkShardingSpec", 0, "saved ChunkShardingSpec: expected its arguments by name, got 0"),
        ("ChunkShardingSpec", {"dims": 0}, "saved ChunkShardingSpec: got TypeError: .*'dims'"),
        ("FixedShardingSpec", {}, "arguments of a saved FixedShardingSpec: got KeyError: 'layout'"),
        ("FixedShardingSpec", {"layout": {"shape": [4]}}, "layout: expected the keys 'boxes'"),
        ("MeshShardingSpec", {"mesh": [0], "placements": [[]]}, "a saved MeshShardingSpec: got"),
        ("EnumerableShardingSpec", {"shards": [[[0]]]}, "a saved EnumerableShardingSpec: got"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ShardwiseError, match=message):
        spec_from_plain(name, arguments)
