"""Small tensors of one plan share the work, and nobody can tell from the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import shardwise
from shardwise.comm import Transfer, communicator, execute_all
from shardwise.comm.batch import Batch, batched
from shardwise.comm.load import load_of
from shardwise.comm.simulate import simulate
from shardwise.testing.memory import peak_tensor_bytes
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import TransferPlan, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.load import Load
    from shardwise.geometry import Layout

SHAPE = (6, 10)
WIDE = (128, 128)  # 64 KiB of float32: a slice holds 32


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


def _loads(layout: Layout, count: int, dtype: torch.dtype = torch.float32) -> list[Load]:
    plan = plan_reshard(layout, layout, dtype.itemsize)
    shards = [torch.zeros(box.shape, dtype=dtype) for box in layout.boxes_of(0)]
    return [load_of(Transfer(plan, shards), communicator()) for _ in range(count)]


def _sizes(listed: Sequence[Load | Batch]) -> list[int]:
    return [len(item.loads) if isinstance(item, Batch) else 1 for item in listed]


def test_only_small_tensors_of_one_plan_and_dtype_are_batched() -> None:
    def look(rank: int) -> None:
        small, other = _layout("chunk(0)"), _layout("chunk(1)")
        large = _layout("replicate()", (1 << 8, 1 << 7))
        listed = _loads(small, 4) + _loads(other, 3) + _loads(small, 5, torch.int32)
        (together,) = batched(listed + _loads(large, 6), communicator())
        assert _sizes(together) == [4, *[1] * 3, 5, *[1] * 6]

    simulate(lambda rank: look(rank) if rank == 0 else None, 3)


def test_large_batches_go_in_slices_one_after_the_other() -> None:
    def look(rank: int) -> None:
        listed = _loads(_layout("replicate()", WIDE), 72) + _loads(_layout("chunk(0)"), 4)
        *slices, others = batched(listed, communicator())
        assert [_sizes(listed) for listed in slices] == [[32], [32], [8]]
        assert _sizes(others) == [4]

    simulate(lambda rank: look(rank) if rank == 0 else None, 3)


SLICED = [("chunk(0)", "replicate()"), ("partial()", "replicate()"), ("on_rank(1)", "chunk(0)")]


def _sliced(rank: int, kind: str) -> list[list[torch.Tensor]]:
    """Batches of a slice and a bit each, in between each other; some transfers are special."""
    transfers = []
    for number in range(40):
        for source, target in SLICED:
            layouts = (_layout(source, WIDE), _layout(target, WIDE))
            plan = plan_reshard(*layouts, 4)
            shards = random_shards(plan.source, seed=number).get(rank, [])
            out = None
            if number == 20 and kind == "out":
                out = [torch.zeros(box.shape) for box in plan.target.boxes_of(rank)]
            if number == 20 and kind == "strided":
                shards = [shard.t().contiguous().t() for shard in shards]
            if number == 20 and kind == "grad":
                shards = [shard.requires_grad_() for shard in shards]
            if number == 20 and kind == "negative":
                shards = [torch.complex(shard, -shard).conj().imag for shard in shards]
                assert all(shard.is_neg() for shard in shards)
            transfers.append(Transfer(plan, shards, out, torch.float32))
    results = execute_all(transfers)
    assert not any(tensor.requires_grad for result in results for tensor in result)
    return results


@pytest.mark.parametrize("kind", ["usual", "out", "strided", "grad", "negative"])
def test_slices_give_what_single_tensors_give(kind: str) -> None:
    simulation = simulate(_sliced, 3, kind)
    _check_sliced(simulation.results)
    plans = [plan_reshard(_layout(a, WIDE), _layout(b, WIDE), 4) for a, b in SLICED]
    assert simulation.traffic.total_bytes == 40 * sum(plan.total_bytes for plan in plans)


def test_slices_on_real_ranks() -> None:
    _check_sliced(shardwise.run_local(_sliced, 3, "usual"))


def _check_sliced(results: Sequence[list[list[torch.Tensor]]]) -> None:
    for number in range(40):
        for k, (source, target) in enumerate(SLICED):
            at = number * len(SLICED) + k
            held = {rank: result[at] for rank, result in enumerate(results)}
            found = assemble(_layout(target, WIDE), held)
            before = _layout(source, WIDE)
            expected = assemble(before, random_shards(before, seed=number))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            if target == "replicate()":  # bit for bit
                assert all(torch.equal(held[0][0], held[rank][0]) for rank in held)


def test_a_batch_takes_the_memory_of_few_slices() -> None:
    source, target = _layout("chunk(0)", (96, 64)), _layout("chunk(1)", (96, 64))
    plan = plan_reshard(source, target, 4)

    def peak(rank: int) -> int:
        transfers = [Transfer(plan, random_shards(source)[rank])] * 2048
        return peak_tensor_bytes(lambda: execute_all(transfers))

    outputs = 2048 * plan.output_bytes[0]  # 16 MiB
    for found in simulate(peak, 3).results:
        # Two slices: their shards and outputs, and what they send and receive.
        assert outputs < found <= outputs + 2 * 4 * (2 << 20)


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
