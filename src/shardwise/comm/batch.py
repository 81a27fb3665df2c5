"""Many small tensors as one: those of one plan and dtype are stacked, and move together.

Moving a tensor takes a handful of calls into torch for every box. For thousands of small tensors
these calls are all the time, so tensors with the same plan share them: a batch of n is carried out
as one tensor whose elements are n times as large. That costs copies in and out, which is why large
tensors are not batched, and memory, which is why nothing is when there is a cap.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.load import Load
    from shardwise.transfer import TransferPlan
    from shardwise.transfer.program import Place

__all__ = ["Batch", "batched"]

_FEWEST = 4  # tensors in a batch
_LARGEST = 1 << 16  # bytes of a tensor on a rank, before or after


class Batch:
    """Loads of one plan and dtype as one load, with a leading dim for the tensors."""

    __slots__ = ("dtype", "is_on_wire", "lead", "loads", "outputs", "plan", "shards")

    def __init__(self, loads: Sequence[Load], wire: torch.device) -> None:
        first, count = loads[0], len(loads)
        self.loads = loads
        self.lead: tuple[int, ...] = (count,)
        self.dtype = first.dtype
        self.plan = plan_reshard(first.plan.source, first.plan.target, first.plan.itemsize * count)
        self.is_on_wire = True
        self.shards = [
            torch.stack([load.shards[k].to(wire) for load in loads])
            for k in range(len(first.shards))
        ]
        self.outputs = [
            torch.empty((count, *output.shape), dtype=self.dtype, device=wire)
            for output in first.outputs
        ]

    def at(self, place: Place) -> torch.Tensor:
        stack = (self.outputs if place.is_target else self.shards)[place.shard]
        return stack if place.region is None else stack[(slice(None), *place.region)]

    def finish(self) -> None:
        """Hands the results to the loads."""
        for k, stack in enumerate(self.outputs):
            foreach_copy([load.outputs[k] for load in self.loads], list(stack.unbind(0)))


def batched(loads: Sequence[Load], wire: torch.device) -> list[Load | Batch]:
    """The same loads, small ones in batches; the same on every rank."""
    # By the plan's value: which plans are one object may differ from rank to rank.
    alike: dict[tuple[TransferPlan, torch.dtype], list[Load]] = defaultdict(list)
    for load in loads:
        alike[load.plan, load.dtype].append(load)
    found: list[Load | Batch] = []
    for group in alike.values():
        if len(group) >= _FEWEST and _is_small(group[0].plan):
            found.append(Batch(group, wire))
        else:
            found += group
    return found


@lru_cache(maxsize=1024)
def _is_small(plan: TransferPlan) -> bool:
    held = (plan.source.bytes_per_rank(plan.itemsize), plan.output_bytes)
    return max((n for sizes in held for n in sizes.values()), default=0) <= _LARGEST
