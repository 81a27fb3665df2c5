"""Look-ups and writes by index tensors on layouts of every kind, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError, ShardwiseError
from shardwise.geometry import Box, Layout
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds
from shardwise.testing.strategies import layouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.testing.op_check import Values

X = torch.arange(21.0, dtype=torch.float64).view(7, 3)
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[Values, ...]]] = {
    "x[i]": (lambda x, i: x[i], ((7, 3), (2, 3)), ("real", "bits")),
    "x[:, i, j]": (
        lambda x, i, j: x[:, i, j],
        ((2, 7, 7), (2, 2), (2,)),
        ("real", "bits", "bits"),
    ),
    "gather": (lambda x, i: torch.gather(x, 0, i), ((7, 3), (4, 3)), ("real", "bits")),
    "embedding": (F.embedding, ((3, 2), (7, 3)), ("bits", "real")),
    "embedding_bag": (F.embedding_bag, ((3, 2), (7, 3)), ("bits", "real")),
    "index_put": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        ((7, 3), (4,), (4, 3)),
        ("real", "bits", "real"),
    ),
    "scatter_add": (
        lambda x, i, v: torch.scatter_add(x, 0, i, v),
        ((7, 3), (4, 3), (4, 3)),
        ("real", "bits", "real"),
    ),
}


@given(st.sampled_from(sorted(CALLS)), st.data())
def test_any_layouts(name: str, data: st.DataObject) -> None:
    call, shapes, values = CALLS[name]
    drawn = [data.draw(layouts(shape=shape, world_size=3)) for shape in shapes]
    kept = [one if one.pending in (None, "sum") else one.bar for one in drawn]
    check_op(Sample(call, shapes, values=values), kept, world_size=3)


GATHERS: dict[str, Callable[[Any, Any], Any]] = {
    "by position": lambda x, i: x.gather(1, i),
    "from the end": lambda x, i: x.gather(-1, i),
    "dim by position": lambda x, i: x.gather(1, index=i),
    "by name": lambda x, i: x.gather(dim=1, index=i),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("name", GATHERS)
def test_the_method_gather_is_that_of_torch_if_it_gets_an_index(
    name: str, dtype: torch.dtype
) -> None:
    full, index = X.to(dtype), torch.tensor([[2, 0]]).expand(7, 2)
    alike = torch.arange(21).view(7, 3) % 3  # which could be an `out` of whole numbers

    def on_rank(_: int) -> None:
        x: Any = shardwise.distribute(
            full, shardwise.chunk(0, ranks=range(3), device="cpu"), src_rank=None
        )
        of_rows = shardwise.reshard(shardwise.as_replicated(alike), x)
        for given_index, whole in ((index, index), (of_rows, alike)):
            found = GATHERS[name](x, given_index)
            assert torch.equal(found.full_tensor(), GATHERS[name](full, whole))

    simulate(on_rank, 3)


def test_whole_numbers_that_can_be_an_out_of_gather_are_one() -> None:
    full, index = torch.arange(21).view(7, 3), torch.ones(7, 3, dtype=torch.int64)

    def on_rank(rank: int) -> None:
        x: Any = shardwise.distribute(
            full, shardwise.chunk(0, ranks=range(3), device="cpu"), src_rank=None
        )
        out = torch.zeros_like(full) if rank == 1 else None
        assert x.gather(1, out) is out
        assert out is None or torch.equal(out, full)
        assert torch.equal(x.gather(dim=1, index=index).full_tensor(), full.gather(1, index))
        for options in ({"out": out}, {"dtype": torch.float64}, {"max_bytes": 8}):
            if None not in options.values():
                with pytest.raises(ShardwiseError, match="takes no out, dtype or max_bytes"):
                    x.gather(1, index=index, **options)
        with pytest.raises(ShardwiseError, match=r"torch.gather\(st, dim, index\)"):
            x.gather(1, index)  # of which rank 1 alone could be the receiver
        assert (index == 1).all()

    simulate(on_rank, 3)


def _rows() -> Any:
    return shardwise.distribute(X, shardwise.chunk(0, ranks=range(3), device="cpu"), src_rank=None)


BAD = torch.tensor([0, 7])
OUT_OF_RANGE: dict[str, Callable[[Any], Any]] = {
    "x[i]": lambda x: x[BAD],
    "x[:, i]": lambda x: x[:, [0, -4]],
    "x[i] = 1": lambda x: x.__setitem__(BAD, 1.0),
    "index_select": lambda x: torch.index_select(x, 0, BAD - 1),
    "gather": lambda x: torch.gather(x, 0, BAD.view(1, 2)),
    "take": lambda x: torch.take(x, torch.tensor([21])),
    "index_add": lambda x: torch.index_add(x, 0, BAD, x[:2]),
    "scatter": lambda x: torch.scatter(x, 0, BAD.view(1, 2), 1.0),
    "too many": lambda x: x[BAD, BAD, BAD],
    "a mask": lambda x: x[torch.ones(6, dtype=torch.bool)],
    "floats": lambda x: x[torch.ones(6)],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_raises_on_every_rank(name: str) -> None:
    def on_rank(_: int) -> None:
        with shardwise.implicit_comm("allow"), pytest.raises(IndexError):
            OUT_OF_RANGE[name](_rows())

    simulate(on_rank, 3)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "index_select": lambda x: torch.index_select(x, 0, BAD.view(1, 2)),
    "gather": lambda x: torch.gather(x, 0, torch.zeros(2, 4).long()),
    "gather, dims": lambda x: torch.gather(x, 0, torch.zeros(2).long()),
    "gather, a number": lambda x: torch.gather(x, 0, torch.tensor(0)),
    "gather of a number": lambda x: torch.gather(x.sum(), 0, torch.zeros(1, 1).long()),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(2, 2).long(), 0),
    "index_add": lambda x: torch.index_add(x, 0, torch.tensor([1]), torch.ones(2, 3).double()),
    "index_add, a number": lambda x: x[:, 0].index_add(0, torch.tensor([1]), X[0, 0]),
    "index_add to a number": lambda x: x.sum().index_add(0, torch.tensor([0]), X[0, :1]),
    "index_copy": lambda x: torch.index_copy(x, 0, torch.tensor([1]), torch.ones(1, 3)),
    "index_copy, a number": lambda x: x.index_copy(0, torch.tensor([1]), X[0, 0]),
    "scatter": lambda x: torch.scatter(x, 0, torch.zeros(2, 4).long(), torch.ones(2, 4).double()),
    "x[i, j]": lambda x: x[torch.zeros(2).long(), torch.zeros(3).long()],
    "x[i] = v": lambda x: x.__setitem__([0, 1, 2], torch.ones(2, 3)),
    "x[i, j] = v": lambda x: x.__setitem__(([0, 1], [0, 1, 2]), 1.0),
    "index_put, dtypes": lambda x: x.index_put((torch.tensor([0]),), torch.ones(1, 3)),
    "take_along_dim, dtypes": lambda x: torch.take_along_dim(x, torch.zeros(1, 3).int(), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    def on_rank(_: int) -> None:
        with pytest.raises(OpError):
            REFUSED[name](_rows())

    simulate(on_rank, 4)  # of which one holds nothing


@pytest.mark.parametrize("is_plain", [False, True])
def test_take_along_dim_counts_from_the_end_as_torch_does_though_gather_does_not(
    is_plain: bool,
) -> None:
    places = torch.tensor([[-1, 0, -2]])

    def on_rank(_: int) -> None:
        with shardwise.implicit_comm("allow"):
            x = _rows()
            index: Any = places if is_plain else shardwise.as_replicated(places)
            found: Any = torch.take_along_dim(x, index, 0)
            assert torch.equal(found.full_tensor(), torch.take_along_dim(X, places, 0))
            whole: Any = shardwise.as_replicated(X)
            with pytest.raises((IndexError, RuntimeError), match="out of "):
                torch.gather(whole, 0, index)

    simulate(on_rank, 3)


@pytest.mark.parametrize("name", ["embedding", "embedding_bag", "x[i]", "gather"])
def test_a_box_without_elements_may_have_some_rows_only(name: str) -> None:
    """The table is whole, and a rank has a piece of one row and no columns as well."""
    call, shapes, values = CALLS[name]
    layouts = [Layout(shape, [Box.whole(shape)], [0]) for shape in shapes]
    at = shapes.index((7, 3))
    layouts[at] = Layout((7, 3), [Box.whole((7, 3)), Box((0, 0), (1, 0))], [0, 0])
    check_op(Sample(call, shapes, values), layouts)


@pytest.mark.parametrize("name", ["on the last rank", "dim 0 on one rank, in pieces"])
def test_what_is_looked_up_stays_as_it_was_when_the_tensor_is_written(name: str) -> None:
    """On ranks that hold nothing, too: else their graphs would not be those of the others."""
    ids = torch.tensor([0, 2])

    def train(x: Any) -> Any:
        y = x * 1.0
        y[ids] = y[ids] * x[ids]
        return y

    layout = layout_kinds(tuple(X.shape))[name]
    check_op(Sample(train, (tuple(X.shape),)), [layout])


def test_writes_reach_the_tensor_itself() -> None:
    expected = X.clone()
    expected[[1, -1]] = torch.tensor([5.0, 6.0, 7.0], dtype=X.dtype)
    expected[expected > 18] = 0.0

    def on_rank(_: int) -> None:
        with shardwise.implicit_comm("allow"):
            x = _rows()
            local = x._state.shards
            x[[1, -1]] = torch.tensor([[5, 6, 7]])  # torch casts, and leaves leading ones out
            x[x > 18] = 0.0
            assert x._state.shards is local
            assert torch.equal(x.full_tensor(), expected)

    simulate(on_rank, 3)


@pytest.mark.parametrize("num_classes", [-1, 5])
def test_one_hot_is_cut_like_its_indices(num_classes: int) -> None:
    ids = torch.tensor([[1, 0], [3, 3], [2, 0]])

    def on_rank(_: int) -> None:
        spec = shardwise.chunk(0, ranks=range(2), device="cpu")
        sharded: Any = shardwise.distribute(ids, spec, src_rank=None)
        found: Any = F.one_hot(sharded, num_classes)
        assert found.shard_layout.ranks == (0, 1)
        assert torch.equal(found.full_tensor(), F.one_hot(ids, num_classes))

    simulate(on_rank, 3)


def test_indices_in_lists_and_arrays_mean_what_they_do_on_plain_tensors() -> None:
    import numpy as np

    indices: list[Any] = [
        [0, 2],
        [],
        np.array([1, -1]),
        range(2),
        torch.tensor(2),
        ([0, 1], [2, 0]),
        ([True, False] * 3 + [True],),
        (..., [1]),
        (None, [1, 2], slice(1, None)),
        (2, [0, 0]),
        (torch.tensor([0, 1], dtype=torch.int32), torch.tensor(1)),
    ]

    def on_rank(_: int) -> None:
        with shardwise.implicit_comm("allow"):
            for index in indices:
                found: Any = _rows()[index]
                assert torch.equal(found.full_tensor(), X[index]), index

    simulate(on_rank, 3)
