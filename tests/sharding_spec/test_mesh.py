"""MeshShardingSpec beside DTensor's own computation, and on real ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwise.errors import ArgumentTypeError, SpecError
from shardwise.geometry import Box
from shardwise.sharding_spec import MeshShardingSpec
from shardwise.testing.local_run import run_local
from shardwise.testing.strategies import mesh_specs, shapes


@given(shapes().flatmap(lambda shape: st.tuples(st.just(shape), mesh_specs(shape, strided=False))))
def test_local_shapes_and_offsets_are_those_of_dtensor(
    case: tuple[tuple[int, ...], MeshShardingSpec],
) -> None:
    shape, spec = case
    layout = spec.layout(shape)
    for index, rank in enumerate(spec.ranks):
        at = list(map(int, np.unravel_index(index, spec.mesh_shape)))
        local, offset = _compute_local_shape_and_global_offset(
            shape, spec.mesh_shape, at, spec.placements
        )
        assert layout.boxes_of(rank) == (Box.at(offset, local),)


@given(shapes(min_ndim=1).flatmap(lambda shape: st.tuples(st.just(shape), mesh_specs(shape))))
def test_strided_shards_hold_the_elements_of_dtensor(
    case: tuple[tuple[int, ...], MeshShardingSpec],
) -> None:
    shape, spec = case
    layout = spec.layout(shape)
    for index, rank in enumerate(spec.ranks):
        at = np.unravel_index(index, spec.mesh_shape)
        # Oracle: DTensor cuts an array of indices per dim, axis by axis.
        left = [np.arange(size) for size in shape]
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, Shard | _StridedShard):
                dim, size = placement.dim, len(left[placement.dim])
                indices = torch.from_numpy(left[dim]).view([1] * dim + [size])
                pieces, _ = placement._split_tensor(
                    indices, spec.mesh_shape[axis], with_padding=False, contiguous=False
                )
                left[dim] = pieces[int(at[axis])].reshape(-1).numpy()
        expected = np.zeros(shape, bool)
        expected[np.ix_(*left)] = True
        held = np.zeros(shape, bool)
        for box in layout.boxes_of(rank):
            held[box.slices()] = True
        assert np.array_equal(held, expected)


@given(shapes(max_size=3).flatmap(lambda shape: st.tuples(st.just(shape), mesh_specs(shape))))
def test_ranks_along_partial_axes_hold_addends_and_along_replicate_axes_replicas(
    case: tuple[tuple[int, ...], MeshShardingSpec],
) -> None:
    shape, spec = case
    layout = spec.layout(shape)
    partial = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]
    several = math.prod(spec.mesh_shape[axis] for axis in partial) > 1 and 0 not in shape
    expected = spec.placements[partial[0]].reduce_op if partial and several else None
    assert layout.pending == expected
    if not several:
        return
    term_of = {rank: layout.terms_of(rank) for rank in spec.ranks}
    coordinates = list(np.ndindex(*spec.mesh_shape))
    for a, one in zip(coordinates, spec.ranks, strict=True):
        for b, other in zip(coordinates, spec.ranks, strict=True):
            same = all(a[axis] == b[axis] for axis in partial)
            assert (term_of[one][:1] == term_of[other][:1]) == same


CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((4,), (7, 3), [Shard(0)]),
    ((4,), (5, 3), [Shard(0)]),  # rank 3 is empty
    ((4,), (3, 6), [Shard(1)]),
    ((2, 2), (5, 6), [Shard(0), Shard(1)]),
    ((2, 2), (7, 3), [Shard(0), Shard(0)]),
    ((2, 2), (4, 3), [Replicate(), Shard(0)]),
    ((2, 2), (4, 3), [Partial(), Shard(0)]),
    ((2, 2), (4, 3), [Partial(), Replicate()]),
    ((2, 2), (4, 3), [Partial("avg"), Partial("avg")]),
    ((2, 2), (4, 3), [Partial("max"), Replicate()]),
    ((4,), (), [Partial()]),
]


def _full_tensors_agree(rank: int) -> list[tuple[tuple[int, ...], bool]]:
    """On every rank: what DTensor makes of our boxes, beside the tensor they were cut from."""
    results = []
    for mesh_shape, shape, placements in CASES:
        mesh = init_device_mesh("cpu", mesh_shape)
        spec = MeshShardingSpec(mesh, placements)
        layout = spec.layout(shape)
        full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1
        (box,), (term,) = layout.boxes_of(rank), layout.terms_of(rank)
        terms = {t for r in range(4) for t in layout.terms_of(r)}
        weight = {"sum": [0.25, 0.75, 1.5, -1.5], "avg": [0.0, 2.0, 3.0, -1.0], "max": [1.0, -1.0]}
        local = full[box.slices()].contiguous()
        if layout.pending is not None:
            shares = weight[layout.pending][: len(terms)]
            local = local * shares[term]
        dtensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        results.append((spec.mesh_shape, torch.equal(dtensor.full_tensor(), full)))
    return results


def test_full_tensors_of_our_boxes_are_those_of_dtensor() -> None:
    for answers in run_local(_full_tensors_agree, 4):
        assert answers == [(mesh_shape, True) for mesh_shape, _, _ in CASES]


def _spec_from_a_submesh(rank: int) -> tuple[int, ...]:
    mesh = DeviceMesh("cpu", [3, 1]) if rank in (1, 3) else None
    dist.barrier()
    return () if mesh is None else MeshShardingSpec(mesh, [Shard(0)]).layout((4,)).ranks


def test_a_mesh_of_some_ranks_in_any_order_is_taken_as_it_is() -> None:
    assert run_local(_spec_from_a_submesh, 4)[1] == (1, 3)


def test_partial_addends_of_one_rank_mesh_are_nothing_pending() -> None:
    assert MeshShardingSpec([2], [Partial()]).layout((3,)).pending is None


def test_negative_dims_count_from_the_end() -> None:
    ranks = [0, 1]
    assert MeshShardingSpec(ranks, [Shard(-1)]).layout((2, 4)) == MeshShardingSpec(
        ranks, [Shard(1)]
    ).layout((2, 4))


def test_touching_strided_pieces_are_one_box() -> None:
    spec = MeshShardingSpec([0], [_StridedShard(0, split_factor=2)])
    assert spec.layout((4,)).boxes_of(0) == (Box((0,), (4,)),)


def test_the_device_is_the_meshs() -> None:
    class Mesh:
        mesh = torch.arange(2)
        device_type = "meta"

    mesh: Any = Mesh()
    assert MeshShardingSpec(mesh, [Shard(0)]).local_devices((4,), 1) == (torch.device("meta"),)
    assert MeshShardingSpec([0, 1], [Shard(0)], "meta").local_devices((4,), 1) == (
        torch.device("meta"),
    )


def test_a_mesh_of_many_ranks_takes_no_quadratic_time() -> None:
    # Making all cuts anew for every rank would be quadratic, and run into the timeout.
    layout = MeshShardingSpec(np.arange(50_000), [Shard(0)]).layout((150_000, 4))
    assert layout.boxes_of(49_999) == (Box((149_997, 0), (150_000, 4)),)


def test_wrong_meshes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"expected 2, one per axis of a mesh of shape \(2, 2\)"):
        MeshShardingSpec([[0, 1], [2, 3]], [Shard(0)])
    with pytest.raises(SpecError, match="one pending operation at a time, got sum and max"):
        MeshShardingSpec([[0, 1], [2, 3]], [Partial(), Partial("max")])
    with pytest.raises(SpecError, match=r"placements\[0\]: expected Shard, Replicate or Partial"):
        MeshShardingSpec([0, 1], ["S(0)"])
    with pytest.raises(SpecError, match="each rank once"):
        MeshShardingSpec([0, 0], [Shard(0)])
    with pytest.raises(SpecError, match="Invalid sharding dim"):
        MeshShardingSpec([0, 1], [Shard(2)]).layout((4, 4))
    for wrong in ("cpu", [[0, 1], [2]], [0.5], [], [-1]):
        with pytest.raises(ArgumentTypeError, match="a DeviceMesh or an array of ranks"):
            MeshShardingSpec(wrong, [Shard(0)])
    with pytest.raises(ArgumentTypeError, match="a list of DTensor's placements"):
        MeshShardingSpec([0, 1], "S(0)")
    with pytest.raises(SpecError, match="reduce_op: expected one of"):
        MeshShardingSpec([0, 1], [Partial("band")])
