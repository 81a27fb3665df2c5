"""What a rank brings to an exchange: the transfer that it was asked for, found right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.comm.load_check import check_arguments, check_transfer
from shardwise.transfer import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.transfer.program import Place

__all__ = ["Load", "Transfer"]

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


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
    """A transfer whose arguments were found right: local tensors without autograd."""

    __slots__ = ("dtype", "is_on_wire", "outputs", "plan", "shards")
    lead: tuple[int, ...] = ()  # of the dims before the tensor's own, which a batch has

    def __init__(self, transfer: Transfer, members: Communicator) -> None:
        """Raises if what this rank passed does not fit the plan, or the plan not the group.

        Looks at a tensor as little as it can: in a small exchange every look is seen.
        """
        if type(transfer) is not Transfer or type(transfer.plan) is not TransferPlan:
            check_transfer(transfer, members.rank)
        plan, given, out, dtype, device, _ = transfer
        if not plan.rank_set <= members.ranks.members:
            members.ranks.check_members(plan.ranks, what="the plan's layouts")
        shapes = plan.shapes_of(members.rank)
        quick = _quick_dtype(given, shapes.source, dtype, plan.itemsize)
        if quick is None or out is not None or plan.has_pending:
            dtype = check_arguments(transfer, shapes, members.rank)
        else:
            dtype = quick
        self.plan, self.dtype = plan, dtype
        wire = members.wire_device
        self.shards = list(given)
        self.is_on_wire = True  # whether all local tensors are where messages leave and arrive
        for number, shard in enumerate(given):
            if shard.requires_grad or shard.is_neg() or dtype.is_complex:
                self.shards[number] = _plain(shard)
            if shard.device != wire:
                self.is_on_wire = False
        if out is not None:
            self.outputs = [tensor.detach() for tensor in out]
        elif device is None and self.shards:
            self.outputs = [self.shards[0].new_empty(shape) for shape in shapes.target]
            return  # on the device of the shards
        else:
            device = wire if device is None else device
            self.outputs = [
                torch.empty(shape, dtype=dtype, device=device) for shape in shapes.target
            ]
        for output in self.outputs:
            self.is_on_wire &= output.device == wire

    def at(self, place: Place) -> torch.Tensor:
        shard = (self.outputs if place.is_target else self.shards)[place.shard]
        return shard if place.region is None else shard[place.region]


def _quick_dtype(
    tensors: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype | None, itemsize: int
) -> torch.dtype | None:
    """The dtype, if these are dense tensors of the shapes and of one dtype of that size.

    Quick, and says no more: for anything else `check_arguments` finds the words.
    """
    if type(tensors) not in (list, tuple) or len(tensors) != len(shapes):
        return None
    for tensor, shape in zip(tensors, shapes, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            return None
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype is not dtype:
            return None
    is_right = type(dtype) is torch.dtype and dtype not in _QUANTIZED and dtype.itemsize == itemsize
    return dtype if is_right else None


def _plain(shard: torch.Tensor) -> torch.Tensor:
    """The shard without autograd, its memory being its values."""
    return shard.detach().resolve_conj().resolve_neg()
