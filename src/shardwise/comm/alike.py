"""The transfers of an exchange, sorted by plan and dtype; many small ones are looked at together.

Looking at a tensor takes about as long as moving one of a few kilobytes. So of small tensors that
share their plan only the first is looked at by itself. The others have to be like it, which a few
passes over all of them tell, without Python code for each.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING

import torch

from shardwise.comm.load import Load, Transfer, load_of
from shardwise.comm.lowering import pattern_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.transfer import TransferPlan

__all__ = ["FEWEST", "Alike", "bytes_held", "sort_out"]

FEWEST = 4  # tensors in a batch
_LARGEST = 1 << 16  # bytes of a tensor on a rank, before or after

_shards_of = attrgetter("shards")
# In one pass, because a tensor that was not used for a while is slow to reach.
_kind_of = attrgetter("dtype", "shape", "layout", "device")


class Alike:
    """Transfers of one plan and dtype, by their numbers in the exchange."""

    __slots__ = ("by_collective", "dtype", "is_small", "known", "loads", "plan", "shards")

    def __init__(self, load: Load, members: Communicator) -> None:
        """For those that are like this load, which is not among them yet."""
        self.known, self.plan, self.dtype = load.known, load.plan, load.dtype
        self.by_collective = pattern_of(load, members) is not None
        self.is_small = not self.by_collective and bytes_held(load.plan) <= _LARGEST
        self.shards: dict[int, Sequence[torch.Tensor]] = {}
        # Of those that were looked at alone. The shards of the others are on the wire's device,
        # as their outputs will be, but not plain: they may need gradients or a change of sign.
        self.loads: dict[int, Load] = {}

    @property
    def numbers(self) -> list[int]:
        """Ascending."""
        return sorted(self.shards)

    @property
    def is_batched(self) -> bool:
        """The same on every rank; if not, all have their loads."""
        return self.is_small and len(self.shards) >= FEWEST


def sort_out(transfers: Sequence[Transfer], members: Communicator) -> list[Alike]:
    """The transfers by plan and dtype, in the order of the first of each; the same on every rank.

    Raises if what this rank passed does not fit a plan, or a plan not the group.
    """
    # By the plan's value: which plans are one object may differ from rank to rank.
    found: dict[tuple[TransferPlan, torch.dtype], Alike] = {}

    def group_of(load: Load) -> Alike:
        group = found.get((load.plan, load.dtype))
        if group is None:
            group = found[load.plan, load.dtype] = Alike(load, members)
        return group

    for numbers in _same_plan(transfers):
        listed = [transfers[number] for number in numbers]
        first = load_of(transfers, numbers[0], members)
        group = group_of(first)
        is_many = group.is_small and len(numbers) >= FEWEST
        if is_many and _are_like(first, listed, members.wire_device):
            group.shards.update(zip(numbers, map(_shards_of, listed), strict=True))
            continue
        for number in numbers:
            load = first if number == numbers[0] else load_of(transfers, number, members)
            group = group_of(load)
            group.shards[number], group.loads[number] = load.shards, load
    return sorted(found.values(), key=lambda group: min(group.shards))


def _same_plan(transfers: Sequence[Transfer]) -> list[list[int]]:
    """The numbers of those that have one plan object and say one dtype, or none."""
    if set(map(type, transfers)) != {Transfer}:
        return [[number] for number in range(len(transfers))]  # one may be anything
    plans, _, _, dtypes, _, _ = zip(*transfers, strict=True)
    if len(set(map(id, plans))) == len(set(map(id, dtypes))) == 1:  # as of thousands they often do
        return [list(range(len(transfers)))]
    found: dict[tuple[int, int], list[int]] = {}
    for number, key in enumerate(zip(map(id, plans), map(id, dtypes), strict=True)):
        found.setdefault(key, []).append(number)
    return list(found.values())


def _are_like(first: Load, transfers: Sequence[Transfer], wire: torch.device) -> bool:
    """Whether all transfers, which have its plan, are right, and nothing about them is special."""
    _, held, outs, _, devices, _ = zip(*transfers, strict=True)
    shapes = first.known.shapes.source
    if not (
        set(map(type, outs)) == {NoneType}
        and set(map(type, devices)) <= {NoneType, torch.device}
        and set(devices) <= {None, wire}
        and set(map(type, held)) <= {list, tuple}
        and set(map(len, held)) == {len(shapes)}
    ):
        return False
    for column, shape in zip(zip(*held, strict=True), shapes, strict=True):
        if not all([issubclass(kind, torch.Tensor) for kind in set(map(type, column))]):
            return False
        if set(map(_kind_of, column)) != {(first.dtype, shape, torch.strided, wire)}:
            return False
    return True


@lru_cache(maxsize=1024)
def bytes_held(plan: TransferPlan) -> int:
    """The most bytes that a rank holds, before or after."""
    held = (plan.source.bytes_per_rank(plan.itemsize), plan.output_bytes)
    return max((n for sizes in held for n in sizes.values()), default=0)
