"""Small tensors of one plan share the work, and nobody can tell from the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.comm import Transfer, execute_all
from shardwise.comm.batch import Batch, batched
from shardwise.comm.simulate import simulate
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import TransferPlan, plan_reshard

if TYPE_CHECKING:
    from shardwise.geometry import Layout

SHAPE = (6, 10)


def _layout(text: str, shape: tuple[int, ...] = SHAPE) -> Layout:
    return shardwise.parse_spec(text, ranks=range(3), device="cpu").layout(shape)


KINDS: list[tuple[str, str, torch.dtype]] = [
    ("chunk(0)", "chunk(1)", torch.float32),
    ("chunk(0)", "chunk(1)", torch.bool),
    ("chunk(0)", "chunk(1)", torch.complex64),
    ("chunk(0, sizes=[5, 0, 1])", "block_cyclic(1, 2)", torch.int16),
    ("partial()", "replicate()", torch.float32),
    ("partial('avg')", "chunk(0)", torch.float32),
    ("replicate()", "partial('max')", torch.bfloat16),
    ("on_rank(2)", "flat()", torch.float8_e4m3fn),
]


def _transfers(rank: int, copies: int, *, with_out: bool) -> list[Transfer]:
    found = []
    for number in range(copies):
        for k, (source, target, dtype) in enumerate(KINDS):
            plan = plan_reshard(_layout(source), _layout(target), dtype.itemsize)
            shards = random_shards(plan.source, dtype, seed=number * len(KINDS) + k)
            out = None
            if with_out and number % 2:
                boxes = plan.target.boxes_of(rank)
                out = [torch.zeros(box.shape[::-1], dtype=dtype).t() for box in boxes]
            found.append(Transfer(plan, shards.get(rank, []), out, dtype))
    return found


def _moved(rank: int, copies: int, with_out: bool) -> list[list[torch.Tensor]]:
    transfers = _transfers(rank, copies, with_out=with_out)
    results = execute_all(transfers)
    for transfer, result in zip(transfers, results, strict=True):
        if transfer.out is not None:
            assert all(
                a.data_ptr() == b.data_ptr() for a, b in zip(transfer.out, result, strict=True)
            )
    return results


@pytest.mark.parametrize("copies", [1, 3, 4, 7])
@pytest.mark.parametrize("with_out", [False, True])
def test_batches_give_what_single_tensors_give(copies: int, with_out: bool) -> None:
    results = simulate(_moved, 3, copies, with_out).results
    for number in range(copies):
        for k, (source, target, dtype) in enumerate(KINDS):
            at = number * len(KINDS) + k
            found = assemble(_layout(target), {r: held[at] for r, held in enumerate(results)})
            expected = assemble(_layout(source), random_shards(_layout(source), dtype, seed=at))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_results_of_a_batch_own_their_memory() -> None:
    """A view of one storage would drag all of them into a saved file."""
    for result in simulate(_moved, 3, 5, False).results:
        for tensors in result:
            for tensor in tensors:
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


class _FakeLoad:
    """What `batched` looks at."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self.plan = plan_reshard(layout, layout, dtype.itemsize)
        self.dtype = dtype
        self.is_on_wire = True
        self.shards = self.outputs = [torch.zeros(1, dtype=dtype)]


def test_only_small_tensors_of_one_plan_and_dtype_are_batched() -> None:
    small, other = _layout("chunk(0)"), _layout("chunk(1)")
    large = _layout("replicate()", (1 << 8, 1 << 7))
    listed: list[Any] = [_FakeLoad(small) for _ in range(4)]
    listed += [_FakeLoad(other) for _ in range(3)]
    listed += [_FakeLoad(small, torch.int32) for _ in range(5)]
    listed += [_FakeLoad(large) for _ in range(6)]
    found = batched(listed, torch.device("cpu"))
    assert [len(batch.loads) for batch in found if isinstance(batch, Batch)] == [4, 5]
    assert len(found) == 2 + 3 + 6


def test_batches_do_not_depend_on_which_plans_are_one_object() -> None:
    source, target = _layout("block_cyclic(0, 1)"), _layout("chunk(1)")
    shared = TransferPlan(source, target, 4)

    def move(rank: int) -> list[list[torch.Tensor]]:
        plans = [shared if rank == 0 else TransferPlan(source, target, 4) for _ in range(4)]
        return execute_all(
            [
                Transfer(plan, random_shards(source, seed=k).get(rank, []), dtype=torch.float32)
                for k, plan in enumerate(plans)
            ]
        )

    results = simulate(move, 3).results
    for k in range(4):
        found = assemble(target, {rank: held[k] for rank, held in enumerate(results)})
        torch.testing.assert_close(found, assemble(source, random_shards(source, seed=k)))


def test_no_tensors_are_no_exchange() -> None:
    simulation = simulate(lambda rank: execute_all([]), 3)
    assert simulation.results == [[], [], []]
    assert simulation.traffic.total_bytes == 0
