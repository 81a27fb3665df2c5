"""DTensors as sharded tensors and back: same memory, same values, same gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import shardwise
from shardwise import sharded_tensor
from shardwise.errors import ArgumentTypeError, ArgumentValueError, LayoutError
from shardwise.geometry import Box, Layout
from shardwise.interop.mesh_layouts import (
    find_placements,
    have_same_data,
    local_shape,
    regions_in_local,
)
from shardwise.sharding_spec import MeshShardingSpec
from shardwise.testing.local_run import run_local
from shardwise.testing.strategies import mesh_specs, shapes
from shardwise.testing.tensors import random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

# -- layouts: pure -------------------------------------------------------------------------------

Case = tuple[tuple[int, ...], MeshShardingSpec]


@st.composite
def cases(draw: st.DrawFn, *, strided: bool) -> Case:
    shape = draw(shapes())
    return shape, draw(mesh_specs(shape, strided=strided))


@given(cases(strided=True))
def test_boxes_lie_in_the_local_tensor_where_dtensor_puts_them(case: Case) -> None:
    shape, spec = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    layout = spec.layout(shape)
    for index, rank in enumerate(spec.ranks):
        local = _cut(
            full, spec.placements, spec.mesh_shape, np.unravel_index(index, spec.mesh_shape)
        )
        boxes = layout.boxes_of(rank)
        assert local_shape(boxes) == tuple(local.shape)
        for box, region in zip(boxes, regions_in_local(boxes), strict=True):
            assert torch.equal(local[region], full[box.slices()])


def _cut(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], at: Sequence[Any]
) -> torch.Tensor:
    """What DTensor gives one rank, axis by axis."""
    for placement, size, index in zip(placements, mesh_shape, at, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            pieces, _ = placement._split_tensor(full, size, with_padding=False, contiguous=False)
            full = pieces[int(index)]
    return full


@given(cases(strided=False))
def test_placements_are_found_for_every_layout_of_a_mesh(case: Case) -> None:
    shape, spec = case
    layout, mesh = spec.layout(shape), np.array(spec.ranks).reshape(spec.mesh_shape)
    found = find_placements(layout, mesh)
    assert found is not None
    assert have_same_data(MeshShardingSpec(mesh, found).layout(shape), layout)


def test_no_placements_are_found_for_other_layouts() -> None:
    rows = [Box((0, 0), (1, 4)), Box((1, 0), (4, 4))]
    mesh = np.array([0, 1])
    assert find_placements(Layout((4, 4), rows, [0, 1]), mesh) is None
    assert find_placements(Layout((4, 4), [Box((0, 0), (4, 4))], [2]), mesh) is None
    assert find_placements(Layout((4, 4), [Box((0, 0), (4, 4))], [0]), mesh) is None


def test_numbers_of_terms_and_boxes_without_elements_make_no_difference() -> None:
    whole = [Box((0,), (4,))] * 2
    one = Layout((4,), whole, [0, 1], terms=[0, 1], pending="sum")
    assert have_same_data(one, Layout((4,), whole, [0, 1], terms=[5, 2], pending="sum"))
    assert not have_same_data(one, Layout((4,), whole, [0, 1], terms=[0, 1], pending="avg"))
    assert not have_same_data(one, Layout((4,), whole, [0, 0], terms=[0, 1], pending="sum"))
    assert not have_same_data(one, Layout((4,), whole, [0, 1]))
    with_empty = Layout((4,), [*whole[:1], Box((4,), (4,))], [0, 1])
    assert have_same_data(with_empty, Layout((4,), whole[:1], [0]))


# -- tensors: real ranks -------------------------------------------------------------------------

CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((4,), (7, 3), [Shard(0)]),
    ((4,), (5, 3), [Shard(0)]),  # rank 3 is empty
    ((4,), (3, 6), [Shard(1)]),
    ((4,), (0, 6), [Shard(0)]),
    ((4,), (4, 3), [Replicate()]),
    ((4,), (4, 3), [Partial()]),
    ((4,), (), [Replicate()]),
    ((4,), (), [Partial("avg")]),
    ((2, 2), (5, 6), [Shard(0), Shard(1)]),
    ((2, 2), (7, 3), [Shard(0), Shard(0)]),
    ((2, 2), (4, 3), [Replicate(), Shard(0)]),
    ((2, 2), (4, 3), [Partial(), Shard(0)]),
    ((2, 2), (4, 3), [Partial("avg"), Replicate()]),
    ((2, 2), (4, 3), [Partial("avg"), Partial("avg")]),
    ((2, 2), (8, 3), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), (3, 8), [_StridedShard(1, split_factor=2), Shard(1)]),
]


def _mesh(mesh_shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", mesh_shape)


def _own(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Placement]) -> torch.Tensor:
    """This rank's local tensor: of replicas the same, of addends its own."""
    at: Any = mesh.get_coordinate()
    term = [
        index for index, placement in zip(at, placements, strict=True) if placement.is_partial()
    ]
    full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return _cut(full + 1 + 100 * sum(term), placements, tuple(mesh.shape), at).clone()


def _back_and_forth(rank: int) -> None:
    """Memory, values and gradients, both ways; the oracle is DTensor's own full tensor."""
    for mesh_shape, shape, placements in CASES:
        mesh = _mesh(mesh_shape)
        local = _own(mesh, shape, placements).requires_grad_()
        stride = torch.empty(shape).stride()
        size = torch.Size(shape)
        given = DTensor.from_local(local, mesh, placements, shape=size, stride=stride)
        full = given.detach().full_tensor()
        weight = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).cos()

        ours = shardwise.from_dtensor(given)
        context = (mesh_shape, shape, placements)
        assert ours.shard_layout == MeshShardingSpec(mesh, placements).layout(shape), context
        assert torch.equal(ours.detach().full_tensor(), full), context
        _check_memory([shard.tensor for shard in ours.local_shards()], local, context)
        given.retain_grad()
        (ours.full_tensor() * weight).sum().backward()
        assert torch.equal(given.grad.full_tensor(), weight), context
        assert local.grad is not None

        shards = ours.detach().requires_grad_()
        theirs = shardwise.to_dtensor(shards, mesh, placements)
        assert theirs.shape == size
        assert torch.equal(theirs.detach().full_tensor(), full), context
        mine = theirs.detach().to_local()
        assert mine.data_ptr() == local.data_ptr() or mine.numel() == 0, context
        _weighted_sum(theirs, weight).backward()
        # Of a mean each term has its part of the gradient, as when nothing is converted.
        alone = ours.detach().requires_grad_()
        (alone.full_tensor() * weight).sum().backward()
        expected = alone.grad.full_tensor()
        assert alone.shard_layout.pending == "avg" or torch.equal(expected, weight), context
        assert torch.equal(shards.grad.full_tensor(), expected), context
        assert shards.grad.shard_layout == shards.shard_layout.bar, context


def _check_memory(pieces: list[torch.Tensor], local: torch.Tensor, context: object) -> None:
    assert sum(piece.numel() for piece in pieces) == local.numel(), context
    for piece in pieces:
        if piece.numel():
            mine, theirs = piece.untyped_storage(), local.untyped_storage()
            assert mine.data_ptr() == theirs.data_ptr(), context


def _weighted_sum(tensor: DTensor, weight: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() * weight).sum()


def test_memory_values_and_gradients_are_shared_both_ways() -> None:
    run_local(_back_and_forth, 4)


def _through_ops(rank: int) -> None:
    """A DTensor op, then ours, then a DTensor op: gradients as on the full tensors."""
    mesh = _mesh((2, 2))
    torch.manual_seed(0)
    full_x, full_w = (torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x: Any = distribute_tensor(full_x.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()
    w = shardwise.distribute(full_w.detach(), MeshShardingSpec(mesh, [Shard(0), Replicate()]))
    w.requires_grad_()
    middle = shardwise.from_dtensor(x * x) * w
    last = shardwise.to_dtensor(middle, mesh, [Shard(0), Replicate()])
    (last.exp() * last).sum().full_tensor().backward()
    oracle = full_x * full_x * full_w
    (oracle.exp() * oracle).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full_x.grad)
    torch.testing.assert_close(w.grad.full_tensor(), full_w.grad)


def test_gradients_flow_through_ops_of_both_sides() -> None:
    run_local(_through_ops, 4)


def _without_arguments(rank: int) -> None:
    for spec in ("chunk(0)", "chunk(1)", "replicate()", "partial()", "partial('avg')"):
        tensor = random_tensor(shardwise.parse_spec(spec).layout((5, 4)), torch.float64)
        theirs = shardwise.to_dtensor(tensor)
        assert torch.equal(theirs.full_tensor(), tensor.full_tensor()), spec
    rows = sharded_tensor.ones(shardwise.grid([2, 1], ranks=[[0, 1], [2]]), 4, 3)
    with pytest.raises(LayoutError, match=r"expected a layout of DTensor's on a mesh of ranks"):
        shardwise.to_dtensor(rows)
    # A rank that has no box where DTensor has an empty one.
    two = sharded_tensor.ones(shardwise.chunk(0, ranks=[0, 1]), 2, 3, requires_grad=True)
    theirs = shardwise.to_dtensor(two, _mesh((3,)), [Shard(0)])
    assert theirs.to_local().shape == (1 if rank < 2 else 0, 3)
    theirs.sum().full_tensor().backward()
    assert torch.equal(two.grad.full_tensor(), torch.ones(2, 3))
    columns = random_tensor(shardwise.chunk(0).layout((4, 3))).t()
    theirs = shardwise.to_dtensor(columns)
    assert theirs.stride() == (4, 1)  # on all ranks, also on the one that has nothing
    assert torch.equal((theirs + theirs).full_tensor(), 2 * columns.full_tensor())
    # Strided shards whose boxes are apart are copied together.
    strided = MeshShardingSpec([0, 1, 2], [_StridedShard(0, split_factor=2)])
    apart = random_tensor(strided.layout((12, 2)), requires_grad=True)
    joined = shardwise.to_dtensor(apart, _mesh((3,)), strided.placements)
    pieces: list[Any] = [shard.tensor for shard in apart.local_shards()]
    assert torch.equal(joined.to_local(), torch.cat(pieces))
    joined.to_local().square().sum().backward()
    assert all(torch.equal(piece.grad, 2 * piece.detach()) for piece in pieces)


def test_placements_and_mesh_are_found_where_there_are_some() -> None:
    run_local(_without_arguments, 3)


def _on_some_ranks(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 2])
    full = torch.arange(15.0).view(5, 3)
    given: Any = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    if rank != 1:
        ours = shardwise.from_dtensor(given)
        assert torch.equal(ours.full_tensor().detach(), full)
        assert tuple(ours.shard_layout.ranks) == (0, 2)
        shardwise.to_dtensor(ours)
    else:
        with pytest.raises(ArgumentValueError, match=r"all ranks of the mesh, \[0, 2\]"):
            shardwise.from_dtensor(given)
    ours = shardwise.from_dtensor(given, process_group=dist.group.WORLD)
    assert torch.equal(ours.detach().full_tensor(), full)
    (ours.full_tensor() * full).sum().backward()
    if rank != 1:
        assert torch.equal(given.grad.full_tensor(), full)
    theirs = shardwise.to_dtensor(ours.detach(), mesh, [Shard(0)])
    assert torch.equal(theirs.to_local(), given.detach().to_local())


def test_a_mesh_of_some_ranks_is_a_group_of_its_own_or_part_of_another() -> None:
    run_local(_on_some_ranks, 3)


def _wrong_calls(rank: int) -> None:
    mesh = _mesh((2,))
    rows = sharded_tensor.ones(shardwise.chunk(0), 4, 3)
    wrong: Any = torch.ones(2)
    with pytest.raises(ArgumentTypeError, match=r"expected a torch.distributed.tensor.DTensor"):
        shardwise.from_dtensor(wrong)
    with pytest.raises(ArgumentTypeError, match="expected a ShardedTensor, got Tensor"):
        shardwise.to_dtensor(wrong)
    with pytest.raises(ArgumentTypeError, match=r"mesh of to_dtensor: expected a DeviceMesh"):
        shardwise.to_dtensor(rows, [0, 1])  # type: ignore[arg-type]  # wrong on purpose
    pattern = r"the layout of \[S\(1\)\] on ranks \[0, 1\].*Reshard it first: spec = shardwise"
    with pytest.raises(LayoutError, match=pattern):
        shardwise.to_dtensor(rows, mesh, [Shard(1)])
    # What the message says to do.
    spec = shardwise.sharding_spec.MeshShardingSpec(mesh, [Shard(1)])
    moved = shardwise.to_dtensor(shardwise.reshard(rows, spec), mesh, [Shard(1)])
    assert torch.equal(moved.full_tensor(), torch.ones(4, 3))
    chosen = DTensor.from_local(
        torch.ones(1 + 2 * rank, 3), mesh, [Shard(0)], shape=torch.Size([4, 3]), stride=(3, 1)
    )
    with pytest.raises(LayoutError, match=r"local tensor of a DTensor.*expected \(2, 3\), got"):
        shardwise.from_dtensor(chosen)
    largest: Any = DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [Partial("max")])
    with pytest.raises(Exception, match="requires_grad of a ShardedTensor with a pending max"):
        shardwise.from_dtensor(largest)
    assert shardwise.from_dtensor(largest.detach()).shard_layout.pending == "max"
    back = DeviceMesh("cpu", [1, 0])
    backwards = DTensor.from_local(torch.ones(2, 3), back, [Shard(0)], run_check=False)
    with pytest.raises(LayoutError, match=r"mesh of ranks \[1, 0\].*that ascend along an axis"):
        shardwise.from_dtensor(backwards)
    with pytest.raises(LayoutError, match=r"mesh of ranks \[1, 0\].*that ascend along an axis"):
        shardwise.to_dtensor(shardwise.reshard(rows, shardwise.chunk(0, ranks=[1, 0])), back)


def test_wrong_calls_say_what_to_do() -> None:
    run_local(_wrong_calls, 2)
