"""ReplicatedTensor and _PartialTensor: the seed's names for two layouts of the one class."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import run_local, set_check
from shardwise.errors import OpError
from shardwise.partial_tensor import _PartialTensor
from shardwise.replicated_tensor import ReplicatedTensor
from shardwise.sharded_tensor import ShardedTensor


def test_parameters_are_those_of_the_old_classes() -> None:
    assert list(inspect.signature(ReplicatedTensor).parameters) == ["data", "process_group"]
    parameters = inspect.signature(_PartialTensor).parameters
    assert list(parameters) == ["local_shard", "process_group", "reduce_op"]
    assert parameters["reduce_op"].default == dist.ReduceOp.SUM


def _addend(rank: int, size: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    numbers = torch.arange(torch.Size(size).numel(), dtype=torch.float64).view(size)
    return numbers + 1 + rank


def _expected(op: Any, ranks: list[int], size: tuple[int, ...]) -> torch.Tensor:
    stack = torch.stack([_addend(rank, size) for rank in ranks])
    if op == dist.ReduceOp.SUM:
        return stack.sum(0)
    if op == dist.ReduceOp.AVG:
        return stack.mean(0)
    return stack.max(0).values if op == dist.ReduceOp.MAX else stack.prod(0)


def _reshard_all(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    specs = [
        shardwise.chunk(0, ranks=ranks),
        shardwise.chunk(1, ranks=ranks[::-1]),
        shardwise.grid([1, len(ranks)], ranks=ranks),
        shardwise.on_rank(ranks[-1]),
        shardwise.replicate(ranks=ranks),
        shardwise.chunk(0, ranks=[*ranks, *ranks]),
    ]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for size in ((5, 3), (1, 4)):
            expected = _expected(op, ranks, size)
            differentiable = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
            for spec in specs:
                local = _addend(rank, size).requires_grad_(differentiable)
                partial = _PartialTensor(local, group, op)
                assert partial.shape == size
                assert partial._local_shard is local
                assert partial._process_group is group
                assert partial._reduce_op == op
                st = partial.reshard(spec)
                assert type(st) is ShardedTensor
                assert st is not partial
                assert st.shard_layout == spec.layout(size)
                whole = st.full_tensor()
                assert torch.allclose(whole, expected)
                assert torch.allclose(partial.full_tensor(), expected)  # which is as it was
                if differentiable:
                    (whole * expected).sum().backward()
                    share = len(ranks) if op == dist.ReduceOp.AVG else 1
                    assert local.grad is not None
                    assert torch.allclose(local.grad, expected / share)


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (3, [0, 1, 2]), (4, [1, 3])])
def test_a_partial_tensor_is_reduced_and_scattered(world_size: int, ranks: list[int]) -> None:
    run_local(_reshard_all, world_size, ranks)


def _cat_and_errors(rank: int) -> None:
    parts: list[torch.Tensor] = [_PartialTensor(_addend(rank)), _PartialTensor(_addend(rank) * 2)]
    joined: Any = torch.cat(parts, dim=1)
    assert isinstance(joined, _PartialTensor)
    total = _expected(dist.ReduceOp.SUM, [0, 1], (5, 3))
    assert torch.equal(
        joined.reshard(shardwise.chunk(0)).full_tensor(), torch.cat([total, 2 * total], 1)
    )
    for again in (torch.concatenate(parts, axis=1), torch.concat(parts, 1)):  # type: ignore[call-arg]  # numpy's
        assert type(again) is _PartialTensor
        assert torch.equal(again._local_shard, joined._local_shard)
    with pytest.raises(RuntimeError, match=r"reduce_ops need to be the same.*sum, max"):
        torch.cat([parts[0], _PartialTensor(_addend(rank), reduce_op=dist.ReduceOp.MAX)])
    with pytest.raises(RuntimeError, match="All inputs need to be an instance of _PartialTensor"):
        torch.concat([parts[0], _addend(rank)])
    with pytest.raises(OpError, match="pending max of a tensor that requires grad"):
        _PartialTensor(_addend(rank).requires_grad_(), reduce_op=dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="got _PartialTensor"):
        _PartialTensor(parts[0])
    with pytest.raises(ValueError, match="expected one of"):
        _PartialTensor(_addend(rank), reduce_op="median")
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    with set_check("debug", timeout=5), pytest.raises(ValueError, match="reduce_ops need to be"):
        _PartialTensor(_addend(rank), reduce_op=op)


def test_partial_tensors_are_concatenated_where_they_are() -> None:
    run_local(_cat_and_errors, 2)


def _replicated(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    data = _addend(0).requires_grad_()
    x = ReplicatedTensor(data, group)
    assert isinstance(x, ShardedTensor)
    assert x.shard_layout.is_replicated
    assert x.shard_layout.ranks == tuple(sorted(ranks))
    assert x._process_group is group
    assert x.local_tensor() is data
    assert x.tolist() == data.tolist()
    assert x.validate()
    assert ReplicatedTensor(process_group=group).shape == (0,)
    rows = shardwise.reshard(x, shardwise.chunk(0, ranks=ranks))
    whole = rows.full_tensor()
    (whole * data.detach()).sum().backward()
    assert data.grad is not None
    assert torch.equal(data.grad, data.detach())
    # rounding is forgiven, as are equal NaNs
    noise = 1e-12 * rank
    assert ReplicatedTensor(torch.tensor([1.0 + noise, torch.nan]).double(), group).validate()
    last = max(ranks)
    for odd, other in (
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3).double()),
        *((torch.ones(3).to(d), torch.zeros(3).to(d)) for d in (torch.int16, torch.float8_e5m2)),
    ):
        y = ReplicatedTensor(odd if rank == last else other, group)
        if len(ranks) == 1:
            assert y.validate()
            continue
        with pytest.raises(ValueError, match="have different values") as caught:
            y.validate()
        assert f"rank {last} differ from rank {ranks[0]}" in str(caught.value)


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (2, [0, 1]), (4, [1, 3])])
def test_a_replicated_tensor_is_whole_everywhere_and_knows_if_it_is_not(
    world_size: int, ranks: list[int]
) -> None:
    run_local(_replicated, world_size, ranks)


def _classes(rank: int) -> None:
    shardwise.implicit_comm("allow")
    a, b = ReplicatedTensor(torch.ones(4, 4)), ReplicatedTensor(torch.ones(4, 4).requires_grad_())
    for made in (a + b, 2 * a, a @ b, torch.relu(a), a.sum(), torch.cat([a, b]), *a.chunk(2)):
        assert type(made) is ReplicatedTensor
        assert made.validate()
    assert type(a.shape) is torch.Size
    cut = shardwise.distribute(torch.ones(4, 4), shardwise.chunk(0))
    assert type(a + cut) is ShardedTensor
    assert (a + cut).shard_layout == cut.shard_layout
    (a * b).sum().backward()
    assert torch.equal(b.grad.full_tensor(), torch.ones(4, 4))

    p, q = _PartialTensor(torch.full((4, 4), 1.0 + rank)), _PartialTensor(torch.ones(4, 4))
    for made in (p + q, 2 * p, p * a, torch.cat([p, q])):
        assert type(made) is _PartialTensor
        assert made._reduce_op == dist.ReduceOp.SUM
    assert type(torch.relu(p)) is ShardedTensor  # reduced, since relu is not linear
    assert torch.equal(
        (p + q).reshard(shardwise.replicate()).local_tensor(), torch.full((4, 4), 5.0)
    )


def test_what_comes_of_the_old_classes_is_of_them() -> None:
    run_local(_classes, 2)
