"""What any layout saved loads into any other, bit by bit, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import wrap
from shardwise.testing.strategies import examples, layouts, shapes, specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.float64,
    torch.complex64,
]


@dataclass(frozen=True)
class Saved:
    """A tensor, how it is laid out when it is saved, and when it is loaded."""

    full: torch.Tensor
    before: Layout
    after: Layout


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape, dtype.itemsize)
    bits = torch.randint(2 if dtype == torch.bool else 256, size, generator=generator)
    return bits.to(torch.uint8).view(dtype).view(tuple(shape))


def laid_out(full: torch.Tensor, layout: Layout) -> shardwise.ShardedTensor:
    """This rank's shards of a tensor."""
    members = communicator()
    shards = [full[box.slices()].clone() for box in layout.boxes_of(members.rank)]
    return wrap(make_state(layout, shards, group=members, dtype=full.dtype))


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def save(rank: int, tensors: Sequence[Saved], path: Path) -> None:
    state = {f"t{k}": laid_out(one.full, one.before) for k, one in enumerate(tensors)}
    shardwise.checkpoint.save({"all": state, "count": len(tensors)}, path)


def load_and_compare(rank: int, tensors: Sequence[Saved], path: Path) -> None:
    state = {
        f"t{k}": laid_out(torch.zeros_like(one.full), one.after) for k, one in enumerate(tensors)
    }
    whole: dict[str, Any] = {"all": state, "count": 0}
    shardwise.checkpoint.load(whole, path)
    assert whole["count"] == len(tensors)
    for loaded, one in zip(state.values(), tensors, strict=True):
        for box, shard in zip(one.after.boxes_of(rank), loaded._state.shards, strict=True):
            assert is_same(shard, one.full[box.slices()])


def round_trip(tensors: Sequence[Saved], before: int, after: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        simulate(save, before, tensors, path)
        simulate(load_and_compare, after, tensors, path)


@st.composite
def saved_tensors(draw: st.DrawFn, before: int, after: int) -> Saved:
    shape = draw(shapes())
    full = random_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    cuts = [draw(layouts(shape=shape, world_size=size, addends=False)) for size in (before, after)]
    return Saved(full, *cuts)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_any_layout_loads_into_any_other(data: st.DataObject, before: int, after: int) -> None:
    tensors = data.draw(st.lists(saved_tensors(before, after), max_size=4))
    round_trip(tensors, before, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_kind_of_spec(dtype: torch.dtype) -> None:
    shape = (7, 6)
    kinds = [spec.layout(shape) for spec in examples(specs(shape, world_size=4), 24)]
    kinds = [layout for layout in kinds if layout.pending is None]
    full = random_bits(shape, dtype, 3)
    tensors = [Saved(full, *pair) for pair in zip(kinds, reversed(kinds), strict=True)]
    round_trip(tensors, 4, 4)
