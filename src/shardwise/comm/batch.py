"""Many small tensors as one: those of one plan and dtype are stacked, and move together.

Moving a tensor takes a handful of calls into torch for every box. For thousands of small tensors
these calls are all the time, so tensors with the same plan share them: a batch of n is carried out
as one tensor whose elements are n times as large. That costs copies in and out, which is why large
tensors are not batched, and memory, which is why nothing is when there is a cap.

[Note: slices] On a CPU the copies are cheap only while they stay in its cache, and memory that is
used for the first time costs more than the copy into it. So a large batch is cut into slices that
are carried out one after the other. While one flies the next is packed, so two sets of stacks and
messages are enough for all of them, and slices use them in turns; a few more where other threads
hand out the results (`aside.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import foreach_copy, unbind_copy
from shardwise.comm.alike import FEWEST, bytes_held
from shardwise.comm.load import new_tensors
from shardwise.comm.pages import new_tensor
from shardwise.comm.rank_plan import rank_plan
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.alike import Alike
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.load import Load
    from shardwise.comm.message_memory import MessageMemory
    from shardwise.transfer.program import Place

__all__ = ["Batch", "batched"]

_SLICE = 1 << 21  # bytes of a batch on a rank, before or after, where the wire is on a CPU
_SLICE_ELSEWHERE = 1 << 25  # on a GPU what costs is the number of calls


class _Staging:
    """Memory that the slices of a batch use in turns. [Note: slices]"""

    def __init__(self, num_slices: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_to_come = num_slices
        self._dtype, self._device = dtype, device
        self._free: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def enter(self) -> None:
        """Every slice does, before it takes anything; what is free at the last goes."""
        self._num_to_come -= 1
        if not self._num_to_come:
            self._free.clear()

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        free = self._free.get(shape)
        return free.pop() if free else new_tensor(shape, self._dtype, self._device)

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._num_to_come:
            for tensor in tensors:
                self._free.setdefault(tensor.shape, []).append(tensor)


class Batch:
    """Some transfers of one plan and dtype as one load, with a leading dim for the tensors.

    Holds memory from `fill` to `hand_out` only.
    """

    __slots__ = (
        "_group",
        "_is_usual",
        "_messages",
        "_staging",
        "_wire",
        "dtype",
        "known",
        "lead",
        "numbers",
        "outputs",
        "plan",
        "shards",
    )
    is_on_wire = True

    def __init__(
        self, group: Alike, numbers: Sequence[int], staging: _Staging, members: Communicator
    ) -> None:
        plan, count = group.plan, len(numbers)
        self._group, self._wire = group, members.wire_device
        self.numbers = numbers
        self.lead: tuple[int, ...] = (count,)
        self.dtype = group.dtype
        self.plan = plan_reshard(plan.source, plan.target, plan.itemsize * count)
        self.known = rank_plan(self.plan, members)
        # Whether all shards are on the wire's device, and outputs are to be made there.
        loads = [group.loads[number] for number in numbers if number in group.loads]
        self._is_usual = all([load.is_on_wire and load.device is not None for load in loads])
        self.shards: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self._messages: list[torch.Tensor] = []
        self._staging = staging

    def fill(self) -> None:
        """Stacks the shards."""
        self._staging.enter()
        held = [self._group.shards[number] for number in self.numbers]
        for column, shape in zip(zip(*held, strict=True), self.known.shapes.source, strict=True):
            there = column if self._is_usual else [shard.to(self._wire) for shard in column]
            with torch.no_grad():
                self.shards.append(torch.stack(there, out=self._take(shape)))
        self.outputs += map(self._take, self.known.shapes.target)

    def at(self, place: Place) -> torch.Tensor:
        """The box there of all its tensors, one after the other."""
        stack = (self.outputs if place.is_target else self.shards)[place.shard]
        return stack if place.region is None else stack[(slice(None), *place.region)]

    def packed(self, place: Place, memory: MessageMemory) -> torch.Tensor:
        """A message of that box of all its tensors."""
        found = self.at(place)
        return found if found.is_contiguous() else self.room(found.shape[1:], memory).copy_(found)

    def room(self, shape: tuple[int, ...], memory: MessageMemory) -> torch.Tensor:
        """Where a message of one box of all its tensors can land: in memory of the batch's own."""
        self._messages.append(self._take(shape))
        return self._messages[-1]

    def _take(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._staging.take(self.lead + shape)

    def hand_out(self, results: list[list[torch.Tensor]]) -> None:
        """Makes the results, each in memory of its own."""
        if self._is_usual and self._wire.type == "cpu":
            columns = [unbind_copy(stack) for stack in self.outputs]  # quicker than what follows
            # No rows if this rank gets nothing; then the results are empty as they are.
            for number, row in zip(self.numbers, zip(*columns, strict=True), strict=False):
                results[number] = list(row)
        else:
            for number in self.numbers:
                results[number] = self._new_outputs(number)
            for k, stack in enumerate(self.outputs):
                foreach_copy([results[number][k] for number in self.numbers], list(stack.unbind(0)))
        for staged in (self.shards, self.outputs, self._messages):
            self._staging.give_back(staged)
            staged.clear()

    def _new_outputs(self, number: int) -> list[torch.Tensor]:
        load = self._group.loads.get(number)
        if load is not None:
            return load.make_outputs()
        return new_tensors(self.known.shapes.target, self.dtype, self._wire)


def batched(groups: Sequence[Alike], members: Communicator) -> list[list[Load | Batch]]:
    """All the transfers by exchange, small ones in batches; the same on every rank.

    Slices of large batches come first, each alone, then all the others together. [Note: slices]
    """
    slices: list[list[Load | Batch]] = []
    others: list[Load | Batch] = []
    for group in groups:
        numbers = group.numbers
        if not group.is_batched:
            others += [group.loads[number] for number in numbers]
            continue
        room = _SLICE if members.wire_device.type == "cpu" else _SLICE_ELSEWHERE
        most = max(room // max(bytes_held(group.plan), 1), FEWEST)
        parts = [numbers[start : start + most] for start in range(0, len(numbers), most)]
        staging = _Staging(len(parts), group.dtype, members.wire_device)
        batches = [Batch(group, part, staging, members) for part in parts]
        if len(batches) == 1:
            others += batches
        else:
            slices += [[batch] for batch in batches]
    return [*slices, others] if others else slices
