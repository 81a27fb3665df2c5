"""The strategies make what they promise; a property test is worth what its cases are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from shardwise.errors import SpecError
from shardwise.geometry import Box, Layout, check_tiling
from shardwise.sharding_spec import ChunkShardingSpec, MeshShardingSpec
from shardwise.testing.strategies import SPEC_KINDS, layouts, mesh_specs, shapes, specs, tilings

if TYPE_CHECKING:
    from collections.abc import Callable

# Any example will do: looking for the simplest one takes most of the time.
MANY = settings(max_examples=3000, database=None, phases=[Phase.generate])

FEATURES: dict[str, Callable[[Layout], bool]] = {
    "0-d": lambda lay: lay.ndim == 0,
    "4-d": lambda lay: lay.ndim == 4,
    "no elements": lambda lay: 0 in lay.shape,
    "uneven": lambda lay: len({box.volume for box, _, _ in lay if not box.is_empty}) > 1,
    "an empty box": lambda lay: 0 not in lay.shape and any(box.is_empty for box, _, _ in lay),
    "several on a rank": lambda lay: any(
        sum(not box.is_empty for box in lay.boxes_of(rank)) > 1 for rank in lay.ranks
    ),
    "ranks with none": lambda lay: len(lay.ranks) < 4,
    "ranks out of order": lambda lay: [e.rank for e in lay] != sorted(e.rank for e in lay),
    "replicas": lambda lay: any(len(lay.replicas_of(box)) > 1 for box, _, _ in lay),
    "no grid": lambda lay: 0 not in lay.shape and lay.grid is None,
    "pending sum": lambda lay: lay.pending == "sum",
    "pending, with replicas": lambda lay: (
        lay.pending is not None
        and any(len(lay.replicas_of(box, term=term)) > 1 for box, _, term in lay)
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_layouts_have_every_awkward_feature(name: str) -> None:
    assert FEATURES[name](find(layouts(), FEATURES[name], settings=MANY))


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape, max_boxes=6))))
def test_tilings_tile_with_no_more_boxes_than_asked(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, parts = case
    assert check_tiling(parts, shape).ok
    assert 1 <= len(parts) <= 6


def test_meshes_mix_pending_sums_and_replicas() -> None:
    mixed = FEATURES["pending, with replicas"]
    found = find(mesh_specs((3, 4)), lambda spec: mixed(spec.layout((3, 4))), settings=MANY)
    assert isinstance(found, MeshShardingSpec)


@pytest.mark.parametrize("kind", SPEC_KINDS)
def test_every_kind_of_spec_is_made(kind: type[ChunkShardingSpec]) -> None:
    assert isinstance(find(specs((4, 3)), lambda spec: isinstance(spec, kind), settings=MANY), kind)


def test_a_0d_tensor_has_no_chunks() -> None:
    with pytest.raises(SpecError, match="a kind of spec for a 0-d tensor"):
        specs((), kinds=[ChunkShardingSpec])
