"""Where a tensor is to go: what a spec, a layout or another tensor means for it on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.geometry import Layout
from shardwise.sharded_tensor.resharding import reshard_state
from shardwise.sharded_tensor.sizes_and_specs import home_device
from shardwise.sharded_tensor.state import only_layout
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.sharded_tensor.state import State

__all__ = ["IN_ANOTHER_GROUP", "ReshardTarget", "reshard_to", "target_in_group", "target_of"]

# What to do about ranks that are not in the group of a tensor.
IN_ANOTHER_GROUP = (
    "Name global ranks that are members, or move it by shardwise.reshard(x, to, process_group=...) "
    "with a group that has all of them."
)


@dataclass(frozen=True, slots=True)
class ReshardTarget:
    """A layout, a spec for it, and this rank's devices."""

    layout: Layout
    spec: ShardingSpec | None = None
    devices: tuple[torch.device, ...] | None = None  # of local shards; None: where the tensor is
    # Where a rank that gets nothing takes the tensor to be; None: where it took it to be before.
    home: torch.device | None = None


def reshard_to(
    state: State,
    target: ReshardTarget,
    *,
    max_bytes: int | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> State:
    """The same tensor at its target, as `reshard_state` brings it there."""
    return reshard_state(
        state,
        target.layout,
        spec=target.spec,
        devices=target.devices,
        home=target.home,
        max_bytes=max_bytes,
        out=out,
    )


def target_of(
    to: object, shape: tuple[int, ...], rank: int, *, what: str = "to of reshard"
) -> ReshardTarget:
    """What `to` (a spec, a Layout, a ShardedTensor, a target) means for a tensor of `shape`."""
    if isinstance(to, ShardingSpec):
        devices = to.local_devices(shape, rank)
        home = None if devices else home_device(to, shape)
        return ReshardTarget(only_layout(to.layout(shape)), to, devices, home)
    if isinstance(to, ShardedTensor):
        state = to._state
        found = ReshardTarget(state.layout, state.spec, state.devices, state.device)
    elif isinstance(to, Layout):
        found = ReshardTarget(only_layout(to))
    elif isinstance(to, ReshardTarget):
        found = to
    else:
        raise ArgumentTypeError(
            what,
            rank=rank,
            expected="a spec, a Layout or a ShardedTensor",
            got=type(to).__name__,
            fix="E.g. shardwise.reshard(st, shardwise.chunk(1)); shardwise.parse_spec reads text.",
        )
    if found.layout.shape != shape:
        raise ArgumentValueError(
            what,
            rank=rank,
            expected=f"a layout of the tensor's shape {shape}",
            got=f"one of shape {found.layout.shape}",
        )
    return found


def target_in_group(to: object, state: State, *, what: str = "to of reshard") -> ReshardTarget:
    """As `target_of` for a tensor that stays in its group; raises if `to` has other ranks."""
    target = target_of(to, state.layout.shape, state.rank, what=what)
    group, ranks = state.comm.ranks, target.layout.ranks
    if not group.members.issuperset(ranks):  # asked here, as small reshards are in a hurry
        group.check_members(ranks, what=what, rank=state.rank, fix=IN_ANOTHER_GROUP)
    return target
