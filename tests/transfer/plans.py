"""Plans between layouts of every kind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from shardwise.testing.strategies import layouts, shapes
from shardwise.transfer import TransferPlan, plan_cache, reductions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["plans", "small_sums_cut"]


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    world_size: int = 4,
    addends: bool = True,
    itemsizes: Sequence[int] = (1, 2, 4, 16, 1 << 14),  # of the last, sums are cut
) -> TransferPlan:
    """Plans on ranks below `world_size`; without `addends` nothing is pending."""
    shape = draw(shapes(max_size=5))
    ends = layouts(shape=shape, world_size=world_size, addends=addends)
    return TransferPlan(draw(ends), draw(ends), draw(st.sampled_from(itemsizes)))


@contextmanager
def small_sums_cut() -> Iterator[None]:
    """Plans that are made in this block cut every sum over its reducers, as they do large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "_FEW", 0)
        patch.setattr(plan_cache, "_cache", plan_cache.PlanCache(max_plans=64, max_bytes=1 << 20))
        yield
