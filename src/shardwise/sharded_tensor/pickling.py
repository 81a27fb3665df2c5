"""Sharded tensors in files: each rank saves what it holds, and loads it into a group of its shape.

The stream has plain values and tensors, and one function that puts them together, so `torch.load`
reads it with `weights_only=True`. A user's own spec or tensor class is pickled as itself, and then
`torch.load` wants to be told that it is trusted.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.communicator import simulated_rank
from shardwise.comm.process_group import communicator
from shardwise.errors import LoadError, NotInitializedError
from shardwise.geometry import Box
from shardwise.geometry.plain_layouts import layout_from_plain, plain_layout
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.state import LooseState, State
from shardwise.sharded_tensor.tensor import ShardedTensor, ShardedTensorBase, user_attributes, wrap
from shardwise.sharding_spec.on_device import on_device
from shardwise.sharding_spec.plain import plain_spec, spec_from_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["Place", "load_with_process_group"]

_Tensor: Any = torch.Tensor
_VERSION = 1
_NO_GROUP = 'Need to initialize default process group using "init_process_group" before'
_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ShardedTensor, ShardedTensorBase)
}

# The group that `load_with_process_group` chose; None: the default one.
_load_group: ContextVar[dist.ProcessGroup | None] = ContextVar("load_group", default=None)


class Place(NamedTuple):
    """Where in the world a rank saved a tensor; it is loaded at the same place."""

    local_rank: int  # in the tensor's group
    global_rank: int
    local_world_size: int
    global_world_size: int


# -- the group to load into ------------------------------------------------------------------------


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Sharded tensors that are unpickled inside belong to `process_group`."""
    if _load_group.get() is not None:
        raise LoadError(
            'ProcessGroup already set by previous "load_with_process_group" context manager',
            fix="Leave it before you enter the next one.",
        )
    token = _load_group.set(process_group)
    try:
        yield process_group
    finally:
        _load_group.reset(token)


def _get_current_process_group() -> dist.ProcessGroup:
    """The group of `load_with_process_group`, or the default one."""
    world = dist.group.WORLD
    if world is None:
        raise NotInitializedError(
            f"{_NO_GROUP} loading ShardedTensor",
            fix="Start the script with torchrun and call torch.distributed.init_process_group().",
        )
    return _load_group.get() or world


def _place(members: Communicator) -> Place:
    is_simulated = not hasattr(members, "process_group")
    if not is_simulated and not dist.is_initialized():
        raise NotInitializedError(
            f"{_NO_GROUP} saving ShardedTensor",
            rank=members.rank,
            fix="Save it before torch.distributed.destroy_process_group().",
        )
    return Place(
        members.ranks.group_rank(members.rank),
        members.rank,
        len(members.ranks),
        len(members.ranks) if is_simulated else dist.get_world_size(),
    )


def _members_for(saved: Place) -> Communicator:
    """The communicator of the current group, once this rank's place in it is the saved one."""
    if simulated_rank.get() is not None and _load_group.get() is None:
        members = communicator(None)
        _check_place(saved, _place(members))
        return members
    group: object = _get_current_process_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what torch gives those whom it leaves out
        _check_place(saved, Place(-1, dist.get_rank(), -1, dist.get_world_size()))
    members = communicator(group)  # type: ignore[arg-type]  # raises if it is something else
    _check_place(saved, _place(members))
    return members


def _check_place(saved: Place, now: Place) -> None:
    for name in ("local_rank", "global_rank", "local_world_size", "global_world_size"):
        then, found = getattr(saved, name), getattr(now, name)
        if then != found:
            raise LoadError(
                f"{name.replace('_', ' ').capitalize()} at save time was {then}, but at load time "
                f"was {found}",
                rank=now.global_rank,
                fix="Each rank loads the file that it saved, in a group like the one that it was "
                "saved in: with shardwise.load_with_process_group(group).",
            )


# -- writing ---------------------------------------------------------------------------------------


@handles(_Tensor.__reduce_ex__)
def _reduce(tensor: ShardedTensor, protocol: Any) -> tuple[Any, ...]:
    state = tensor._state
    if not all(hook.is_removed for hook in state.hooks):
        warnings.warn("hooks of a ShardedTensor are not saved", stacklevel=2)
    spec = None if state.spec is None else (plain_spec(state.spec) or state.spec)
    kind = type(tensor)
    saved = {
        "version": _VERSION,
        "class": kind.__name__ if _CLASSES.get(kind.__name__) is kind else kind,
        "rank": state.rank,
        "place": None if state.members is None else tuple(_place(state.members)),
        "layout": plain_layout(state.layout),
        "spec": spec,
        # A rank that holds nothing saves its tie, which has dtype and device.
        "tensors": [carrier.detach() for carrier in state.carriers],
        "devices": [str(carrier.device) for carrier in state.carriers],
        "requires_grad": state.requires_grad,
        "init_rrefs": state.init_rrefs,
        # Of a tensor of no group, whose shards may be those of any ranks.
        "held": [(rank, box.start, box.stop) for rank, box in state.held]
        if isinstance(state, LooseState)
        else None,
        "attributes": user_attributes(tensor),
    }
    return _rebuild_sharded_tensor, (saved,)


# -- reading ---------------------------------------------------------------------------------------


def _rebuild_sharded_tensor(saved: dict[str, Any]) -> ShardedTensor:
    """The tensor of which `_reduce` wrote this. No rank waits for another."""
    if saved["version"] != _VERSION:
        raise LoadError(
            "saved ShardedTensor",
            expected=f"version {_VERSION} of the format",
            got=saved["version"],
            fix="Read it with the version of shardwise that wrote it.",
        )
    members = None if saved["place"] is None else _members_for(Place(*saved["place"]))
    layout, carriers = layout_from_plain(saved["layout"]), tuple(saved["tensors"])
    if saved.get("held") is not None:
        loose = LooseState(layout, carriers, saved["rank"], None)
        loose.held = tuple((rank, Box(start, stop)) for rank, start, stop in saved["held"])
        state: State = loose
    else:
        group = getattr(members, "process_group", None)
        state = State(layout, carriers, saved["rank"], members, None, group)
    _check_tensors(state)
    state.spec, state.init_rrefs = _spec(saved, layout, carriers), saved["init_rrefs"]
    for carrier in carriers:
        carrier.requires_grad_(saved["requires_grad"])
    kind = saved["class"]
    tensor = wrap(state, _CLASSES[kind] if isinstance(kind, str) else kind)
    for name, value in saved["attributes"].items():
        setattr(tensor, name, value)
    return tensor


def _spec(
    saved: dict[str, Any], layout: Layout, carriers: tuple[torch.Tensor, ...]
) -> ShardingSpec | None:
    """The spec, whose devices are those that `map_location` has put the tensor on."""
    spec = saved["spec"]
    if spec is None:
        return None
    found: ShardingSpec = spec_from_plain(*spec) if type(spec) is tuple else spec
    if [str(carrier.device) for carrier in carriers] == saved["devices"]:
        return found
    return on_device(found, layout.shape, carriers[0].device.type)


def _check_tensors(state: State) -> None:
    """The local tensors are those of the rank's boxes, which a damaged file's need not be."""
    shapes = [box.shape for box in state.boxes] or [(0,)]
    found = [tuple(carrier.shape) for carrier in state.carriers]
    dtypes = {carrier.dtype for carrier in state.carriers}
    if found != shapes or len(dtypes) != 1:
        raise LoadError(
            "local tensors of a saved ShardedTensor",
            rank=state.rank,
            expected=f"shapes {shapes} of one dtype",
            got=f"{found} of {sorted(map(str, dtypes))}",
            fix="The file is damaged, or was edited.",
        )


torch.serialization.add_safe_globals([_rebuild_sharded_tensor])
