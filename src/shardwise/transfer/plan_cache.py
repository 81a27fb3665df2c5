"""The plans used lately: asking again for a plan between two layouts takes microseconds."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.transfer.plan import TransferPlan

if TYPE_CHECKING:
    from shardwise.geometry import Layout

__all__ = ["PlanCache", "plan_reshard"]

_WEIGHED_AT_ONCE = 2  # plans, before another is added


def plan_reshard(source: Layout, target: Layout, itemsize: int) -> TransferPlan:
    """The plan from `source` to `target`, both of one shape; cached.

    No ranks are needed to make, read or cost a plan.
    """
    return _cache.get(source, target, itemsize)


_Ids = tuple[int, int, int]  # of the layouts; itemsize
_Ends = tuple["weakref.ref[Layout]", "weakref.ref[Layout]"]


@dataclass(slots=True, eq=False)
class _Known:
    """A plan in the cache."""

    plan: TransferPlan
    was_found: bool = False  # since it was last the oldest
    nbytes: int = 0  # when it was last weighed
    names: dict[_Ids, _Ends] = field(default_factory=dict)  # layouts that find it by identity


class PlanCache:
    """The plans used lately, at most so many and of so much memory.

    When there is no room, the oldest goes, unless it was found since it was last the oldest. Before
    all others goes one that takes more than half the memory, in place of many.

    The same two layout objects find their plan by identity, which hashes nothing; equal ones by
    value.

    Only a plan holds layouts, its own. Others that found it are known as long as they live: when
    one dies, before its id can be another's, what is known of it goes, too.

    Plans grow as they are used, so they are weighed in turn: each time that one is added, the one
    that was added last, and one more.
    """

    def __init__(self, max_plans: int, max_bytes: int) -> None:
        self._plans: dict[tuple[Layout, Layout, int], _Known] = {}
        self._by_id: dict[_Ids, _Known] = {}
        self._turn: OrderedDict[_Known, None] = OrderedDict()  # the next to be weighed first
        self._held = 0  # bytes of all plans as they were last weighed
        self._lock = threading.Lock()
        self._max_plans, self._max_bytes = max_plans, max_bytes

    def get(self, source: Layout, target: Layout, itemsize: int) -> TransferPlan:
        """The plan between two layouts, made if it is not known."""
        known = None
        if type(itemsize) is int:  # 4.0 and True would be found, too
            known = self._by_id.get((id(source), id(target), itemsize))
        if known is None:
            return self._equal(source, target, itemsize)
        known.was_found = True
        return known.plan

    def _equal(self, source: Layout, target: Layout, itemsize: int) -> TransferPlan:
        wanted = TransferPlan(source, target, itemsize)
        key = (source, target, wanted.itemsize)
        with self._lock:
            known = self._plans.get(key)
            if known is None:
                self._weigh()
                self._trim()
                known = self._plans[key] = _Known(wanted)
                self._turn[known] = None
                self._turn.move_to_end(known, last=False)
            else:
                known.was_found = True
            self._name(known, source, target)
            return known.plan

    def _name(self, known: _Known, source: Layout, target: Layout) -> None:
        """From now on these two find the plan by identity."""
        if len(self._by_id) >= 4 * self._max_plans:  # of many equal layouts that are in use
            for other in self._plans.values():
                self._forget_names(other)
        ids = (id(source), id(target), known.plan.itemsize)
        by_id, names = self._by_id, known.names

        def forget(_: object) -> None:  # at any time in any thread, so without the lock
            by_id.pop(ids, None)
            names.pop(ids, None)

        names[ids] = (weakref.ref(source, forget), weakref.ref(target, forget))
        by_id[ids] = known

    def _forget_names(self, known: _Known) -> None:
        while known.names:  # which may die meanwhile
            try:
                ids, ends = known.names.popitem()
            except KeyError:
                return
            self._by_id.pop(ids, None)
            del ends  # now that nobody can be taken for one of them

    def _weigh(self) -> None:
        for known in list(itertools.islice(self._turn, _WEIGHED_AT_ONCE)):
            self._turn.move_to_end(known)
            before, known.nbytes = known.nbytes, known.plan.nbytes
            self._held += known.nbytes - before

    def _trim(self) -> None:
        """Makes room for one more."""
        while self._plans and (len(self._plans) >= self._max_plans or self._held > self._max_bytes):
            key, is_forced = self._next_to_go()
            known = self._plans.pop(key)
            if known.was_found and not is_forced:
                known.was_found = False
                self._plans[key] = known
            else:
                self._held -= known.nbytes
                del self._turn[known]
                self._forget_names(known)
                known.plan.forget_schedules()

    def _next_to_go(self) -> tuple[tuple[Layout, Layout, int], bool]:
        """The key of a plan, and whether it goes in any case."""
        if self._held > self._max_bytes:
            for key, known in self._plans.items():
                if 2 * known.nbytes > self._max_bytes:
                    return key, True
        return next(iter(self._plans)), False


_cache = PlanCache(max_plans=1024, max_bytes=256 << 20)
