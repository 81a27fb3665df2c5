"""Embeddings of a table that is cut, by indices that are each rank's own, and by those of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.parameters import sharded

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Box, Layout
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds
from shardwise.testing.strategies import examples, layouts

ROWS, WIDTH, WORLD_SIZE = 7, 4, 3
TABLE = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = (torch.tensor([[6, 0, 3], [3, 3, 1]]), torch.empty(0, 3).long(), torch.tensor([[5, 6, 6]]))
TABLES = {
    **layout_kinds((ROWS, WIDTH), world_size=WORLD_SIZE),
    "grid, with replicas": Layout(
        (ROWS, WIDTH),
        [
            Box((low, left), (high, left + 2))
            for low, high in ((0, 3), (3, 7))
            for left in (0, 2)
            for _ in range(2)
        ],
        [0, 1, 1, 2, 2, 0, 0, 2],
    ),
}


def table(layout: Layout) -> Any:
    """The table as a leaf in `layout`."""
    return sharded(TABLE, layout, requires_grad=True)


def check_pieces(found: Any, expected: Any) -> None:
    assert found.shard_layout.pending is None
    for box, shard in zip(found._state.boxes, found._state.shards, strict=True):
        torch.testing.assert_close(shard.detach(), expected[box.slices()])


def total(parts: Any) -> torch.Tensor:
    return torch.stack(list(parts)).sum()


def weights_of(result: torch.Tensor) -> torch.Tensor:
    """A factor for each element of a result, so that every gradient is another."""
    return torch.arange(1.0, 1 + result.numel(), dtype=result.dtype).view(result.shape).cos()


def check_own(layout: Layout, ids: Any, call: Any, expected: Any) -> None:
    """`call(own ids, table)` against `expected(ids of all ranks, table)`, one result per rank."""
    full = TABLE.clone().requires_grad_()
    wanted = expected(ids, full)
    total((one * weights_of(one)).sum() for one in wanted).backward()

    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"):
            weight = table(layout)
            found = call(ids[rank], weight)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found.detach(), wanted[rank].detach())
            (found * weights_of(found)).sum().backward()
            check_pieces(weight.grad, full.grad)

    simulate(on_rank, len(ids))


@pytest.mark.parametrize("kind", TABLES)
def test_plain_ids_are_this_ranks_own_and_so_is_the_result(kind: str) -> None:
    check_own(TABLES[kind], IDS, F.embedding, lambda ids, w: [F.embedding(one, w) for one in ids])


def _scaled_over_all(ids: Any, weight: torch.Tensor) -> list[torch.Tensor]:
    together = torch.cat([one.flatten() for one in ids])
    found = F.embedding(together, weight, padding_idx=3, scale_grad_by_freq=True)
    parts = found.split([one.numel() for one in ids])
    return [part.view(*one.shape, WIDTH) for part, one in zip(parts, ids, strict=True)]


@pytest.mark.parametrize("kind", TABLES)
def test_frequencies_are_those_of_all_ranks(kind: str) -> None:
    check_own(
        TABLES[kind],
        IDS,
        lambda ids, w: F.embedding(ids, w, padding_idx=-4, scale_grad_by_freq=True),
        _scaled_over_all,
    )


@given(layouts(shape=(ROWS, WIDTH), world_size=3), st.data())
def test_any_table_and_any_ids(layout: Layout, data: Any) -> None:
    shapes = st.lists(st.integers(0, 4), max_size=2)
    numbers = st.integers(0, ROWS - 1)
    ids = []
    for _ in range(3):
        shape = data.draw(shapes)
        count = torch.Size(shape).numel()
        listed = data.draw(st.lists(numbers, min_size=count, max_size=count))
        ids.append(
            torch.tensor(listed, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).view(
                shape
            )
        )
    if layout.pending != "sum":
        layout = layout.bar
    check_own(layout, ids, F.embedding, lambda ids, w: [F.embedding(one, w) for one in ids])


BAGS = [
    (torch.tensor([6, 0, 3, 3, 3]), torch.tensor([0, 0, 2, 5, 5])),
    (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
    (torch.tensor([3]), torch.tensor([0])),
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("kind", TABLES)
def test_bags_of_own_ids(kind: str, padding: int | None, mode: str) -> None:
    def call(bag: Any, weight: Any) -> Any:
        return F.embedding_bag(bag[0], weight, bag[1], mode=mode, padding_idx=padding)

    check_own(TABLES[kind], BAGS, call, lambda bags, w: [call(bag, w) for bag in bags])


def test_bags_of_two_dims_and_of_offsets_that_include_the_last() -> None:
    def last(bag: Any, weight: Any) -> Any:
        return F.embedding_bag(bag[0], weight, bag[1], include_last_offset=True)

    def rows(ids: Any, weight: Any) -> Any:
        return F.embedding_bag(ids.int(), weight, mode="max")

    layout = TABLES["grid, with replicas"]
    check_own(layout, IDS, rows, lambda ids, w: [rows(one, w) for one in ids])
    bags = [(ids, torch.tensor([*offsets, len(ids)])) for ids, offsets in BAGS]
    check_own(layout, bags, last, lambda bags, w: [last(bag, w) for bag in bags])


def test_large_ids_beside_weights_are_exact() -> None:
    """Indices never travel as floats: 16777217 is none of float32's numbers."""
    size, ids = 2**24 + 4, torch.tensor([2**24 + 1, 2**24 + 3])

    def on_rank(rank: int) -> torch.Tensor:
        rows = shardwise.chunk(0, ranks=range(2), device="cpu")
        weight = shardwise.from_callback(
            rows,
            (size, 1),
            lambda box: torch.arange(size)[box[0]].view(-1, 1).double(),
            dtype=torch.float64,
        )
        return F.embedding_bag(
            ids, weight, torch.tensor([0, 1]), mode="sum", per_sample_weights=torch.ones(2).double()
        )

    for found in simulate(on_rank, 2).results:
        assert found.flatten().tolist() == ids.tolist()


def test_weights_of_samples_have_gradients() -> None:
    weights = [torch.rand(len(ids), dtype=torch.float64) + 0.5 for ids, _ in BAGS]
    full, plain = TABLE.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    wanted = [
        F.embedding_bag(ids, full, offsets, mode="sum", per_sample_weights=w)
        for (ids, offsets), w in zip(BAGS, plain, strict=True)
    ]
    total((one * weights_of(one)).sum() for one in wanted).backward()

    def on_rank(rank: int) -> None:
        weight = table(TABLES["grid, with replicas"])
        own = weights[rank].clone().requires_grad_()
        ids, offsets = BAGS[rank]
        found = F.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=own)
        torch.testing.assert_close(found.detach(), wanted[rank].detach())
        (found * weights_of(found)).sum().backward()
        torch.testing.assert_close(own.grad, plain[rank].grad)
        check_pieces(weight.grad, full.grad)

    simulate(on_rank, WORLD_SIZE)


def test_frequencies_of_bags_are_those_of_all_ranks() -> None:
    """By what the option says; torch's own kernel of bags divides by the counts of other rows."""
    full = TABLE.clone().requires_grad_()
    wanted = _scaled_over_all(IDS, full)
    total((one.sum(1) * weights_of(one.sum(1))).sum() for one in wanted).backward()

    def on_rank(rank: int) -> None:
        weight = table(TABLES["dim 0 uneven, permuted, one empty"])
        found = F.embedding_bag(
            IDS[rank], weight, mode="sum", scale_grad_by_freq=True, padding_idx=3
        )
        (found * weights_of(found)).sum().backward()
        check_pieces(weight.grad, full.grad)

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("order", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("kind", TABLES)
def test_max_norm_changes_the_rows_that_any_rank_uses_in_place(kind: str, order: float) -> None:
    full = TABLE.clone()
    together = torch.cat([one.flatten() for one in IDS])
    F.embedding(together, full, max_norm=1.0, norm_type=order)
    assert not torch.equal(full, TABLE)
    assert torch.equal(full[2], TABLE[2])
    assert torch.equal(full[4], TABLE[4])

    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"):
            weight: Any = torch.nn.Parameter(table(TABLES[kind]))
            locals_before = [shard.data_ptr() for shard in weight._state.shards]
            versions = [shard._version for shard in weight._state.shards]
            module = torch.nn.Embedding(ROWS, WIDTH, max_norm=1.0, norm_type=order)
            module.weight = weight
            found = module(IDS[rank])
            assert [shard.data_ptr() for shard in weight._state.shards] == locals_before
            for shard, version in zip(weight._state.shards, versions, strict=True):
                assert shard._version > version
            torch.testing.assert_close(found.detach(), full[IDS[rank]])
            torch.testing.assert_close(weight.detach().full_tensor(), full)
            assert module.weight is weight  # the one that an optimizer has

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("kind", ["replicated", "dim 0 uneven, permuted, one empty"])
def test_max_norm_with_ids_that_all_ranks_know(kind: str) -> None:
    full = TABLE.clone()
    wanted = F.embedding_bag(IDS[0], full, max_norm=1.0)

    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"), shardwise.plain_inputs("replicated"):
            weight = table(TABLES[kind])
            found: Any = F.embedding_bag(IDS[0], weight, max_norm=1.0)
            torch.testing.assert_close(found.detach().full_tensor(), wanted)
            torch.testing.assert_close(weight.detach().full_tensor(), full)

    simulate(on_rank, WORLD_SIZE)


def test_modules_train_as_plain_ones_do() -> None:
    plain = torch.nn.EmbeddingBag(ROWS, WIDTH, _weight=TABLE.clone(), mode="sum")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        total(plain(*bag).square().sum() for bag in BAGS).backward()
        optimizer.step()

    def on_rank(rank: int) -> None:
        module = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        module.weight = torch.nn.Parameter(table(TABLES["grid, with replicas"]))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(*BAGS[rank]).square().sum().backward()
            optimizer.step()
        check_pieces(module.weight, plain.weight.detach())

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("kind", TABLES)
def test_gradients_of_gradients(kind: str) -> None:
    full = TABLE.clone().requires_grad_()
    loss = total((full[ids] ** 3).sum() for ids in IDS)
    (first,) = torch.autograd.grad(loss, full, create_graph=True)
    (first**2).sum().backward()

    def on_rank(rank: int) -> None:
        with shardwise.implicit_comm("allow"):
            weight = table(TABLES[kind])
            loss = (F.embedding(IDS[rank], weight) ** 3).sum()
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            (grad**2).sum().backward()
            check_pieces(weight.grad, full.grad)

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("kind", layout_kinds((2, 3), world_size=WORLD_SIZE))
def test_gradients_of_gradients_with_cut_ids(kind: str) -> None:
    """Also where a piece has no ids."""
    of_ids = layout_kinds((2, 3), world_size=WORLD_SIZE)[kind].bar

    def call(weight: Any) -> Any:
        ids = sharded(IDS[0], of_ids) if isinstance(weight, shardwise.ShardedTensor) else IDS[0]
        rows = F.embedding(ids, weight)
        whole = rows.full_tensor() if isinstance(rows, shardwise.ShardedTensor) else rows
        return torch.autograd.grad((whole**3).sum(), weight, create_graph=True)

    for name in ("replicated", "on the last rank"):
        check_op(Sample(call, ((ROWS, WIDTH),)), [TABLES[name]], world_size=WORLD_SIZE)


@pytest.mark.parametrize("call", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_index_out_of_range_raises_on_every_rank(call: Any, max_norm: float | None) -> None:
    def on_rank(rank: int) -> None:
        ids = torch.tensor([[7 if rank == 1 else 0]])
        with pytest.raises(IndexError, match="index out of range"):
            call(ids, table(TABLES["dim 0 uneven, permuted, one empty"]), max_norm=max_norm)

    simulate(on_rank, WORLD_SIZE)


@pytest.mark.parametrize("number", [-1, 7])
def test_an_index_out_of_range_that_all_ranks_know_raises(number: int) -> None:
    def on_rank(rank: int) -> None:
        ids = shardwise.as_replicated(torch.tensor([0, number]))
        with pytest.raises(IndexError, match="index out of range"):
            F.embedding(ids, table(TABLES["dim 0 uneven, permuted, one empty"]))

    simulate(on_rank, WORLD_SIZE)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    def on_rank(rank: int) -> None:
        weight = table(TABLES["on the last rank"])
        ids = IDS[rank]
        with pytest.raises(OpError, match="sparse=False"):
            F.embedding(ids, weight, sparse=True)
        with pytest.raises(ArgumentTypeError, match=r"torch\.int32"):
            F.embedding(ids.double(), weight)
        with pytest.raises(ArgumentValueError, match="within num_embeddings"):
            F.embedding(ids, weight, padding_idx=7)
        with pytest.raises(ArgumentValueError, match="offsets"):
            F.embedding_bag(ids.flatten(), weight)
        with pytest.raises(ArgumentValueError, match="mode='sum'"):
            F.embedding_bag(ids, weight, per_sample_weights=ids.double())
        with torch.no_grad():
            assert F.embedding(ids, weight, sparse=True).shape == (*ids.shape, WIDTH)
        with shardwise.plain_inputs("error"), pytest.raises(OpError, match="as_local_rows"):
            F.embedding(ids, weight)

    simulate(on_rank, WORLD_SIZE)


def test_owners_send_exactly_the_rows_that_are_asked_for() -> None:
    """Rank 0 holds rows 0-2, rank 1 rows 3-5, rank 2 row 6."""

    def on_rank(rank: int) -> list[tuple[str, int, int]]:
        spec = shardwise.chunk(0, ranks=range(3), device="cpu")
        weight = shardwise.distribute(TABLE, spec, src_rank=None).requires_grad_()
        with shardwise.trace(show=False) as forward:
            found = F.embedding(IDS[rank], weight)
        with shardwise.trace(show=False) as backward:
            found.sum().backward()
        return [
            (event.op, event.sent, event.total) for event in (*forward.events, *backward.events)
        ]

    results = simulate(on_rank, 3).results
    # Rank 0 wants rows 3 and 6 of others, rank 2 row 5.
    row = WIDTH * 8
    name = "torch.nn.functional.embedding"
    assert [[event[1:] for event in one][1:] for one in results] == [
        [(16, 24), (0, 3 * row), (2 * row, 3 * row)],
        [(0, 24), (2 * row, 3 * row), (0, 3 * row)],
        [(8, 24), (row, 3 * row), (row, 3 * row)],
    ]
    assert [event[0] for event in results[0]] == [name] * 3 + [f"backward of {name}"]


@pytest.mark.parametrize("holders", [(0, 0), (0, 1), (0, 1, 2)])  # the last of the empty box
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 2), (6,)])
def test_boxes_without_elements_have_no_bags(
    shape: tuple[int, ...], is_last: bool, holders: tuple[int, ...]
) -> None:
    """An empty box beside the ids of a bag is no second piece of it."""
    whole = Box.whole(shape)
    at = shape[-1] if is_last else 0
    boxes = [*[whole] * (len(holders) - 1), whole.with_range(len(shape) - 1, at, at)]
    ids = Layout(shape, boxes, holders)
    offsets = torch.tensor([0, 2]) if len(shape) == 1 else None
    sample = Sample(
        lambda ids, weight: F.embedding_bag(ids, weight, offsets),
        (shape, (ROWS, WIDTH)),
        ("bits", "real"),
    )
    for layout in TABLES.values():
        check_op(sample, [ids, layout], world_size=WORLD_SIZE)


def _on_real_ranks(rank: int) -> None:
    shardwise.implicit_comm("allow")
    listed = [*TABLES.values(), *examples(layouts(shape=(ROWS, WIDTH), world_size=3), 10)]
    for layout in listed:
        layout = layout if layout.pending in (None, "sum") else layout.bar
        full = TABLE.clone().requires_grad_()
        total(
            (F.embedding(ids, full) * weights_of(ids[..., None].double())).sum() for ids in IDS
        ).backward()
        weight = table(layout)
        found = F.embedding(IDS[rank], weight)
        torch.testing.assert_close(found.detach(), TABLE[IDS[rank]])
        (found * weights_of(IDS[rank][..., None].double())).sum().backward()
        check_pieces(weight.grad, full.grad)


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_ranks, WORLD_SIZE)


def _in_a_subgroup(rank: int) -> None:
    import torch.distributed as dist

    group = dist.new_group([2, 0])
    if rank in (0, 2):
        spec = shardwise.chunk(0, ranks=[2, 0], device="cpu")
        weight = shardwise.distribute(TABLE, spec, src_rank=None, process_group=group)
        found = F.embedding(IDS[rank], weight)
        assert torch.equal(found, TABLE[IDS[rank]])


def test_in_a_subgroup() -> None:
    shardwise.run_local(_in_a_subgroup, WORLD_SIZE)
