"""Plans between layouts of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardwise.testing.strategies import layouts, shapes
from shardwise.transfer import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["plans"]


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    world_size: int = 4,
    addends: bool = True,
    itemsizes: Sequence[int] = (1, 2, 4, 16),
) -> TransferPlan:
    """Plans on ranks below `world_size`; without `addends` nothing is pending."""
    shape = draw(shapes(max_size=5))
    ends = layouts(shape=shape, world_size=world_size, addends=addends)
    return TransferPlan(draw(ends), draw(ends), draw(st.sampled_from(itemsizes)))
