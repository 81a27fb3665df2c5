"""Where parts of saved boxes lie, against strides of real tensors. Pure."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.regions import Region
from shardwise.geometry import Box

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_windows_tile_a_region_and_span_no_more_than_they_may(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(math.prod(shape)).view(shape).permute(order)
    cuts = [sorted(data.draw(st.tuples(*2 * [st.integers(0, n)]))) for n in whole.shape]
    box = Box.of((low, min(high + 1, n)) for (low, high), n in zip(cuts, whole.shape, strict=True))
    if box.is_empty:
        return
    region = Region(0, tuple(whole.shape), whole.stride()).at(box)
    part = whole[box.slices()]
    assert (region.first, region.shape) == (int(part.flatten()[0]), tuple(part.shape))
    assert region.span == int(part.max()) - int(part.min()) + 1
    assert region.is_run == part.is_contiguous()
    most = data.draw(st.integers(1, 30))
    seen = torch.zeros(part.shape, dtype=torch.int64)
    for window in region.windows(most):
        one = region.at(window)
        assert one.span <= most
        assert one.first == int(part[window.slices()].flatten()[0])
        seen[window.slices()] += 1
    assert bool((seen == 1).all())
