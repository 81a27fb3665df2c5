"""Gradients through reshard, gather and wrapping, against the same computation on one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.testing.strategies import examples, layouts, shapes
from shardwise.testing.tensors import assemble, random_shards, random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout


WORLD_SIZE = 4


def differentiable(layout: Layout) -> bool:
    return layout.pending in (None, "sum", "avg")


@st.composite
def ways(draw: st.DrawFn, *, length: int = 3) -> list[Layout]:
    """Layouts of one shape, to be gone through one after the other."""
    shape = draw(shapes(max_size=4))
    one = layouts(shape=shape, world_size=WORLD_SIZE).filter(differentiable)
    return [draw(one) for _ in range(length)]


def leaf(layout: Layout, *, seed: int = 0) -> ShardedTensor:
    return random_tensor(layout, torch.float64, seed=seed, requires_grad=True)


def value_of(layout: Layout, *, seed: int = 0) -> torch.Tensor:
    """The full tensor that `leaf` stands for."""
    return assemble(layout, random_shards(layout, torch.float64, seed=seed)).requires_grad_()


def weights(shape: Sequence[int]) -> torch.Tensor:
    return torch.linspace(-1, 2, max(1, torch.Size(shape).numel()), dtype=torch.float64)[
        : torch.Size(shape).numel()
    ].view(tuple(shape))


def local_grads(tensor: ShardedTensor) -> tuple[Layout, list[torch.Tensor]]:
    found = tensor.grad
    assert isinstance(found, ShardedTensor)
    return found.shard_layout, [shard.tensor.clone() for shard in found.local_shards()]


def check_grads(
    results: Sequence[tuple[Layout, list[torch.Tensor]]], layout: Layout, expected: torch.Tensor
) -> None:
    """Every entry on every rank holds the whole gradient of its box."""
    for rank, (grad_layout, grads) in enumerate(results):
        assert grad_layout == layout.bar
        scale = 1.0
        for box, grad in zip(layout.bar.boxes_of(rank), grads, strict=True):
            if layout.pending == "avg":
                entry = next(k for k, b in enumerate(layout.boxes) if b == box)
                group = layout.box_rows.searchsorted(entry, side="right") - 1
                scale = 1.0 / int(layout.num_terms[group])
            torch.testing.assert_close(grad, expected[box.slices()] * scale)


def through(way: list[Layout], square: bool = True) -> tuple[Layout, list[torch.Tensor]]:
    x = leaf(way[0])
    y = x
    for layout in way[1:]:
        y = shardwise.reshard(y, layout)
        assert y.requires_grad
        assert y.shard_layout == layout
    full = y.full_tensor()
    loss = ((full * full if square else full) * weights(full.shape)).sum()
    loss.backward()
    return local_grads(x)


def expected_through(way: list[Layout]) -> torch.Tensor:
    full = value_of(way[0])
    (full * full * weights(full.shape)).sum().backward()
    assert full.grad is not None
    return full.grad


@given(ways())
def test_every_entry_gets_the_whole_gradient_whatever_the_way(way: list[Layout]) -> None:
    results = simulate(lambda _: through(way), WORLD_SIZE).results
    check_grads(results, way[0], expected_through(way))


@given(ways(length=2))
def test_own_parts_of_the_gradient_are_summed_on_the_way_back(way: list[Layout]) -> None:
    def run(rank: int) -> tuple[Layout, list[torch.Tensor]]:
        x = leaf(way[0])
        full = shardwise.reshard(x, way[1]).full_tensor(grad="sum")
        ((rank + 1) * full * full * weights(full.shape)).sum().backward()
        return local_grads(x)

    full = value_of(way[0])
    total = sum(range(1, WORLD_SIZE + 1))
    (total * full * full * weights(full.shape)).sum().backward()
    assert full.grad is not None
    check_grads(simulate(run, WORLD_SIZE).results, way[0], full.grad)


# Both ranks have the same pieces, of which the second and third are the same empty box.
TWICE_EMPTY = shardwise.grid([2, 3], ranks=[[0, 1]] * 6, device="cpu").layout((4, 1))


@given(layouts(world_size=WORLD_SIZE).filter(lambda layout: layout.pending is None))
@example(TWICE_EMPTY)
def test_own_parts_of_pieces_are_summed_over_their_replicas(layout: Layout) -> None:
    def run(rank: int) -> tuple[Layout, list[torch.Tensor]]:
        x = leaf(layout)
        boxes = layout.boxes_of(rank)
        pieces = [shard.tensor for shard in x.local_shards(grad="sum")]
        assert [tuple(piece.shape) for piece in pieces] == [box.shape for box in boxes]
        for piece, box in zip(pieces, boxes, strict=True):
            assert torch.equal(piece.detach(), full[box.slices()])
        parts = [(piece**2).sum() * (rank + 1) for piece in pieces]
        if not parts:  # replicas send each other their parts, which concerns nobody else
            return layout, []
        torch.stack(parts).sum().backward()
        return local_grads(x)

    full = value_of(layout).detach()
    ranks = torch.zeros_like(full)
    for rank in range(WORLD_SIZE):
        for box in layout.boxes_of(rank):
            ranks[box.slices()] += rank + 1
    check_grads(simulate(run, WORLD_SIZE).results, layout, 2 * full * ranks)


@given(ways())
def test_second_derivatives_are_those_of_the_full_tensor(way: list[Layout]) -> None:
    def run(_: int) -> tuple[Layout, list[torch.Tensor]]:
        x = leaf(way[0])
        full = shardwise.reshard(shardwise.reshard(x, way[1]), way[2]).full_tensor()
        (grad,) = torch.autograd.grad((full**3).sum(), x, create_graph=True)
        assert isinstance(grad, ShardedTensor)
        (grad.full_tensor() ** 2 * weights(full.shape)).sum().backward()
        return local_grads(x)

    if way[0].pending == "avg":  # whose first gradient depends on the number of terms
        return
    full = value_of(way[0])
    (grad,) = torch.autograd.grad((full**3).sum(), full, create_graph=True)
    (grad**2 * weights(full.shape)).sum().backward()
    assert full.grad is not None
    check_grads(simulate(run, WORLD_SIZE).results, way[0], full.grad)


def _branches(rank: int, way: list[Layout]) -> tuple[Layout, list[torch.Tensor]]:
    """A graph with branches: backward meets in the same order on all ranks."""
    x = leaf(way[0])
    left, right = shardwise.reshard(x, way[1]), shardwise.reshard(x, way[2])
    again = shardwise.reshard(left, way[2])
    full = left.full_tensor() * right.full_tensor() + again.full_tensor()
    (full * weights(full.shape)).sum().backward()
    return local_grads(x)


@given(ways())
def test_branches_add_up(way: list[Layout]) -> None:
    full = value_of(way[0])
    ((full * full + full) * weights(full.shape)).sum().backward()
    assert full.grad is not None
    results = simulate(lambda rank: _branches(rank, way), WORLD_SIZE).results
    check_grads(results, way[0], full.grad)


def _on_real_ranks(rank: int, listed: list[list[Layout]]) -> list[Any]:
    return [(through(way), _branches(rank, way)) for way in listed]


def test_real_ranks_have_the_same_gradients() -> None:
    listed = examples(ways(), 25)
    results = shardwise.run_local(_on_real_ranks, WORLD_SIZE, listed)
    for number, way in enumerate(listed):
        check_grads([held[number][0] for held in results], way[0], expected_through(way))
        full = value_of(way[0])
        ((full * full + full) * weights(full.shape)).sum().backward()
        assert full.grad is not None
        check_grads([held[number][1] for held in results], way[0], full.grad)


def _unwrapped(rank: int) -> None:
    """Rows of the table of gradients that end in plain tensors."""
    full = torch.arange(1.0, 13.0).view(4, 3)
    rows = shardwise.distribute(full.clone().requires_grad_(), shardwise.chunk(0, [1, 3, 0]))
    ((rank + 1) * rows.local_tensor()).sum().backward()  # own box -> own box
    weight = torch.tensor([1.0, 2.0, 2.0, 2.0])[:, None]
    assert torch.equal(rows.grad.full_tensor(), weight.expand(4, 3))
    two: Any = shardwise.distribute(
        full.clone().requires_grad_(), shardwise.grid([2, 1], ranks=[[0, 1], [2, 0]])
    )
    total = sum(shard.tensor.sum() for shard in two.local_shards())
    total.backward()  # equal on all replicas
    assert torch.equal(two.grad.full_tensor(), torch.ones(4, 3))
    two.grad = None
    total = sum((rank + 1) * shard.tensor.sum() for shard in two.local_shards(grad="sum"))
    total.backward()  # own parts: ranks 0 and 1 of the upper rows, 2 and 0 of the lower
    expected = torch.tensor([3.0, 3.0, 4.0, 4.0])[:, None].expand(4, 3)
    assert torch.equal(two.grad.full_tensor(), expected)
    everywhere = shardwise.distribute(full.clone().requires_grad_(), shardwise.replicate())
    ((rank + 1) * everywhere.local_tensor(grad="sum")).sum().backward()
    assert torch.equal(everywhere.grad.full_tensor(), torch.full((4, 3), 6.0))
    pending = shardwise.reshard(everywhere, shardwise.partial())
    assert not pending.local_tensor().requires_grad
    assert not pending.local_shards()[0].tensor.requires_grad
    gathered = everywhere.gather(1)
    assert gathered is None or not gathered.requires_grad
    one = shardwise.distribute(torch.tensor([2.0]).requires_grad_(), shardwise.on_rank(1))
    shardwise.reshard(one, shardwise.partial("avg")).backward()
    assert one.grad.full_tensor().item() == 1.0
    with pytest.raises(ValueError, match="'same' or 'sum'"):
        rows.local_tensor(grad="all")  # type: ignore[arg-type]  # wrong on purpose
    for op in ("max", "min", "product"):
        with pytest.raises(OpError, match=f"pending {op}"):
            shardwise.reshard(rows, shardwise.partial(op))
        detached = shardwise.reshard(rows.detach(), shardwise.partial(op))
        with pytest.raises(OpError, match=f"pending {op}"):
            detached.requires_grad_()
        assert torch.equal(detached.full_tensor(), full)


def test_plain_tensors_give_their_gradients_back() -> None:
    shardwise.run_local(_unwrapped, 3)


def _checkpointed(_: int) -> None:
    """Recomputed in backward, with a rank that holds nothing."""
    from torch.utils.checkpoint import checkpoint

    full = torch.arange(12.0).view(4, 3)
    x = shardwise.distribute(full.clone().requires_grad_(), shardwise.chunk(0, ranks=[2, 0]))

    def inner(t: Any) -> Any:
        moved = shardwise.reshard(t, shardwise.chunk(1, ranks=[0, 1]))
        return shardwise.reshard(moved, shardwise.replicate())

    y = checkpoint(inner, x, use_reentrant=False)
    z = checkpoint(inner, shardwise.reshard(x, shardwise.chunk(1)), use_reentrant=False)
    (y.full_tensor() ** 2 + z.full_tensor() * 3).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full + 3)


def test_checkpointing_recomputes_at_the_same_node_on_every_rank() -> None:
    shardwise.run_local(_checkpointed, 3)
