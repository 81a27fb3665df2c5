"""The full tensor behind shards: what does not fit together is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import shardwise
from shardwise.errors import LayoutError
from shardwise.geometry import Layout
from shardwise.testing.strategies import layouts
from shardwise.testing.tensors import assemble, random_shards


@given(layouts(addends=False))
def test_every_element_comes_from_the_shard_that_holds_it(layout: Layout) -> None:
    shards = random_shards(layout)
    full = assemble(layout, shards)
    for rank, held in shards.items():
        for box, shard in zip(layout.boxes_of(rank), held, strict=True):
            assert torch.equal(full[box.slices()], shard)


@pytest.mark.parametrize(
    ("op", "value"), [("sum", 12.0), ("avg", 6.0), ("max", 8.0), ("min", 4.0), ("product", 32.0)]
)
def test_addends_are_reduced(op: str, value: float) -> None:
    layout = shardwise.partial(op, ranks=[0, 1]).layout((2,))
    shards = {0: [torch.full((2,), 4.0)], 1: [torch.full((2,), 8.0)]}
    assert assemble(layout, shards).tolist() == [value] * 2


def test_a_tensor_without_shards_has_no_elements() -> None:
    assert assemble(Layout((0, 3), [], []), {}).shape == (0, 3)


def test_shards_that_do_not_fit_are_refused() -> None:
    copies = Layout.replicated((2,), [0, 1])
    with pytest.raises(LayoutError, match=r"term 0.*expected equal replicas"):
        assemble(copies, {0: [torch.zeros(2)], 1: [torch.tensor([0.0, -0.0])]})
    with pytest.raises(LayoutError, match=r"expected \(2,\), got \(3,\)"):
        assemble(copies, {0: [torch.zeros(3)], 1: [torch.zeros(3)]})
