"""What a rank brings to an exchange: the transfer that it was asked for, found right."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

from shardwise.comm.load_check import (
    check_arguments,
    check_transfer,
    is_writable,
    name_of,
    span,
)
from shardwise.comm.pages import new_tensor
from shardwise.comm.rank_plan import rank_plan
from shardwise.errors import DeviceError, ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.message_memory import MessageMemory
    from shardwise.comm.rank_plan import RankPlan
    from shardwise.transfer import TransferPlan
    from shardwise.transfer.program import Place

__all__ = [
    "Load",
    "Transfer",
    "is_usual",
    "is_usual_out",
    "load_of",
    "new_tensors",
    "usual_load",
]


_ALIGNMENT = 64  # bytes
_Tensor, _STRIDED = torch.Tensor, torch.strided  # found quicker than in a large module
_kind_of = attrgetter("dtype", "shape", "layout", "device", "requires_grad")


class Transfer(NamedTuple):
    """One tensor to move: its plan and what this rank holds of it.

    `shards` are this rank's, in the order of `plan.source.boxes_of(rank)`; `out`, if given, are the
    tensors to fill, in that of `plan.target.boxes_of(rank)`. Without `out` new ones are made on
    `device`. A rank that holds no shards has to say the `dtype`, and should say the `device`.
    """

    plan: TransferPlan
    shards: Sequence[torch.Tensor]
    out: Sequence[torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    name: str = "tensor"  # in error messages


class Load:
    """A transfer whose arguments were found right: local tensors without autograd.

    New outputs are not made at once, because a batch makes those of many tensors together.
    """

    __slots__ = ("device", "dtype", "is_on_wire", "known", "outputs", "plan", "shards")
    lead: tuple[int, ...] = ()  # of the dims before the tensor's own, which a batch has

    def __init__(
        self,
        known: RankPlan,
        shards: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | None,
        is_on_wire: bool,
    ) -> None:
        self.known, self.plan = known, known.plan
        self.shards, self.dtype = shards, dtype
        self.device = device  # of the outputs that are to be made; None: they were given
        self.is_on_wire = is_on_wire  # whether all local tensors are where messages leave
        self.outputs: list[torch.Tensor] = []

    def make_outputs(self) -> list[torch.Tensor]:
        """The outputs, which are made now unless they were given."""
        if self.device is not None:
            self.outputs = new_tensors(self.known.shapes.target, self.dtype, self.device)
        return self.outputs

    def at(self, place: Place) -> torch.Tensor:
        """The box there, as a view of its shard."""
        shard = (self.outputs if place.is_target else self.shards)[place.shard]
        return shard if place.region is None else shard[place.region]

    def packed(self, place: Place, memory: MessageMemory) -> torch.Tensor:
        """A message of the box there: itself, or a copy."""
        found = self.at(place)
        return found if found.is_contiguous() else memory.take(found.shape, self.dtype).copy_(found)

    def room(self, shape: tuple[int, ...], memory: MessageMemory) -> torch.Tensor:
        """Where a message of one box can land."""
        return memory.take(shape, self.dtype)


def new_tensors(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Tensors of these shapes, with whatever was in their memory.

    Pieces of one tensor follow each other in memory, so that a product with all of them needs no
    copy of them ([Note: stacked pieces] in `ops/stacking.py`), if all start where torch has tensors
    start.
    """
    sizes = list(map(math.prod, shapes))
    if len(sizes) < 2 or any([size * dtype.itemsize % _ALIGNMENT for size in sizes[:-1]]):
        return [new_tensor(shape, dtype, device) for shape in shapes]
    parts = new_tensor((sum(sizes),), dtype, device).split(sizes)
    # Detached, they are no views to autograd, and still count what is written into any of them.
    return [part.view(shape).detach() for part, shape in zip(parts, shapes, strict=True)]


def load_of(transfers: Sequence[Transfer], number: int, members: Communicator) -> Load:
    """Of one of the transfers.

    Raises if what this rank passed does not fit the plan, or the plan not the group.
    """
    transfer = transfers[number]
    if type(transfer) is Transfer:
        plan, shards, out, dtype, device, _ = transfer
        if out is None and device is None:
            usual = usual_load(plan, shards, dtype, members)
            if usual is not None:
                return usual
    check_transfer(transfers, number, members.rank)
    try:
        return _checked_load(transfer, members, repr(transfer.name))
    except ShardwiseError:
        name = name_of(transfers, number)
        if name == repr(transfer.name):
            raise
    return _checked_load(transfer, members, name)  # raises again, and says which it is


def usual_load(
    plan: TransferPlan, shards: object, dtype: torch.dtype | None, members: Communicator
) -> Load | None:
    """The load, if there is nothing special about the tensors and the plan was used before.

    Says no more than None: `load_of` finds the words or the way for anything else.
    """
    known = members.rank_plans.get(id(plan))
    if known is None or not is_usual(shards, dtype, known):
        return None
    assert known.usual_dtype is not None
    return Load(known, shards, known.usual_dtype, members.wire_device, True)


def is_usual(
    shards: object, dtype: torch.dtype | None, known: RankPlan
) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are plain tensors on the wire's device, of the dtype as the last time.

    Looks as little as it can, because in a small exchange every look is seen.
    """
    kinds, usual = known.usual_kinds, known.usual_dtype
    if usual is None or not (type(shards) is tuple or type(shards) is list):
        return False
    if len(shards) != len(kinds):
        return False
    if dtype is not usual and (dtype is not None or not shards):
        return False
    for shard, kind in zip(shards, kinds, strict=True):
        if not isinstance(shard, _Tensor) or _kind_of(shard) != kind or shard.is_neg():
            return False
    return True


def is_usual_out(
    out: object, shards: Sequence[torch.Tensor], known: RankPlan, wire: torch.device
) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether it is what a new output would be, in memory of its own; the shards are usual."""
    if not (type(out) is tuple or type(out) is list) or len(out) != 1:
        return False
    (tensor,) = out
    if (
        not isinstance(tensor, _Tensor)
        or _kind_of(tensor) != (known.usual_dtype, known.only_shape, _STRIDED, wire, False)
        or tensor.is_neg()
        or not tensor.is_contiguous()
        or not is_writable(tensor)
    ):
        return False
    start, stop = span(tensor)
    return all([stop <= first or last <= start for first, last in map(span, shards)])


def _checked_load(transfer: Transfer, members: Communicator, name: str) -> Load:
    wire = members.wire_device
    known = rank_plan(transfer.plan, members, name=name)
    dtype = check_arguments(transfer, known.shapes, members, name)
    known.make_usual(dtype, wire)
    shards = [_plain(shard) for shard in transfer.shards]
    device = None if transfer.out is not None else _device_of_outputs(transfer, members, name)
    outputs = [tensor.detach() for tensor in transfer.out or ()]
    places = {tensor.device for tensor in (*shards, *outputs)}
    load = Load(known, shards, dtype, device, places <= {wire} and device in (None, wire))
    load.outputs = outputs
    return load


def _device_of_outputs(transfer: Transfer, members: Communicator, name: str) -> torch.device:
    if transfer.device is None:
        return transfer.shards[0].device if transfer.shards else members.wire_device
    try:
        return torch.empty(0, device=transfer.device).device  # with its number
    except (RuntimeError, TypeError, AssertionError) as error:  # whatever torch calls it
        raise DeviceError(
            f"{name} device",
            rank=members.rank,
            expected="one that this process has",
            got=repr(transfer.device),
            fix=str(error).splitlines()[0],
        ) from error


def _plain(shard: torch.Tensor) -> torch.Tensor:
    """The shard without autograd, its memory being its values."""
    return shard.detach().resolve_conj().resolve_neg()
