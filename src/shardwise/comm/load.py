"""What a rank brings to an exchange: the transfer that it was asked for, found right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.comm.load_check import check_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.transfer import TransferPlan
    from shardwise.transfer.program import LocalShapes, Place

__all__ = ["Load", "Transfer"]


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

    __slots__ = ("device", "dtype", "outputs", "plan", "shapes", "shards")

    def __init__(self, transfer: Transfer, shapes: LocalShapes, members: Communicator) -> None:
        """Raises if what this rank passed does not fit the plan."""
        plan, given, out, dtype, device, _ = transfer
        if out is not None or plan.is_reduced or not _fit(given, shapes.source, dtype):
            dtype = check_arguments(transfer, shapes, members.rank)
        elif dtype is None:
            dtype = given[0].dtype
        if dtype.itemsize != plan.itemsize:
            check_arguments(transfer, shapes, members.rank)
        self.plan, self.shapes, self.dtype = plan, shapes, dtype
        self.shards = [shard if _is_plain(shard) else _plain(shard) for shard in given]
        self.outputs = [] if out is None else [tensor.detach() for tensor in out]
        self.device = device
        if device is None:
            self.device = given[0].device if given else members.wire_device

    def make_outputs(self) -> None:
        if not self.outputs:
            self.outputs = [
                torch.empty(shape, dtype=self.dtype, device=self.device)
                for shape in self.shapes.target
            ]

    def at(self, place: Place) -> torch.Tensor:
        shard = (self.outputs if place.is_target else self.shards)[place.shard]
        return shard if place.region is None else shard[place.region]


def _fit(tensors: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype | None) -> bool:
    """Whether these are dense tensors of the shapes and one dtype; quick, and says no more."""
    if type(tensors) not in (list, tuple) or len(tensors) != len(shapes):
        return False
    for tensor, shape in zip(tensors, shapes, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            return False
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype is not dtype:
            return False
    return dtype is not None


def _is_plain(shard: torch.Tensor) -> bool:
    return not (shard.requires_grad or shard.is_conj() or shard.is_neg())


def _plain(shard: torch.Tensor) -> torch.Tensor:
    """The shard without autograd, its memory being its values."""
    return shard.detach().resolve_conj().resolve_neg()
