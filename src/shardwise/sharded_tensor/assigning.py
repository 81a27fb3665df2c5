"""`_metadata`, `_local_shards`, `_sharding_spec`, `_process_group`: read and assigned by callers.

[Note: assignments in sequence] Callers assign several of them one after the other: new shards, then
the metadata that they fit, then the spec. What does not fit the rest yet is *held*, and each
further assignment tries again. Until all fit, the tensor can be read by these four attributes only:
its state is `Unsettled`, which answers everything else with an error that says what is missing.
Nothing here communicates; every rank assigns for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.comm.differentiable import make_tie
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, OpError, ShardwiseError
from shardwise.sharded_tensor.fitting import (
    check_metadata,
    check_properties,
    described_spec,
    matched,
)
from shardwise.sharded_tensor.metadata_of_shards import listed_shards
from shardwise.sharded_tensor.seed_views import local_shards_of, metadata_of
from shardwise.sharded_tensor.state import LooseState, State
from shardwise.sharding_spec.on_device import on_device
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout
    from shardwise.metadata import ShardedTensorMetadata
    from shardwise.sharded_tensor.shard import Shard

__all__ = ["Assigned", "Unsettled"]


class Unsettled:
    """In place of a `State` while what was assigned does not fit. [Note: assignments ...]"""

    __slots__ = ("before", "held", "why")

    def __init__(self, before: State, held: Mapping[str, Any], why: Exception) -> None:
        self.before, self.held, self.why = before, held, why

    def __getattr__(self, name: str) -> Any:
        raise OpError(
            f"ShardedTensor between two assignments: {', '.join(self.held)} assigned, which "
            f"does not fit the rest: {self.why}",
            rank=self.before.rank,
            fix="Assign what belongs to it (_local_shards, _metadata, _sharding_spec) before "
            "the tensor is used.",
        )


class Assigned:
    """An attribute of a tensor that reads its state, and whose assignment makes a new one."""

    def __init__(self, read: Callable[[State], Any]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        state = tensor._state
        if not isinstance(state, Unsettled):
            return self._read(state)
        return state.held[self._name] if self._name in state.held else self._read(state.before)

    def __set__(self, tensor: Any, value: Any) -> None:
        state = tensor._state
        before, held = state, {}
        if isinstance(state, Unsettled):
            before, held = state.before, dict(state.held)
        held[self._name] = _checked(self._name, value)
        try:
            after = _settled(before, held)
        except ShardwiseError as why:
            tensor._state = Unsettled(before, held, why)
        else:
            _put(tensor, before, after)


def _checked(name: str, value: Any) -> Any:
    """What can never fit raises at once."""
    if name == "_local_shards":
        return listed_shards(value)
    if name == "_metadata":
        check_metadata(value)
    elif name == "_sharding_spec" and not isinstance(value, ShardingSpec):
        raise ArgumentTypeError(name, expected="a ShardingSpec", got=type(value).__name__)
    elif name == "_process_group" and value is not None:
        communicator(value)
    return value


def _settled(before: State, held: Mapping[str, Any]) -> State:
    """The state that the held values and the rest of `before` make; raises if they do not fit."""
    members = before.members
    if "_process_group" in held:
        group = held["_process_group"]
        members = None if group is None else communicator(group)
    metadata, shards = held.get("_metadata"), held.get("_local_shards")
    if isinstance(before, LooseState) and members is None:
        return _loose(before, held)
    spec = _spec(before, metadata, held.get("_sharding_spec"))
    shape = before.layout.shape if metadata is None else tuple(metadata.size)
    layout = before.layout if spec is before.spec and metadata is None else spec.layout(shape)
    rank = before.rank if members is None else members.rank
    if members is not None:
        members.ranks.check_members(layout.ranks, what="the tensor's layout")
    carriers = _carriers(before, shards, metadata, layout, rank)
    if shards and "_sharding_spec" not in held and metadata is None:
        spec = _where_shards_are(spec, layout.shape, rank, carriers)
    made = State(layout, carriers, rank, members, spec, _group_of(before, members))
    made.init_rrefs, made.remote = before.init_rrefs, before.remote
    return made


def _loose(before: State, held: Mapping[str, Any]) -> State:
    from shardwise.sharded_tensor.from_shards import loose_state

    return loose_state(
        held.get("_local_shards", local_shards_of(before)),
        held.get("_metadata", metadata_of(before)),
        _spec(before, held.get("_metadata"), held.get("_sharding_spec")),
    )


def _spec(
    before: State, metadata: ShardedTensorMetadata | None, spec: ShardingSpec | None
) -> ShardingSpec:
    """The assigned spec, the present one if it still says all, or one for the metadata."""
    if metadata is None:
        return before.sharding_spec() if spec is None else spec
    if spec is not None:
        return described_spec(metadata, spec)
    known = before.sharding_spec()
    try:
        described_spec(metadata, known)
        own = known.build_metadata(metadata.size, metadata.tensor_properties).shards_metadata
    except Exception:  # of a user's spec that is for tensors of another size
        return described_spec(metadata)
    is_same_place = {*map(str, own)} == {*map(str, metadata.shards_metadata)}
    # Metadata does not tell replicas and addends apart; the spec that stands does.
    if is_same_place or not before.layout.has_every_box_once:
        return known
    return described_spec(metadata)


def _carriers(
    before: State,
    shards: list[Shard] | None,
    metadata: ShardedTensorMetadata | None,
    layout: Layout,
    rank: int,
) -> tuple[torch.Tensor, ...]:
    """The local tensors in the layout's order, or a tie; checked against the metadata."""
    listed = local_shards_of(before) if shards is None else shards
    if shards is None and layout == before.layout and not isinstance(before, LooseState):
        tensors = before.shards
    else:
        tensors = tuple(matched(listed, layout, rank))
    if metadata is not None and layout.pending is None:
        for shard in listed:
            check_properties(shard, metadata.tensor_properties, rank)
    if tensors:
        return tensors
    if metadata is None and not before.shards:
        return before.carriers
    like = before if metadata is None else metadata.tensor_properties
    return (make_tie(like.dtype, before.device).requires_grad_(like.requires_grad),)


def _where_shards_are(
    spec: ShardingSpec, shape: tuple[int, ...], rank: int, carriers: tuple[torch.Tensor, ...]
) -> ShardingSpec:
    """The spec on the device of the shards, to which they may just have been moved."""
    devices = {carrier.device for carrier in carriers}
    if len(devices) != 1 or devices == set(spec.local_devices(shape, rank)):
        return spec
    return on_device(spec, shape, devices.pop().type)


def _group_of(before: State, members: Communicator | None) -> Any:
    if members is before.members:
        return before.process_group
    return getattr(members, "process_group", None)


def _put(tensor: Any, before: State, after: State) -> None:
    """Makes `after` the tensor's state; hooks follow."""
    from shardwise.sharded_tensor.tensor import adopt

    if _outside(before) == _outside(after):
        tensor._state = after
    else:
        adopt(tensor, after)
    if all(a is b for a, b in zip(before.carriers, after.carriers, strict=False)):
        after.hooks = (*after.hooks, *before.hooks)
    elif after.requires_grad:
        for hook in before.hooks:
            hook.attach(after)


def _outside(state: State) -> tuple[Any, ...]:
    """What the outer tensor shows."""
    return state.layout.shape, state.dtype, state.device, state.requires_grad
