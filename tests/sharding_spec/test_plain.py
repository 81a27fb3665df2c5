"""Specs and layouts as plain values, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from shardwise.errors import SpecError
from shardwise.sharding_spec import ChunkShardingSpec, FixedShardingSpec
from shardwise.sharding_spec.plain import (
    layout_from_plain,
    plain_layout,
    plain_spec,
    spec_from_plain,
)
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
def test_every_layout_comes_back_from_json(layout: Layout) -> None:
    assert layout_from_plain(json.loads(json.dumps(plain_layout(layout)))) == layout
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
