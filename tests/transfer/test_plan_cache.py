"""Plans that are found again, and how many of them are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.errors import ArgumentTypeError
from shardwise.geometry import Layout
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.plan_cache import PlanCache, plan_reshard


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


def test_equal_layouts_are_found_by_identity_the_second_time() -> None:
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((6, 8))
    cache = PlanCache(max_plans=2, max_bytes=1 << 20)
    plan = cache.get(rows, rows, 4)
    for _ in range(20):  # more than there is room for
        again = Layout(rows.shape, list(rows.boxes), rows.owners)
        assert cache.get(again, rows, 4) is plan
        assert cache._by_id[id(again), id(rows), 4][0] is plan
        assert len(cache._by_id) <= 8
    for itemsize in range(1, 4):
        cache.get(rows, rows, itemsize)
    assert all(known[0] in cache._plans.values() for known in cache._by_id.values())
