"""From one layout to another: states in, states out; differentiable unless it says otherwise."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.differentiable import carriers_of, exchange, exchange_of, own_parts, start
from shardwise.errors import ArgumentValueError
from shardwise.geometry import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.comm.agreement import Agreement
    from shardwise.comm.differentiable import Exchange
    from shardwise.sharded_tensor.state import State
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = [
    "at_home",
    "check_one_group",
    "cut_state",
    "is_everywhere",
    "job_for",
    "replicated",
    "replicated_layout",
    "replicated_state",
    "reshard_state",
    "start_reshard",
]


def reshard_state(
    state: State,
    layout: Layout,
    *,
    spec: ShardingSpec | None = None,
    devices: Sequence[torch.device] | None = None,
    home: torch.device | None = None,
    max_bytes: int | None = None,
    out: Sequence[torch.Tensor] | None = None,
    work: Layout | None = None,
    agreement: Agreement | None = None,
) -> State:
    """The same tensor in `layout`, its local shards on `devices` (default: where this one is).

    All ranks of the group call it. Where nothing changes, the same state is returned. `home` is
    where a rank that gets nothing takes the tensor to be. `work` as in `Exchange`, `agreement` as
    in `execute`.
    """
    job = job_for(state, layout, devices, max_bytes, work=work)
    if out is None and work is None and job.moves_nothing:
        if agreement is not None:
            agreement.reach()
        return _on_devices(state, job.target_devices, home, spec)
    moved = exchange(job, state.carriers, out=out, agreement=agreement)
    there = state.with_carriers(moved, layout=layout, spec=spec)
    return there if home is None else at_home(there, home)


def start_reshard(
    state: State,
    layout: Layout,
    *,
    spec: ShardingSpec | None = None,
    devices: Sequence[torch.device] | None = None,
    home: torch.device | None = None,
    max_bytes: int | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> Callable[[], State]:
    """The same for values, started only: what it returns waits, and gives the state."""
    job = job_for(state, layout, devices, max_bytes)
    if out is None and job.moves_nothing:
        done = _on_devices(state, job.target_devices, home, spec)
        return lambda: done
    wait = start(job, state.carriers, out=out)
    return lambda: at_home(state.with_carriers(wait(), layout=layout, spec=spec), home)


def _on_devices(
    state: State,
    devices: tuple[torch.device, ...],
    home: torch.device | None,
    spec: ShardingSpec | None,
) -> State:
    """The same tensor in its layout: no rank waits for others, whose devices may stay the same."""
    shards = state.shards
    if state.devices == devices:
        return state if shards or home is None else at_home(state, home, spec=spec)
    there = [shard.to(device, copy=True) for shard, device in zip(shards, devices, strict=True)]
    return state.with_carriers(there, spec=spec)


def at_home(state: State, home: torch.device | None, **changes: Any) -> State:
    """The same, but a rank without shards takes the tensor to be at `home`, as the others do."""
    if home is None or state.device == home or state.shards:
        return state
    return state.map(lambda tie: tie.to(home), **changes)


def job_for(
    state: State,
    layout: Layout,
    devices: Sequence[torch.device] | None,
    max_bytes: int | None,
    *,
    work: Layout | None = None,
) -> Exchange:
    """The exchange that takes a tensor to `layout`."""
    if devices is None:
        devices = (state.device,) * len(layout.boxes_of(state.rank))
    return exchange_of(
        state.layout,
        layout,
        state.devices,
        tuple(devices),
        state.comm,
        max_bytes=max_bytes,
        work=work,
    )


def check_one_group(what: str, states: Sequence[State]) -> None:
    """Raises unless all tensors of a call have the same ranks."""
    first, *others = states
    for other in others:
        if other.members is not first.members and set(other.comm.ranks) != set(first.comm.ranks):
            raise ArgumentValueError(
                f"{what} of ShardedTensors",
                rank=first.rank,
                expected="one process group",
                got=f"groups of ranks {list(first.comm.ranks)} and {list(other.comm.ranks)}",
                fix="Bring one into the other's group: shardwise.reshard(st, to, "
                "process_group=...).",
            )


def replicated_layout(shape: tuple[int, ...], like: State) -> Layout:
    """The layout of a tensor of `shape` that every rank of the group has."""
    return replicated(shape, tuple(sorted(like.comm.ranks)))


def is_everywhere(state: State) -> bool:
    """Whether every rank of the group has the whole tensor."""
    layout = state.layout
    return layout.is_replicated and len(layout.ranks) == len(state.comm.ranks)


@lru_cache(maxsize=256)
def replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    """The layout of a tensor that each of `ranks` has whole."""
    return Layout.replicated(shape, ranks)


def replicated_state(
    state: State, *, max_bytes: int | None = None, has_own_parts: bool = False
) -> State:
    """The whole tensor on every rank of the group, whose gradients may be each rank's own part."""
    layout = replicated_layout(state.layout.shape, state)
    work = own_parts(layout) if has_own_parts else None
    return reshard_state(state, layout, max_bytes=max_bytes, work=work)


def cut_state(full: torch.Tensor, like: State, *, layout: Layout) -> State:
    """A plain tensor that is the same on all ranks, in `layout`: each cuts its own boxes.

    The gradient of `full` is the whole one, on every rank. Nothing may be pending in `layout`. The
    pieces are views, unless there is a gradient.
    """
    assert layout.pending is None
    if full.requires_grad and torch.is_grad_enabled():
        source = replicated_layout(tuple(full.shape), like)
        there = like.with_carriers([full.to(like.device)], layout=source, spec=None)
        return reshard_state(there, layout)
    boxes = layout.boxes_of(like.rank)
    pieces = [full[box.slices()].to(like.device) for box in boxes]
    carriers = carriers_of(pieces, dtype=full.dtype, device=like.device)
    return like.with_carriers(carriers, layout=layout, spec=None)
