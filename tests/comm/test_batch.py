"""Small tensors of one plan share the work, and nobody can tell from the results."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import pytest
import torch

import shardwise
from shardwise._torch_compat import unbind_copy
from shardwise.comm import Transfer, aside, batch, communicator, execute_all
from shardwise.comm.alike import sort_out
from shardwise.comm.batch import Batch, batched
from shardwise.comm.checks import set_check
from shardwise.comm.simulate import simulate
from shardwise.errors import ShardwiseError
from shardwise.testing.memory import peak_tensor_bytes
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import TransferPlan, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def _unmoved(layout: Layout, count: int, dtype: torch.dtype = torch.float32) -> list[Transfer]:
    plan = plan_reshard(layout, layout, dtype.itemsize)
    shards = [torch.zeros(box.shape, dtype=dtype) for box in layout.boxes_of(0)]
    return [Transfer(plan, shards) for _ in range(count)]


def _exchanges(transfers: list[Transfer]) -> list[list[int]]:
    """How many tensors move as one, by exchange."""
    members = communicator()
    return [
        [len(item.numbers) if isinstance(item, Batch) else 1 for item in listed]
        for listed in batched(sort_out(transfers, members), members)
    ]


def test_only_small_tensors_of_one_plan_and_dtype_are_batched() -> None:
    def look(rank: int) -> None:
        small, other = _layout("chunk(0)"), _layout("chunk(1)")
        large = _layout("replicate()", (1 << 8, 1 << 7))
        listed = _unmoved(small, 4) + _unmoved(other, 3) + _unmoved(small, 5, torch.int32)
        assert _exchanges(listed + _unmoved(large, 6)) == [[4, *[1] * 3, 5, *[1] * 6]]

    simulate(lambda rank: look(rank) if rank == 0 else None, 3)


def test_large_batches_go_in_slices_one_after_the_other() -> None:
    def look(rank: int) -> None:
        listed = _unmoved(_layout("replicate()", WIDE), 72) + _unmoved(_layout("chunk(0)"), 4)
        assert _exchanges(listed) == [[32], [32], [8], [4]]

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


def test_batches_take_the_memory_of_few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_MOST_THREADS", 0)  # else a few more, and not seen from here
    shapes = [(96, 64), (96, 63), (93, 64)]  # of which each is a batch of its own
    plans = [plan_reshard(_layout("chunk(0)", s), _layout("chunk(1)", s), 4) for s in shapes]

    def peak(rank: int) -> int:
        held = [random_shards(plan.source)[rank] for plan in plans]
        transfers = [Transfer(*both) for both in zip(plans, held, strict=True) for _ in range(700)]
        return peak_tensor_bytes(lambda: execute_all(transfers))

    for rank, found in enumerate(simulate(peak, 3).results):
        outputs = 700 * sum(plan.output_bytes[rank] for plan in plans)  # 16 MiB
        # Two slices: their shards and outputs, and what they send and receive.
        assert outputs < found <= outputs + 2 * 4 * (2 << 20)


def _moved_aside(rank: int, num_cores: int, with_inference: bool) -> tuple[bool, int]:
    """Whether results are right, and how many are inference tensors; threads hand them out."""
    names: set[str] = set()

    def noted(stack: torch.Tensor) -> Sequence[torch.Tensor]:
        names.add(threading.current_thread().name)
        return unbind_copy(stack)

    plan = plan_reshard(_layout("chunk(0)", WIDE), _layout("chunk(1)", WIDE), 4)
    held = [random_shards(plan.source, seed=k)[rank] for k in range(1000)]
    (box,) = plan.target.boxes_of(rank)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(with_inference):
        patch.setattr(aside, "_num_cores", lambda: num_cores)
        patch.setattr(batch, "unbind_copy", noted)
        results = execute_all([Transfer(plan, shards) for shards in held])
    assert {name.split("_")[0] for name in names} == {"shardwise aside"}
    assert len(names) <= num_cores // 4
    fulls = {k: assemble(plan.source, random_shards(plan.source, seed=k)) for k in (0, 500, 999)}
    is_equal = all(torch.equal(results[k][0], full[box.slices()]) for k, full in fulls.items())
    return is_equal, sum(tensor.is_inference() for result in results for tensor in result)


@pytest.mark.parametrize("num_cores", [4, 8])
@pytest.mark.parametrize("with_inference", [False, True])
def test_other_threads_hand_out_what_the_first_would(num_cores: int, with_inference: bool) -> None:
    found = shardwise.run_local(_moved_aside, 3, num_cores, with_inference)
    assert found == [(True, 1000 if with_inference else 0)] * 3


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


ODD = ["out", "device", "tuple", "strided", "grad", "parameter", "conjugate", "plan"]


def _with_odd_ones(rank: int, odd_rank: int) -> list[list[torch.Tensor]]:
    """On one rank there is something special about every seventh of many transfers."""
    source, target = _layout("block_cyclic(0, 1)", (6, 8)), _layout("block_cyclic(1, 2)", (6, 8))
    plan = plan_reshard(source, target, 8)
    transfers = []
    for number in range(7 * len(ODD)):
        shards: Sequence[torch.Tensor] = random_shards(source, torch.complex64, seed=number)[rank]
        transfer = Transfer(plan, shards)
        kind = ODD[number // 7] if number % 7 == 3 and rank == odd_rank else ""
        if kind == "out":
            boxes = target.boxes_of(rank)
            transfer = transfer._replace(
                out=[torch.zeros(box.shape[::-1], dtype=torch.complex64).t() for box in boxes]
            )
        elif kind == "device":
            transfer = transfer._replace(device="cpu")
        elif kind == "tuple":
            transfer = transfer._replace(shards=tuple(shards))
        elif kind == "plan":
            transfer = transfer._replace(plan=TransferPlan(source, target, 8))
        elif kind:
            transfer = transfer._replace(shards=[_same_values(shard, kind) for shard in shards])
        transfers.append(transfer)
    results = execute_all(transfers)
    for transfer, result in zip(transfers, results, strict=True):
        for tensor in result:
            assert not tensor.requires_grad
            assert not tensor.is_conj()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        if transfer.out is not None:
            assert [t.data_ptr() for t in result] == [t.data_ptr() for t in transfer.out]
    return results


def _same_values(shard: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "strided":
        return shard.t().contiguous().t()
    if kind == "grad":
        return shard.requires_grad_()
    if kind == "parameter":
        return torch.nn.Parameter(shard)
    assert kind == "conjugate"
    return shard.conj().resolve_conj().conj()


@pytest.mark.parametrize("odd_rank", [0, 2])
def test_what_is_special_on_one_rank_does_not_show(odd_rank: int) -> None:
    results = simulate(_with_odd_ones, 3, odd_rank).results
    source, target = _layout("block_cyclic(0, 1)", (6, 8)), _layout("block_cyclic(1, 2)", (6, 8))
    for number in range(7 * len(ODD)):
        found = assemble(target, {rank: held[number] for rank, held in enumerate(results)})
        expected = assemble(source, random_shards(source, torch.complex64, seed=number))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_sliced_batches_of_several_shards_on_some_ranks_only() -> None:
    shape = (64, 64)
    source = _layout("block_cyclic(0, 8, ranks=[0, 2])", shape)
    target = _layout("block_cyclic(1, 5, ranks=[2, 1])", shape)
    plan = plan_reshard(source, target, 4)

    def move(rank: int) -> list[list[torch.Tensor]]:
        held = [random_shards(source, seed=k).get(rank, []) for k in range(400)]
        assert len(_exchanges([Transfer(plan, shards, None, torch.float32) for shards in held])) > 1
        return execute_all([Transfer(plan, shards, None, torch.float32) for shards in held])

    results = simulate(move, 3).results
    assert all(tensors == [] for tensors in results[0])
    assert len({id(tensors) for tensors in results[0]}) == 400
    for k in range(400):
        found = assemble(target, {rank: held[k] for rank, held in enumerate(results)})
        torch.testing.assert_close(found, assemble(source, random_shards(source, seed=k)))


WRONG: dict[str, object] = {
    "shapes": [torch.zeros(2, 9)],
    "shards": [None],
    "a list of tensors": torch.zeros(2, 10),
    "one for each box": [],
    "dtype": [torch.zeros(2, 10, dtype=torch.float64)],
    "dense": [torch.zeros(2, 10).to_sparse()],
    "with data": [torch.zeros(2, 10, device="meta")],
}


def _with_a_wrong_one(rank: int, words: str, wrong_ranks: Sequence[int]) -> str:
    source, target = _layout("chunk(0)"), _layout("chunk(1)")
    plan = plan_reshard(source, target, 4)
    transfers = [
        Transfer(plan, random_shards(source, seed=k)[rank], name=f"w{k}") for k in range(100)
    ]
    execute_all(transfers)
    if rank in wrong_ranks:
        transfers[57] = transfers[57]._replace(shards=cast("list[torch.Tensor]", WRONG[words]))
    with pytest.raises(ShardwiseError) as caught:
        execute_all(transfers)
    return str(caught.value)


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_tensor_among_many_stops_all_ranks(words: str) -> None:
    with set_check("debug"):
        found = simulate(_with_a_wrong_one, 3, words, [1]).results
    assert all("w57" in message for message in found)
    assert words in found[1]


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_tensor_among_many_is_found_before_anything_moves(words: str) -> None:
    simulation = simulate(_with_a_wrong_one, 3, words, range(3))
    assert all("w57" in message and words in message for message in simulation.results)
    plan = plan_reshard(_layout("chunk(0)"), _layout("chunk(1)"), 4)
    assert simulation.traffic.total_bytes == 100 * plan.total_bytes  # of the first, right call
