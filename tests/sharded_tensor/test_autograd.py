"""Gradients as users touch them: hooks, writing into `.grad`, optimizers, in-place reshards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.to_layouts import reshard_all_in_place

FULL = torch.arange(12.0).view(4, 3)


def several() -> Any:
    """Two rows on each rank, as two shards."""
    return leaf(shardwise.block_cyclic(0, 1, ranks=[0, 1]))


def leaf(spec: Any) -> Any:
    return shardwise.distribute(FULL.clone(), spec).requires_grad_()


def _hooks(_: int) -> None:
    shardwise.implicit_comm("allow")
    x, seen = leaf(shardwise.chunk(0)), []
    x.register_hook(lambda grad: grad * 3)  # of another layout than x, by gathering
    x.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    x.full_tensor().sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 3.0))
    assert seen == [(4, 3)]
    y = shardwise.reshard(x, shardwise.chunk(1))
    y.register_hook(lambda grad: grad.neg())
    y.full_tensor().sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 3))

    # Where a rank has several shards, some gradients are accumulated before all are known.
    for change in (lambda grad: grad * 2, lambda grad: grad.mul_(2)):
        x = several()
        x.register_hook(change)
        with pytest.raises(OpError, match=r"several shards.*may only look.*register_post_acc"):
            x.full_tensor().sum().backward()
    x, told = several(), []
    x.register_hook(lambda grad: told.append(grad.full_tensor().sum().item()))
    x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    x.full_tensor().sum().backward()
    assert told == [12.0]
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))

    # A backward that reaches some shards only does not count for the next one.
    x, told = several(), []
    x.register_post_accumulate_grad_hook(lambda p: told.append(p.grad is not None))
    held = [shard.tensor for shard in x.local_shards()]
    if len(held) > 1:
        held[0].sum().backward()
        assert told == []
    x.full_tensor().sum().backward()
    assert told == [True]

    x, told = leaf(shardwise.chunk(0)), []
    x.register_hook(lambda grad: told.append(1))
    x.data = leaf(shardwise.chunk(1)).detach()  # hooks stay with the tensor
    x.full_tensor().sum().backward()
    assert told == [1]
    assert x.grad.shard_layout == x.shard_layout


def test_hooks_change_the_gradient_or_say_that_they_cannot() -> None:
    shardwise.run_local(_hooks, 2)


def _written(rank: int) -> None:
    shardwise.implicit_comm("allow")
    x = several()
    x.local_shards()[0].tensor.sum().backward()  # the other shard gets no gradient
    x.grad.add_(1)
    assert torch.equal(x.grad.full_tensor()[:, 0], torch.tensor([2.0, 2.0, 1.0, 1.0]))
    found: Any
    (found,) = torch.autograd.grad(x.local_shards()[0].tensor.sum(), [x])
    assert torch.equal(found.local_shards()[1].tensor, torch.zeros(1, 3))
    y = several()
    total = x.full_tensor().sum()
    with pytest.raises(RuntimeError, match="index 1 appears to not have been used"):
        torch.autograd.grad(total, [x, y], retain_graph=True)
    found = torch.autograd.grad(total, [x, y], allow_unused=True)
    assert torch.equal(found[0], torch.ones(4, 3))
    assert found[1:] == (None,)

    layout = Layout((2,), [Box((0,), (2,))] * 3, [0, 0, 1], terms=[0, 1, 2], pending="sum")
    whole = shardwise.as_replicated(torch.tensor([1.0, 2.0]))
    pending: Any = shardwise.reshard(whole, layout).requires_grad_()
    pending.full_tensor().sum().backward()
    with pytest.raises(OpError, match=rf"\[rank {rank}\] .*would not change"):
        pending.grad.mul_(2)
    assert torch.equal(pending.grad, torch.ones(2))


def test_what_is_written_into_a_gradient_stays_or_is_refused() -> None:
    shardwise.run_local(_written, 2)


def _resharded(rank: int) -> None:
    x = leaf(shardwise.chunk(0))
    if rank == 0:
        x.local_tensor().sum().backward()  # rank 1 has no gradient yet
    x.reshard(shardwise.chunk(1))
    assert torch.equal(x.grad.full_tensor()[:, 0], torch.tensor([1.0, 1.0, 0.0, 0.0]))

    mean = shardwise.distribute(torch.tensor([4.0, 8.0]), shardwise.partial("avg"))
    mean.requires_grad_().full_tensor().sum().backward()
    assert mean.grad.full_tensor().tolist() == [0.5, 0.5]  # of each of two terms
    mean.reshard(shardwise.chunk(0))
    assert mean.grad.full_tensor().tolist() == [1.0, 1.0]  # of the mean
    mean.reshard(shardwise.partial("avg"))
    assert mean.grad.full_tensor().tolist() == [0.5, 0.5]

    layout = shardwise.chunk(0).layout((4, 3))
    x.reshard(layout)
    assert x.shard_layout == layout
    assert isinstance(x.sharding_spec(), shardwise.sharding_spec.ShardingSpec)


def test_an_in_place_reshard_takes_the_gradient_along_whoever_has_one() -> None:
    shardwise.run_local(_resharded, 2, timeout=30)


def _late(_: int) -> None:
    """Backward of a graph that began before the tensor was laid out anew, or got other data."""
    rows, columns = shardwise.chunk(0), shardwise.chunk(1)
    for spec in (rows, shardwise.grid([2, 1]), rows.layout((4, 3))):  # all the same layout
        x = leaf(rows)
        seen: list[Any] = []
        x.register_hook(seen.append)
        loss = (x * FULL).full_tensor().sum()
        x.reshard(spec)
        loss.backward()
        assert torch.equal(x.grad.full_tensor(), FULL)
        assert len(seen) == 1
        if not isinstance(spec, Layout):
            assert x.sharding_spec() is spec
    changes: list[Any] = [
        lambda x: x.reshard(columns),
        lambda x: reshard_all_in_place({"x": x}, {"x": columns}),
        lambda x: setattr(x, "data", shardwise.distribute(FULL, columns)),
        lambda x: setattr(x, "data", shardwise.distribute(FULL.double(), rows)),
    ]
    for change in changes:
        x = leaf(rows)
        loss = (x * FULL).full_tensor().sum()
        change(x)
        with pytest.raises(OpError, match=r"layout that a ShardedTensor had .*backward before"):
            loss.backward()
        assert x.grad is None
        x.full_tensor().sum().backward()  # of a graph that has begun since
        assert torch.equal(x.grad.full_tensor(), torch.ones(4, 3))
    x = leaf(rows)
    (held,) = x.local_shards()
    x.reshard(columns)
    held.tensor.sum().backward()  # who has the pieces may still use them
    assert torch.equal(held.tensor.grad, torch.ones_like(held.tensor))


def test_a_gradient_for_an_earlier_layout_arrives_or_is_refused() -> None:
    simulate(_late, 2)


def _converted(_: int) -> None:
    """Backward of a graph that began before `Module.to`, which may change nothing."""
    for spec in (shardwise.chunk(0), shardwise.on_rank(1), shardwise.block_cyclic(0, 1)):
        module = torch.nn.Linear(3, 4, bias=False)
        module.weight = torch.nn.Parameter(leaf(spec).detach())
        weight: Any = module.weight
        seen: list[Any] = []
        weight.register_hook(lambda _, seen=seen: seen.append(1))
        loss = (weight * FULL).full_tensor().sum()
        module.to("cpu").float()
        loss.backward()
        assert torch.equal(weight.grad.full_tensor(), FULL)
        assert len(seen) == 1
        weight.grad = None
        loss = (weight * FULL).full_tensor().sum()
        module.double()
        with pytest.raises(OpError, match=r"resharded in place or converted.*backward before"):
            loss.backward()
        (weight * FULL).full_tensor().sum().backward()
        assert torch.equal(weight.grad.full_tensor(), FULL.double())


def test_a_gradient_arrives_in_a_module_that_is_where_it_was_or_is_refused() -> None:
    simulate(_converted, 2)


def _data(_: int) -> None:
    x = leaf(shardwise.chunk(0))
    (x * FULL).full_tensor().sum().backward()
    x.data = shardwise.distribute(FULL + 1, shardwise.chunk(0))
    assert torch.equal(x.grad.full_tensor(), FULL)
    x.data = shardwise.distribute(FULL.double(), shardwise.chunk(0))
    assert torch.equal(x.grad.full_tensor(), FULL.double())
    other = shardwise.distribute(FULL.double(), shardwise.chunk(1))
    with pytest.raises(OpError, match=r"has a gradient, in another layout.*st.reshard\(spec\)"):
        x.data = other
    x.reshard(shardwise.chunk(1))
    x.data = other
    assert torch.equal(x.grad.full_tensor(), FULL.double())


def test_other_data_leave_the_gradient_as_it_is() -> None:
    simulate(_data, 2)


def _plain(_: int) -> None:
    """A plain tensor that is the same everywhere gets the whole gradient everywhere."""
    for spec in (shardwise.chunk(0), shardwise.on_rank(1), shardwise.partial()):
        weight: Any = FULL.clone().requires_grad_()
        number: Any = torch.tensor(2.0, requires_grad=True)
        row: Any = torch.ones(3, requires_grad=True)
        x = shardwise.sharded_tensor.zeros(spec, 4, 3)
        (x.clone().copy_(weight).full_tensor() * FULL).sum().backward()
        assert torch.equal(weight.grad, FULL)
        (x.clone().fill_(number).full_tensor() * FULL).sum().backward()
        assert number.grad == FULL.sum()
        (x.clone().copy_(row).full_tensor() * FULL).sum().backward()
        assert torch.equal(row.grad, FULL.sum(0))
        y = x.clone().copy_(weight)
        with pytest.raises(OpError, match=r"autograd.Function"):
            _Own.apply(y).full_tensor()
    x = leaf(shardwise.chunk(0))
    y = shardwise.reshard(x, shardwise.chunk(1))
    y.uniform_()  # past which no gradient flows
    y.full_tensor().sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 3))


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_plain_sources_of_copies_get_their_whole_gradient() -> None:
    shardwise.run_local(_plain, 2)


def _trained(_: int) -> None:
    shardwise.implicit_comm("allow")
    kinds: tuple[Any, ...] = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)
    for kind in kinds:
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            for x in (several(), leaf(shardwise.on_rank(0)), leaf(shardwise.replicate())):
                full = FULL.clone().requires_grad_()
                for weight in (x, full):
                    optimizer = kind([weight], lr=0.1, **options)
                    for _step in range(2):
                        optimizer.zero_grad()
                        found = weight if weight is full else weight.full_tensor()
                        (found**2).sum().backward()
                        foreach = options.get("foreach")
                        norm = torch.nn.utils.clip_grad_norm_([weight], 5.0, foreach=foreach)
                        assert float(norm) > 5
                        optimizer.step()
                torch.testing.assert_close(x.full_tensor(), full)


def test_stock_optimizers_train_as_on_the_full_tensor() -> None:
    shardwise.run_local(_trained, 2)


def _checkpointed(rank: int) -> None:
    shardwise.implicit_comm("allow")
    x = leaf(shardwise.on_rank(0))

    def run(x: Any) -> Any:
        rows = shardwise.reshard(x, shardwise.chunk(0, sizes=[4, 0])) * 2.0
        return shardwise.reshard(rows, shardwise.chunk(1))

    checkpoint(run, x, use_reentrant=False).full_tensor().pow(2).sum().backward()
    assert torch.equal(x.grad, 8 * FULL)

    # Only rank 0 saves a tensor for backward; the others still recompute with it.
    def run_by_rank(x: Any) -> Any:
        local = shardwise.reshard(x, shardwise.chunk(0)).local_tensor()
        own = local.pow(2) if rank == 0 else local.view_as(local)
        return shardwise.reshard(shardwise.as_local_rows(own, [2, 2]), shardwise.chunk(1))

    x = leaf(shardwise.chunk(1))
    checkpoint(run_by_rank, x, use_reentrant=False).full_tensor().sum().backward()
    assert torch.equal(x.grad, torch.cat([2 * FULL[:2], torch.ones(2, 3)]))


def test_checkpointing_recomputes_where_a_rank_holds_nothing() -> None:
    shardwise.run_local(_checkpointed, 2, timeout=30)
