"""Plans that are found again, and how many of them are kept."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.errors import ArgumentTypeError
from shardwise.geometry import Boxes, Layout
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.plan_cache import PlanCache, plan_reshard
from shardwise.transfer.schedule import make_schedule


def test_a_plan_is_cached_by_its_layouts() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    plan = plan_reshard(rows, columns, 4)
    again = Layout(rows.shape, list(rows.boxes), rows.owners)
    assert plan_reshard(again, columns, 4) is plan
    assert plan_reshard(rows, columns, 8) is not plan
    assert plan_reshard(rows, columns, int(np.int64(4))) is plan


@pytest.mark.parametrize("wrong", [4.0, True, None, [4]])
def test_an_itemsize_that_equals_a_known_one_and_is_no_whole_number_is_refused(wrong: Any) -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    for itemsize in (1, 4):
        plan_reshard(rows, columns, itemsize)
    with pytest.raises(ArgumentTypeError, match="itemsize: expected a whole number"):
        plan_reshard(rows, columns, wrong)


@pytest.mark.parametrize("make", [plan_reshard, TransferPlan])
def test_a_dtype_in_place_of_an_itemsize_gets_a_hint(make: Any) -> None:
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    with pytest.raises(ArgumentTypeError, match=r"float32\. Pass torch\.float32\.itemsize\."):
        make(rows, rows, torch.float32)


def test_the_cache_keeps_what_is_used_and_no_more_than_it_may() -> None:
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=3, max_bytes=1 << 20)
    kept = cache.get(rows, rows, 1)
    for itemsize in range(2, 20):
        cache.get(rows, rows, itemsize)
        assert cache.get(rows, rows, 1) is kept
        assert len(cache._plans) <= 3
    first = cache.get(rows, rows, 100)
    for itemsize in range(101, 105):
        cache.get(rows, rows, itemsize)
    assert cache.get(rows, rows, 100) is not first


def test_large_plans_leave_the_cache_first() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(32)).layout((64, 64)) for dim in (0, 1))
    cache = PlanCache(max_plans=100, max_bytes=1000)
    large = cache.get(rows, columns, 4)
    assert large.moves.nbytes > 1000
    cache.get(columns, rows, 4)
    assert cache.get(rows, columns, 4) is not large


def test_one_plan_that_takes_most_of_the_memory_goes_before_many() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(32)).layout((64, 64)) for dim in (0, 1))
    small = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=100, max_bytes=1 << 16)
    few = [cache.get(small, small, itemsize) for itemsize in range(1, 20)]
    large = cache.get(rows, columns, 4)
    for cap in range(1000, 1004):
        large.schedule(cap)
    assert large.nbytes > 1 << 16
    for _ in range(2):
        assert cache.get(rows, columns, 4) is large
        assert [cache.get(small, small, itemsize) for itemsize in range(1, 20)] == few
    for itemsize in (20, 21):
        cache.get(small, small, itemsize)
    assert {known.plan for known in cache._plans.values()} >= set(few)
    assert cache.get(rows, columns, 4) is not large


def test_a_plan_that_left_the_cache_is_held_by_nothing_else() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    cache = PlanCache(max_plans=2, max_bytes=1 << 20)
    plan = cache.get(rows, columns, 4)
    schedule = make_schedule([plan, plan], 1000)
    assert make_schedule([plan, plan], 1000) is schedule
    assert make_schedule([plan, plan], 1001) is not schedule
    alive = weakref.ref(plan)
    other = cache.get(columns, rows, 4)
    make_schedule([other, plan], 1000)
    del plan, schedule, other
    for itemsize in (1, 2, 3):
        cache.get(rows, columns, itemsize)
    assert alive() is None


def test_sets_of_plans_are_scheduled_by_many_threads_at_once() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    plan = TransferPlan(rows, columns, 4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            caps = [1000 + k % 130 for k in range(2000)]
            found = list(pool.map(lambda cap: make_schedule([plan, plan], cap), caps))
    finally:
        sys.setswitchinterval(interval)
    assert [schedule.max_bytes for schedule in found] == caps


def test_a_huge_plan_stays_where_only_the_number_of_plans_is_full() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(32)).layout((64, 64)) for dim in (0, 1))
    small = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=4, max_bytes=1 << 17)
    large = cache.get(rows, columns, 4)
    large.schedule()
    assert 1 << 16 < large.nbytes < 1 << 17
    for itemsize in range(1, 20):
        assert cache.get(rows, columns, 4) is large
        cache.get(small, small, itemsize)


def _again(layout: Layout) -> Layout:
    return Layout(layout.shape, list(layout.boxes), layout.owners)


def test_equal_layouts_are_found_by_identity_the_second_time() -> None:
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=2, max_bytes=1 << 20)
    plan = cache.get(rows, rows, 4)
    in_use = [_again(rows) for _ in range(20)]  # more than there is room for
    for again in in_use:
        assert cache.get(again, rows, 4) is plan
        assert cache._by_id[id(again), id(rows), 4].plan is plan
        assert len(cache._by_id) <= 8
    for itemsize in range(1, 4):
        cache.get(rows, rows, itemsize)
    held = [known.plan for known in cache._plans.values()]
    assert all(known.plan in held for known in cache._by_id.values())


def test_layouts_that_are_dropped_are_not_kept_nor_taken_for_others() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    cache = PlanCache(max_plans=8, max_bytes=1 << 20)
    plan = cache.get(rows, columns, 4)
    for _ in range(20):
        source, target = _again(rows), _again(columns)
        ids = (id(source), id(target), 4)
        assert cache.get(source, target, 4) is plan
        assert ids in cache._by_id
        alive = weakref.ref(source)
        del source
        assert alive() is None
        assert ids not in cache._by_id
        del target
    assert list(cache._by_id) == [(id(rows), id(columns), 4)]


def _two_tilings(num_boxes: int, *, first_rank: int) -> tuple[Layout, Layout]:
    size = 3 * num_boxes
    lows = [np.arange(num_boxes) * 3, np.r_[0, np.arange(1, num_boxes) * 3 + 1]]
    owners = np.r_[first_rank, np.arange(1, num_boxes) % 8]
    source, target = (
        Layout((size,), Boxes(low[:, None], np.r_[low[1:], size][:, None]), owners) for low in lows
    )
    return source, target


def test_a_plan_counts_all_that_it_holds() -> None:
    def make(first_rank: int) -> TransferPlan:
        plan = TransferPlan(*_two_tilings(2000, first_rank=first_rank), 4)
        assert plan.schedule(1 << 20).program(1).rounds
        assert plan.lower_bound + plan.moves_of(2).nbytes + plan.peak_bytes(3) > 0
        return plan

    make(9)  # what a first call sets up is no plan's
    tracemalloc.start()
    plan = make(10)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * taken < plan.nbytes < 1.6 * taken  # small objects are reused


def test_a_cache_holds_the_memory_that_it_may_and_frees_what_it_drops() -> None:
    cache = PlanCache(max_plans=100, max_bytes=1 << 20)
    plans = []
    for first_rank in range(10, 30):
        plan = cache.get(*_two_tilings(500, first_rank=first_rank), 4)
        assert plan.schedule().ranks
        plans.append(weakref.ref(plan))
        del plan
    alive = [plan() for plan in plans if plan() is not None]
    assert len(alive) == len(cache._plans)
    held = sum(plan.nbytes for plan in alive if plan is not None)
    assert 1 << 19 < held < 5 << 18


def test_adding_a_plan_looks_at_few_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = []

    def weigh(plan: TransferPlan) -> int:
        weighed.append(plan.itemsize)
        return 100

    monkeypatch.setattr(TransferPlan, "nbytes", property(weigh))
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=50, max_bytes=1 << 20)
    for itemsize in range(1, 201):
        cache.get(rows, rows, itemsize)
    assert len(weighed) <= 400
    assert set(weighed) == set(range(1, 200))
    assert cache._held == 100 * 49  # all but the newest


def test_a_plan_keeps_few_schedules() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(8)).layout((64, 64)) for dim in (0, 1))
    plan = TransferPlan(rows, columns, 4)
    first = plan.schedule(1000)
    assert plan.schedule(1000) is first
    for cap in range(1001, 1010):
        assert plan.peak_bytes(0, cap) > 0
    before = plan.nbytes
    assert plan.schedule(1000) is not first
    for cap in range(2000, 2050):
        assert plan.peak_bytes(0, cap) > 0
    assert plan.nbytes < 1.5 * before


def test_plans_may_grow_in_one_thread_while_another_adds_some() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(16)).layout((64, 64)) for dim in (0, 1))
    cache = PlanCache(max_plans=8, max_bytes=1 << 30)
    plan = cache.get(rows, columns, 4)
    is_over = threading.Event()

    def grow() -> None:
        for cap in range(10**6, 10**6 + 600):
            plan.schedule(cap).program(cap % 16)
            plan.moves_of(cap)
        is_over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=grow)
    try:
        thread.start()
        itemsize = 5
        while not is_over.is_set():
            assert cache.get(rows, columns, itemsize).itemsize == itemsize
            assert plan.nbytes > 0
            itemsize += 1
    finally:
        sys.setswitchinterval(interval)
        thread.join()
