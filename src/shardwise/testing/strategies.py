"""Hypothesis strategies: shapes, boxes, tilings, layouts and specs of every kind.

They are made to be awkward: uneven cuts, empty shards, several shards on a rank and ranks with
none, permuted ranks, subgroups, replicas, addends, 0-d tensors.

    @given(layouts(world_size=4))
    def test_my_code(layout: Layout) -> None: ...
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwise._torch_compat import mesh_placement_types
from shardwise.errors import SpecError
from shardwise.geometry import REDUCE_OPS, Box, Entry, Layout, ReduceOp
from shardwise.metadata import ShardMetadata
from shardwise.sharding_spec import (
    BlockCyclicShardingSpec,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    FlatShardingSpec,
    FusedShardingSpec,
    GridShardingSpec,
    MeshShardingSpec,
    PartialShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "SPEC_KINDS",
    "boxes",
    "examples",
    "layouts",
    "mesh_specs",
    "shapes",
    "specs",
    "split_sizes",
    "tilings",
]

Shape = tuple[int, ...]
Example = TypeVar("Example")


def examples(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """Values of a strategy, the same at every call: for tests that start ranks once for all.

    A property that starts ranks for every case would take too long.
    """
    found: list[Example] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(value: Example) -> None:
        found.append(value)

    collect()
    return found


def shapes(*, min_ndim: int = 0, max_ndim: int = 4, max_size: int = 7) -> st.SearchStrategy[Shape]:
    """Shapes of tensors, every number of dims alike; sizes of 0 and 1 included, 0 seldom."""
    sizes = st.integers(1, max_size) | st.integers(1, max_size) | st.integers(0, max_size)
    ndims = st.integers(min_ndim, max_ndim)
    return ndims.flatmap(lambda ndim: st.tuples(*[sizes] * ndim))


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """Boxes inside `shape`, empty ones included."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box.of(ends)


@st.composite
def tilings(draw: st.DrawFn, shape: Shape, *, max_boxes: int = 8) -> list[Box]:
    """At most `max_boxes` boxes that cover `shape`, in any order; some empty, some interlocked."""
    parts = [Box.whole(shape)]
    count = draw(st.integers(1, max_boxes)) if shape else 1
    while len(parts) < count:
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if len(parts) + 5 <= max_boxes and draw(st.booleans()) and (wheel := _pinwheel(box)):
            parts += wheel
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        parts.append(Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])))
        parts.append(Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop))
    return draw(st.permutations(parts))


def _pinwheel(box: Box) -> list[Box] | None:
    """Five boxes around a middle one, which no straight cut separates; None if too small."""
    wide = [dim for dim, size in enumerate(box.shape) if size >= 3]
    if len(wide) < 2:
        return None
    (a, b), low, high = wide[:2], box.start, box.stop
    corners = [
        ((low[a], low[b]), (low[a] + 1, high[b] - 1)),
        ((low[a], high[b] - 1), (high[a] - 1, high[b])),
        ((high[a] - 1, low[b] + 1), (high[a], high[b])),
        ((low[a] + 1, low[b]), (high[a], low[b] + 1)),
        ((low[a] + 1, low[b] + 1), (high[a] - 1, high[b] - 1)),
    ]
    arms = []
    for first, last in corners:
        start, stop = list(low), list(high)
        (start[a], start[b]), (stop[a], stop[b]) = first, last
        arms.append(Box(tuple(start), tuple(stop)))
    return arms


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    shape: Shape | None = None,
    world_size: int = 4,
    max_boxes: int = 8,
    replicas: bool = True,
    addends: bool = True,
) -> Layout:
    """Layouts on ranks below `world_size`; some ranks may hold nothing."""
    sizes = draw(shapes()) if shape is None else shape
    parts = draw(tilings(sizes, max_boxes=max_boxes))
    ranks = st.integers(0, world_size - 1)
    holders = st.lists(ranks, min_size=1, max_size=3 if replicas else 1, unique=True)
    num_terms = st.integers(1, 3) if addends and draw(st.booleans()) else st.just(1)
    entries = [
        Entry(box, rank, term)
        for box in parts
        for term in range(draw(num_terms))
        for rank in draw(holders)
    ]
    pending: ReduceOp | None = draw(st.sampled_from(REDUCE_OPS))
    return Layout.of(sizes, entries, pending=pending if any(e.term for e in entries) else None)


@st.composite
def split_sizes(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    """Lengths of `parts` pieces that add up to `size`, empty ones included."""
    cuts = sorted(draw(st.integers(0, size)) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def specs(
    shape: Shape, *, world_size: int = 4, kinds: Sequence[type[ShardingSpec]] | None = None
) -> st.SearchStrategy[ShardingSpec]:
    """Specs of every built-in kind that fit `shape`, on ranks below `world_size`."""
    chosen = SPEC_KINDS if kinds is None else {kind: SPEC_KINDS[kind] for kind in kinds}
    fitting = [make for kind, make in chosen.items() if shape or kind not in _NEEDS_A_DIM]
    if not fitting:
        raise SpecError(
            "specs", expected="a kind of spec for a 0-d tensor", got=list(chosen), fix="Add a dim."
        )
    return st.one_of([make(shape, world_size) for make in fitting])


def _placements(world_size: int, *, unique: bool = False) -> st.SearchStrategy[list[str]]:
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, max_size=6, unique=unique)
    return ranks.map(lambda listed: [f"rank:{rank}/cpu" for rank in listed])


def _dims(shape: Shape) -> st.SearchStrategy[int]:
    return st.integers(-len(shape), len(shape) - 1)


@st.composite
def _chunks(draw: st.DrawFn, shape: Shape, world_size: int) -> ChunkShardingSpec:
    dim, placements = draw(_dims(shape)), draw(_placements(world_size))
    sizes = draw(st.none() | split_sizes(shape[dim], len(placements)))
    return ChunkShardingSpec(dim, placements, sizes)


@st.composite
def _enumerables(draw: st.DrawFn, shape: Shape, world_size: int) -> EnumerableShardingSpec:
    replicas = draw(st.booleans())
    layout = draw(layouts(shape=shape, world_size=world_size, replicas=replicas, addends=False))
    shards = [ShardMetadata(box.start, box.shape, f"rank:{rank}/cpu") for box, rank, _ in layout]
    return EnumerableShardingSpec(draw(st.permutations(shards)), replicas=replicas)


@st.composite
def _grids(draw: st.DrawFn, shape: Shape, world_size: int) -> GridShardingSpec:
    splits: list[int | list[int]] = []
    for size in shape:
        parts = draw(st.integers(1, 3))
        splits.append(draw(st.just(parts) | split_sizes(size, parts)))
    num_cells = math.prod(s if isinstance(s, int) else len(s) for s in splits)
    replicated = draw(st.booleans())
    cells = [
        draw(_placements(world_size, unique=True)) if replicated else f"rank:{rank}/cpu"
        for rank in draw(
            st.lists(st.integers(0, world_size - 1), min_size=num_cells, max_size=num_cells)
        )
    ]
    return GridShardingSpec(splits, cells)


def _replicated(shape: Shape, world_size: int) -> st.SearchStrategy[ReplicatedShardingSpec]:
    return _placements(world_size, unique=True).map(ReplicatedShardingSpec)


def _partials(shape: Shape, world_size: int) -> st.SearchStrategy[PartialShardingSpec]:
    placements = _placements(world_size, unique=True)
    return st.builds(PartialShardingSpec, placements, st.sampled_from(REDUCE_OPS))


@st.composite
def _fused(draw: st.DrawFn, shape: Shape, world_size: int) -> FusedShardingSpec:
    dim, placements = draw(_dims(shape)), draw(_placements(world_size))
    lengths = draw(split_sizes(shape[dim], draw(st.integers(1, 3))))
    sections = [draw(st.just(n) | split_sizes(n, len(placements))) for n in lengths]
    return FusedShardingSpec(dim, sections, placements)


def _block_cyclic(shape: Shape, world_size: int) -> st.SearchStrategy[BlockCyclicShardingSpec]:
    placements = _placements(world_size)
    return st.builds(BlockCyclicShardingSpec, _dims(shape), st.integers(1, 4), placements)


@st.composite
def _flats(draw: st.DrawFn, shape: Shape, world_size: int) -> FlatShardingSpec:
    placements = draw(_placements(world_size))
    sizes = draw(st.none() | split_sizes(math.prod(shape), len(placements)))
    return FlatShardingSpec(placements, sizes)


@st.composite
def mesh_specs(
    draw: st.DrawFn, shape: Shape, world_size: int = 4, *, strided: bool = True
) -> MeshShardingSpec:
    """Mesh specs of one to three axes; `strided` allows FSDP2's strided shards."""
    known = mesh_placement_types()
    limit, mesh_shape = world_size, []
    for _ in range(draw(st.integers(1, 3))):
        mesh_shape.append(draw(st.integers(min(2, limit), limit) | st.integers(1, limit)))
        limit //= mesh_shape[-1]
    ranks = draw(st.permutations(range(world_size)))[: math.prod(mesh_shape)]
    pending = known.partial(draw(st.sampled_from(REDUCE_OPS)))
    choices: list[st.SearchStrategy[Any]] = [st.just(known.replicate()), st.just(pending)]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        choices.append(dims.map(known.shard))
        if strided:
            choices.append(st.builds(known.strided_shard, dims, split_factor=st.integers(1, 3)))
    placements = [draw(st.one_of(choices)) for _ in mesh_shape]
    if len(placements) > 1 and draw(st.integers(0, 3)) == 0:
        placements[:2] = draw(st.permutations([pending, known.replicate()]))
    return MeshShardingSpec(_nested(ranks, mesh_shape), placements)


def _nested(ranks: Sequence[int], mesh_shape: Sequence[int]) -> list[Any]:
    if len(mesh_shape) == 1:
        return list(ranks)
    step = math.prod(mesh_shape[1:])
    return [_nested(ranks[k * step : (k + 1) * step], mesh_shape[1:]) for k in range(mesh_shape[0])]


# Kind of spec -> strategy for a shape and a number of ranks.
SPEC_KINDS: dict[type[ShardingSpec], Callable[[Shape, int], st.SearchStrategy[Any]]] = {
    ChunkShardingSpec: _chunks,
    EnumerableShardingSpec: _enumerables,
    GridShardingSpec: _grids,
    ReplicatedShardingSpec: _replicated,
    PartialShardingSpec: _partials,
    MeshShardingSpec: mesh_specs,
    FusedShardingSpec: _fused,
    BlockCyclicShardingSpec: _block_cyclic,
    FlatShardingSpec: _flats,
}
_NEEDS_A_DIM = {ChunkShardingSpec, FusedShardingSpec, BlockCyclicShardingSpec}
