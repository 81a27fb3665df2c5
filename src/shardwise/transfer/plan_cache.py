"""The plans used lately: asking again for a plan between two layouts takes microseconds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardwise.transfer.plan import TransferPlan

if TYPE_CHECKING:
    from shardwise.geometry import Layout

__all__ = ["PlanCache", "plan_reshard"]


def plan_reshard(source: Layout, target: Layout, itemsize: int) -> TransferPlan:
    """The plan from `source` to `target`, both of one shape; cached.

    No ranks are needed to make, read or cost a plan.
    """
    return _cache.get(source, target, itemsize)


class PlanCache:
    """The plans used lately, at most so many and of so much memory.

    When there is no room, the oldest goes, unless it was found since it was last the oldest. The
    same two layout objects find their plan by identity, which hashes nothing; equal ones by value.
    """

    def __init__(self, max_plans: int, max_bytes: int) -> None:
        self._plans: dict[tuple[Layout, Layout, int], TransferPlan] = {}
        # With the plan's id, and the layouts whose ids these are, which keeps the ids theirs.
        self._by_id: dict[tuple[int, int, int], tuple[TransferPlan, int, Layout, Layout]] = {}
        self._found: dict[int, bool] = {}  # ids of plans; written quicker than a set
        self._lock = threading.Lock()
        self._max_plans, self._max_bytes = max_plans, max_bytes

    def get(self, source: Layout, target: Layout, itemsize: int) -> TransferPlan:
        """The plan between two layouts, made if it is not known."""
        known = None
        if type(itemsize) is int:  # 4.0 and True would be found, too
            known = self._by_id.get((id(source), id(target), itemsize))
        if known is None:
            return self._equal(source, target, itemsize)
        plan, its_id, _, _ = known
        self._found[its_id] = True
        return plan

    def _equal(self, source: Layout, target: Layout, itemsize: int) -> TransferPlan:
        wanted = TransferPlan(source, target, itemsize)
        key = (source, target, wanted.itemsize)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                self._trim()
                plan = self._plans[key] = wanted
            else:
                self._found[id(plan)] = True
            if len(self._by_id) >= 4 * self._max_plans:  # layouts made anew time after time
                self._by_id.clear()
            self._by_id[id(source), id(target), plan.itemsize] = plan, id(plan), source, target
            return plan

    def _trim(self) -> None:
        """Makes room for one more."""
        held = sum(plan.nbytes for plan in self._plans.values())
        num_plans = len(self._plans)
        while self._plans and (len(self._plans) >= self._max_plans or held > self._max_bytes):
            key = next(iter(self._plans))
            plan = self._plans.pop(key)
            if self._found.pop(id(plan), False):
                self._plans[key] = plan
            else:
                held -= plan.nbytes
        if len(self._plans) < num_plans:
            kept = set(map(id, self._plans.values()))
            self._by_id = {k: known for k, known in self._by_id.items() if id(known[0]) in kept}


_cache = PlanCache(max_plans=1024, max_bytes=256 << 20)
