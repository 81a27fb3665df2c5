"""DTensors as sharded tensors and back, on the same memory, with gradients.

[Note: gradients of a DTensor] Both sides have one rule: the gradient of a tensor has its layout
with nothing pending, each entry being the whole gradient of its box (DTensor: Partial becomes
Replicate). So `to_local` and `from_local` pass gradients as they are. A pending mean is the
exception: DTensor gives the local term the gradient of the mean; here it is the term's own, which
is the former over the number of terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise._torch_compat import has_default_shard_order, wait_for_local
from shardwise.comm.agreement import heard_by_all
from shardwise.comm.process_group import communicator
from shardwise.comm.term_gradients import scale_terms
from shardwise.errors import ArgumentTypeError, ArgumentValueError, LayoutError
from shardwise.interop.mesh_layouts import (
    find_placements,
    have_same_data,
    local_shape,
    regions_in_local,
)
from shardwise.sharded_tensor.state import check_requires_grad, make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.usable import live_state
from shardwise.sharding_spec.mesh import MeshShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Carriers
    from shardwise.geometry import Box, Layout
    from shardwise.interop.mesh_layouts import Region
    from shardwise.sharded_tensor.state import State

__all__ = ["from_dtensor", "to_dtensor"]


# -- from a DTensor --------------------------------------------------------------------------------


def from_dtensor(dt: DTensor, *, process_group: ProcessGroup | None = None) -> ShardedTensor:
    """A DTensor as a sharded tensor on the same memory. Sends nothing.

    Placements of every kind are taken: Shard, Replicate, Partial (which stays pending) and FSDP2's
    strided shards, even cuts or not. Gradients flow back to `dt`. All ranks of the group call it:
    the mesh's own, unless `process_group` is one that has more ranks. A mesh of several axes that
    has only some of all ranks has no group of its own, and needs one.

    >>> import shardwise
    >>> def rows(rank):
    ...     from torch.distributed.device_mesh import init_device_mesh
    ...     from torch.distributed.tensor import Shard, distribute_tensor
    ...     mesh = init_device_mesh("cpu", (2,))
    ...     dt = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    ...     return shardwise.from_dtensor(dt).local_tensor().shape
    >>> shardwise.run_local(lambda rank: rows(rank), 2)
    [torch.Size([3, 3]), torch.Size([2, 3])]
    """
    _check_dtensor(dt)
    members = communicator(_group_of(dt.device_mesh) if process_group is None else process_group)
    with heard_by_all("from_dtensor", members):
        wait_for_local(dt)
        local = dt.to_local()
        spec = MeshShardingSpec(dt.device_mesh, dt.placements, local.device.type)
        layout = spec.layout(dt.shape)
        _check_convertible(dt, local, layout, members)
    boxes = layout.boxes_of(members.rank)
    pieces = [local[region] for region in regions_in_local(boxes)] if boxes else []
    state = make_state(
        layout,
        pieces,
        group=members,
        spec=spec,
        dtype=local.dtype,
        device=local.device,
        # A rank outside of the mesh has a tie of its own: torch has no gradient for it there.
        requires_grad=local.requires_grad,
    )
    return wrap(state.with_carriers(_with_term_gradients(state.carriers, state, up=True)))


def _check_dtensor(dt: object) -> None:
    from torch.distributed.tensor import DTensor

    if not isinstance(dt, DTensor):
        raise ArgumentTypeError(
            "dt of from_dtensor",
            expected="a torch.distributed.tensor.DTensor",
            got=type(dt).__name__,
            fix="A plain tensor is sharded by shardwise.distribute(x, spec).",
        )


def _group_of(mesh: DeviceMesh) -> ProcessGroup | None:
    """The process group of all ranks of the mesh; None is the default one."""
    ranks = mesh.mesh.ravel().tolist()
    if sorted(ranks) == list(range(dist.get_world_size())):
        return None
    is_member = dist.get_rank() in ranks
    if mesh.ndim == 1 and is_member:
        return mesh.get_group()
    raise ArgumentValueError(
        "process_group of from_dtensor",
        rank=dist.get_rank(),
        expected=f"a group that has all ranks of the mesh, {ranks}, and this one",
        got=f"None, and the mesh has {mesh.ndim} axes" if is_member else "None",
        fix=f"Pass process_group=torch.distributed.new_group({sorted(ranks)}), which all ranks "
        "make, or torch.distributed.group.WORLD, if all of them call.",
    )


def _check_convertible(
    dt: DTensor, local: torch.Tensor, layout: Layout, members: Communicator
) -> None:
    members.ranks.check_members(layout.ranks, what="the mesh of from_dtensor's DTensor")
    _check_ascending(dt.device_mesh, dt.placements, members.rank)
    if not has_default_shard_order(dt):
        raise LayoutError(
            f"DTensor of shape {tuple(dt.shape)}, whose mesh axes cut in an order of their own",
            rank=members.rank,
            expected="axes that cut a dim from left to right",
            fix="Bring it there first: dt.redistribute(dt.device_mesh, dt.placements).",
        )
    boxes = layout.boxes_of(members.rank)
    if boxes and tuple(local.shape) != local_shape(boxes):
        raise LayoutError(
            f"local tensor of a DTensor of shape {tuple(dt.shape)} with {dt.placements}",
            rank=members.rank,
            expected=local_shape(boxes),
            got=tuple(local.shape),
            fix="DTensor takes it for something that it is not. Local shards of chosen sizes are "
            "made a tensor by shardwise.sharded_tensor.init_from_local_shards.",
        )
    if local.requires_grad:
        check_requires_grad(layout, local.dtype, members.rank)


def _check_ascending(mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> None:
    """Raises if an axis that cuts has its ranks in another order than ascending.

    torch sorts the ranks of a process group, so that DTensor's collectives do not follow the
    coordinates of such a mesh: what it distributes and what it gathers is not what it says.
    """
    ranks = _ranks(mesh)
    for axis, placement in enumerate(placements):
        if placement.is_shard() and (np.diff(ranks, axis=axis) < 0).any():
            raise LayoutError(
                f"DTensor on a mesh of ranks {ranks.tolist()}, cut along axis {axis}",
                rank=rank,
                expected="ranks that ascend along an axis that cuts",
                got="ranks that do not, for which DTensor's own collectives are wrong",
                fix="Make the mesh with ascending ranks; a ShardedTensor takes any order.",
            )


# -- to a DTensor ----------------------------------------------------------------------------------


def to_dtensor(
    st: torch.Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A sharded tensor whose layout is one of DTensor's, as a DTensor on the same memory.

    All ranks of the tensor's group call it; nothing is sent. Without a `mesh` it is one axis of the
    ranks of the group; without `placements` those are found that give the tensor's layout. If it
    has another layout, the error says how to reshard it. Gradients flow back to `st`.

    Where a strided shard gives a rank several boxes, they share memory with the DTensor if they lie
    side by side, as those of `from_dtensor` do, and are copied otherwise.
    """
    from torch.distributed.tensor import DTensor

    state = _state_of(st)
    with heard_by_all("to_dtensor", state.comm):
        mesh = _mesh_of(state) if mesh is None else _checked_mesh(mesh, state)
        chosen = _placements_of(state, mesh) if placements is None else tuple(placements)
        layout = _target(state, mesh, chosen)
        _check_ascending(mesh, chosen, state.rank)
    (*carriers,) = _with_term_gradients(state.carriers, state, up=False)
    local = _local(carriers, state, layout)
    shape = torch.Size(state.layout.shape)
    # Of a contiguous tensor, whatever the local ones are: all ranks have to say the same.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, chosen, run_check=False, shape=shape, stride=stride)


def _state_of(st: object) -> State:
    if not isinstance(st, ShardedTensor):
        raise ArgumentTypeError(
            "st of to_dtensor",
            expected="a ShardedTensor",
            got=type(st).__name__,
            fix="A plain tensor becomes a DTensor by torch.distributed.tensor.distribute_tensor.",
        )
    return live_state(st)


def _mesh_of(state: State) -> DeviceMesh:
    """One axis of the ranks of the tensor's group, in its order; makes no new group."""
    from torch.distributed.device_mesh import DeviceMesh

    if state.process_group is None:
        raise ArgumentValueError(
            "mesh of to_dtensor",
            rank=state.rank,
            expected="a DeviceMesh, for a tensor of no process group",
            got="None",
        )
    return DeviceMesh.from_group(state.process_group, state.device.type)


def _checked_mesh(mesh: object, state: State) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            "mesh of to_dtensor", rank=state.rank, expected="a DeviceMesh", got=repr(mesh)
        )
    if state.device.type not in (mesh.device_type, "meta"):
        raise ArgumentValueError(
            "mesh of to_dtensor",
            rank=state.rank,
            expected=f"a mesh of {state.device.type}, where the tensor is",
            got=f"one of {mesh.device_type}",
            fix=f"Move the tensor first: st.to({mesh.device_type!r}).",
        )
    return mesh


def _placements_of(state: State, mesh: DeviceMesh) -> tuple[Any, ...]:
    """The placements that the tensor was made with, if that was on this mesh, or others."""
    ranks, spec = _ranks(mesh), state.spec
    if isinstance(spec, MeshShardingSpec) and spec.mesh_shape == ranks.shape:
        made = MeshShardingSpec(ranks, spec.placements)
        if have_same_data(made.layout(state.layout.shape), state.layout):
            return spec.placements
    found = find_placements(state.layout, ranks)
    if found is None:
        raise LayoutError(
            f"to_dtensor of a ShardedTensor of shape {state.layout.shape}",
            rank=state.rank,
            expected=f"a layout of DTensor's on a mesh of ranks {ranks.tolist()}",
            got=state.layout,
            fix="Choose placements and reshard it, e.g. spec = shardwise.sharding_spec."
            "MeshShardingSpec(mesh, [Shard(0)]); shardwise.to_dtensor(shardwise.reshard(st, spec), "
            "mesh, [Shard(0)]).",
        )
    return found


def _target(state: State, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
    """The layout that mesh and placements say, which the tensor must have."""
    layout = MeshShardingSpec(mesh, placements).layout(state.layout.shape)
    if not have_same_data(layout, state.layout):
        shown = f"[{', '.join(map(str, placements))}]"
        raise LayoutError(
            f"to_dtensor of a ShardedTensor of shape {state.layout.shape}",
            rank=state.rank,
            expected=f"the layout of {shown} on ranks {_ranks(mesh).tolist()}: {layout}",
            got=state.layout,
            fix="Reshard it first: spec = shardwise.sharding_spec.MeshShardingSpec(mesh, "
            "placements); shardwise.to_dtensor(shardwise.reshard(st, spec), mesh, placements).",
        )
    return layout


def _ranks(mesh: DeviceMesh) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(mesh.mesh, dtype=np.int64)


def _local(carriers: Sequence[torch.Tensor], state: State, layout: Layout) -> torch.Tensor:
    """DTensor's one local tensor, of this rank's boxes in `layout`."""
    boxes = layout.boxes_of(state.rank)
    held = dict(zip(state.boxes, carriers, strict=False))  # on a rank that has none, none
    full = [box for box in boxes if not box.is_empty]
    if not full:
        nothing = carriers[0].reshape(-1)[:0]
        return nothing.reshape(local_shape(boxes)) if boxes else nothing
    if len(full) == 1:
        return held[full[0]]
    pieces = [held[box] for box in full]
    joined: torch.Tensor = _Join.apply(full, *pieces)  # type: ignore[no-untyped-call]  # torch's
    return joined


class _Join(torch.autograd.Function):
    """The pieces of a rank as one tensor: a view if they lie so in one memory, or else a copy."""

    @staticmethod
    def forward(ctx: Any, boxes: Sequence[Box], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.regions = regions_in_local(boxes)
        shape = local_shape(boxes)
        if _lie_side_by_side(pieces, ctx.regions):
            first = pieces[0].detach()
            return first.as_strided(shape, first.stride(), first.storage_offset())
        joined = pieces[0].new_empty(shape)
        for region, piece in zip(ctx.regions, pieces, strict=True):
            joined[region] = piece
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *[grads[0][region] for region in ctx.regions]


def _lie_side_by_side(pieces: Sequence[torch.Tensor], regions: Sequence[Region]) -> bool:
    """Whether all are parts of one tensor that starts where the first, lowest one does."""
    first = pieces[0]
    memory, stride, origin = (
        first.untyped_storage().data_ptr(),
        first.stride(),
        first.storage_offset(),
    )
    for piece, region in zip(pieces, regions, strict=True):
        at = origin + sum(part.start * step for part, step in zip(region, stride, strict=True))
        if (piece.untyped_storage().data_ptr(), piece.stride()) != (memory, stride):
            return False
        if piece.storage_offset() != at:
            return False
    return True


# -- gradients -------------------------------------------------------------------------------------


def _with_term_gradients(carriers: Carriers, state: State, *, up: bool) -> Carriers:
    """The same, passing gradients of a pending mean's terms. [Note: gradients of a DTensor]"""
    if state.layout.pending != "avg" or not any(c.requires_grad for c in carriers):
        return carriers
    found: Carriers = _TermGradients.apply(state.layout, state.rank, up, *carriers)  # type: ignore[no-untyped-call]  # torch's
    return found


class _TermGradients(torch.autograd.Function):
    """Nothing on the way there; on the way back gradients of terms become those of the mean.

    Or (not `up`) the other way round.
    """

    @staticmethod
    def forward(ctx: Any, layout: Layout, rank: int, up: bool, *carriers: torch.Tensor) -> Carriers:
        ctx.layout, ctx.rank, ctx.up = layout, rank, up
        return tuple([carrier.view_as(carrier) for carrier in carriers])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *scale_terms(grads, ctx.layout, ctx.rank, up=ctx.up)
