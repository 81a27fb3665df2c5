"""Many small tensors as one: those of one plan and dtype are stacked, and move together.

Moving a tensor takes a handful of calls into torch for every box. For thousands of small tensors
these calls are all the time, so tensors with the same plan share them: a batch of n is carried out
as one tensor whose elements are n times as large. That costs copies in and out, which is why large
tensors are not batched, and memory, which is why nothing is when there is a cap.

[Note: slices] On a CPU the copies are cheap only while they stay in its cache, and memory that is
used for the first time costs more than the copy into it. So a large batch is cut into slices that
are carried out one after the other, each in the memory of the one before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import foreach_copy, unbind_copy
from shardwise.comm.rank_plan import rank_plan
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.load import Load
    from shardwise.transfer import TransferPlan
    from shardwise.transfer.program import Place

__all__ = ["Batch", "batched"]

_FEWEST = 4  # tensors in a batch
_LARGEST = 1 << 16  # bytes of a tensor on a rank, before or after
_SLICE = 1 << 21  # bytes of a batch on a rank, before or after, where the wire is on a CPU
_SLICE_ELSEWHERE = 1 << 25  # on a GPU what costs is the number of calls


class Batch:
    """Loads of one plan and dtype as one load, with a leading dim for the tensors.

    Holds memory from `fill` to `hand_out` only.
    """

    __slots__ = ("_is_usual", "dtype", "known", "lead", "loads", "outputs", "plan", "shards")
    is_on_wire = True

    def __init__(self, loads: Sequence[Load], members: Communicator) -> None:
        plan, count = loads[0].plan, len(loads)
        self.loads = loads
        self.lead: tuple[int, ...] = (count,)
        self.dtype = loads[0].dtype
        self.plan = plan_reshard(plan.source, plan.target, plan.itemsize * count)
        self.known = rank_plan(self.plan, members)
        # Whether all shards are on the wire's device, and outputs are to be made there.
        self._is_usual = all([load.is_on_wire and load.device is not None for load in loads])
        self.shards: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def fill(self, wire: torch.device) -> None:
        """Stacks the shards."""
        for k in range(len(self.known.shapes.source)):
            held = [load.shards[k] for load in self.loads]
            if not self._is_usual:
                held = [shard.to(wire) for shard in held]
            self.shards.append(torch.stack(held))
        for shape in self.known.shapes.target:
            self.outputs.append(torch.empty(self.lead + shape, dtype=self.dtype, device=wire))

    def at(self, place: Place) -> torch.Tensor:
        stack = (self.outputs if place.is_target else self.shards)[place.shard]
        return stack if place.region is None else stack[(slice(None), *place.region)]

    def hand_out(self) -> None:
        """Gives the loads their outputs, each in memory of its own."""
        if self._is_usual and all([stack.is_cpu for stack in self.outputs]):
            columns = [unbind_copy(stack) for stack in self.outputs]  # quicker than what follows
            for k, load in enumerate(self.loads):
                load.outputs = [column[k] for column in columns]
        else:
            for load in self.loads:
                load.make_outputs()
            for k, stack in enumerate(self.outputs):
                foreach_copy([load.outputs[k] for load in self.loads], list(stack.unbind(0)))
        self.shards.clear()
        self.outputs.clear()


def batched(loads: Sequence[Load], members: Communicator) -> list[list[Load | Batch]]:
    """The same loads by exchange, small ones in batches; the same on every rank.

    Slices of large batches come first, each alone, then all the others together. [Note: slices]
    """
    slices: list[list[Load | Batch]] = []
    others: list[Load | Batch] = []
    for group in _alike(loads):
        held = _bytes_held(group[0].plan)
        if len(group) < _FEWEST or held > _LARGEST:
            others += group
            continue
        room = _SLICE if members.wire_device.type == "cpu" else _SLICE_ELSEWHERE
        most = max(room // max(held, 1), _FEWEST)
        starts = range(0, len(group), most)
        batches = [Batch(group[start : start + most], members) for start in starts]
        if len(batches) == 1:
            others += batches
        else:
            slices += [[batch] for batch in batches]
    return [*slices, others] if others else slices


def _alike(loads: Sequence[Load]) -> list[list[Load]]:
    """The loads by plan and dtype, each in the order of `loads`."""
    # By the plan's value: which plans are one object may differ from rank to rank. A plan that
    # was seen is found by its identity, which is quicker.
    equal: dict[tuple[TransferPlan, torch.dtype], list[Load]] = {}
    seen: dict[tuple[int, torch.dtype], list[Load]] = {}
    for load in loads:
        key = (id(load.plan), load.dtype)
        group = seen.get(key)
        if group is None:
            group = seen[key] = equal.setdefault((load.plan, load.dtype), [])
        group.append(load)
    return list(equal.values())


@lru_cache(maxsize=1024)
def _bytes_held(plan: TransferPlan) -> int:
    """The most bytes that a rank holds, before or after."""
    held = (plan.source.bytes_per_rank(plan.itemsize), plan.output_bytes)
    return max((n for sizes in held for n in sizes.values()), default=0)
