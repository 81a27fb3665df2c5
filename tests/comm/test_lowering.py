"""Collectives in place of messages, as NCCL has them; simulated, for want of two GPUs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.comm import Transfer, communicator, execute_all
from shardwise.comm.lowering import _is_flat_range
from shardwise.comm.simulate import SimulatedCommunicator, simulate
from shardwise.geometry import Box, Layout
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import TransferPlan
from shardwise.transfer.patterns import recognise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.transfer.patterns import Pattern

RANKS = (0, 1, 2, 3)
SHAPE = (8, 12)


def _layout(text: str, shape: tuple[int, ...] = SHAPE) -> Layout:
    return shardwise.parse_spec(text, ranks=RANKS, device="cpu").layout(shape)


CASES = [
    ("chunk(0)", "replicate()", "all_gather"),
    ("chunk(1, ranks=[2, 0, 3, 1])", "replicate()", "all_gather"),
    ("grid([2, 2])", "replicate()", "all_gather"),
    ("on_rank(2)", "replicate()", "broadcast"),
    ("partial()", "replicate()", "all_reduce"),
    ("partial('max')", "replicate()", "all_reduce"),
    ("partial()", "chunk(0)", "reduce_scatter"),
    ("partial('avg')", "chunk(1, ranks=[3, 1, 0, 2])", "reduce_scatter"),
    ("partial('product')", "grid([2, 2])", "reduce_scatter"),
    # These are none.
    ("chunk(0)", "chunk(1)", None),
    ("chunk(0, sizes=[1, 3, 2, 2])", "replicate()", None),
    ("chunk(0, ranks=[0, 1])", "replicate()", None),
    ("chunk(0)", "replicate(ranks=[0, 1, 2])", None),
    ("block_cyclic(0, 1)", "replicate()", None),
    ("partial(ranks=[0, 1])", "replicate()", None),
    ("partial()", "chunk(0, sizes=[1, 3, 2, 2])", None),
    ("partial()", "partial()", None),
    ("replicate()", "chunk(0)", None),
]


@pytest.mark.parametrize(("source", "target", "pattern"), CASES)
def test_regular_patterns_are_recognised(source: str, target: str, pattern: Pattern | None) -> None:
    plan = TransferPlan(_layout(source), _layout(target), 4)
    assert recognise(plan, RANKS) == pattern


def test_a_pattern_is_one_over_exactly_the_group() -> None:
    plan = TransferPlan(_layout("chunk(0)"), _layout("replicate()"), 4)
    assert recognise(plan, (3, 1, 0, 2)) == "all_gather"
    assert recognise(plan, (0, 1, 2, 3, 4)) is None
    empty = TransferPlan(_layout("chunk(0)", (0, 3)), _layout("replicate()", (0, 3)), 4)
    assert recognise(empty, RANKS) is None


class _Counting:
    """Counts the collectives of the simulated ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "flight"):
            monkeypatch.setattr(SimulatedCommunicator, name, self._counted(name))

    def _counted(self, name: str) -> Any:
        original = getattr(SimulatedCommunicator, name)

        def call(members: SimulatedCommunicator, *args: Any) -> Any:
            self.calls[name] += 1
            return original(members, *args)

        return call


Case = tuple[Layout, Layout, torch.dtype]


def _moved(rank: int, cases: Sequence[Case], group: Sequence[int]) -> list[list[torch.Tensor]]:
    transfers = [
        Transfer(
            TransferPlan(source, target, dtype.itemsize),
            random_shards(source, dtype, seed=k).get(rank, []),
            dtype=dtype,
        )
        for k, (source, target, dtype) in enumerate(cases)
    ]
    world = communicator()
    assert isinstance(world, SimulatedCommunicator)
    return execute_all(transfers, group=world.subgroup(group))


def _check(cases: Sequence[Case], group: Sequence[int] = RANKS) -> int:
    simulation = simulate(_moved, 4, cases, group, backend="nccl")
    for k, (source, target, dtype) in enumerate(cases):
        found = assemble(target, {r: held[k] for r, held in enumerate(simulation.results)})
        torch.testing.assert_close(found, assemble(source, random_shards(source, dtype, seed=k)))
    return simulation.traffic.total_bytes


@pytest.mark.parametrize("group", [RANKS, (2, 0, 3, 1)])
@pytest.mark.parametrize(("source", "target", "pattern"), CASES)
def test_collectives_give_what_messages_give_in_as_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
    pattern: Pattern | None,
    group: Sequence[int],
) -> None:
    counting = _Counting(monkeypatch)
    case = (_layout(source), _layout(target), torch.float32)
    assert _check([case], group) == TransferPlan(case[0], case[1], 4).lower_bound
    collectives = {name: n for name, n in counting.calls.items() if name != "flight"}
    assert collectives == ({pattern: 4} if pattern else {})


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16])
def test_dtypes_that_nccl_does_not_know_move_as_bytes_and_are_reduced_by_us(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    counting = _Counting(monkeypatch)
    _check([(_layout("chunk(1)"), _layout("replicate()"), dtype)])
    assert counting.calls["all_gather"] == 4
    _check([(_layout("partial()"), _layout("replicate()"), dtype)])
    assert counting.calls["all_reduce"] == 0


def test_tensors_of_one_pattern_share_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _Counting(monkeypatch)
    odd = (4, 3)
    cases = [
        (_layout("chunk(0)", odd), _layout("replicate()", odd), torch.uint8),
        (_layout("chunk(0)"), _layout("replicate()"), torch.float64),
        (_layout("chunk(0)"), _layout("chunk(1)"), torch.float32),
        (_layout("on_rank(1)", odd), _layout("replicate()", odd), torch.int8),
        (_layout("on_rank(1)"), _layout("replicate()"), torch.complex128),
        (_layout("partial()"), _layout("replicate()"), torch.float32),
        (_layout("partial()", odd), _layout("replicate()", odd), torch.float32),
        (_layout("partial()"), _layout("chunk(0)"), torch.bfloat16),
        (_layout("partial()"), _layout("chunk(1)"), torch.bfloat16),
        (_layout("partial('max')"), _layout("replicate()"), torch.float32),
    ]
    _check(cases)
    assert counting.calls == {
        "flight": 4,
        "all_gather": 4,
        "broadcast": 4,
        "all_reduce": 8,
        "reduce_scatter": 4,
    }


def test_tensors_that_differ_in_source_or_dtype_do_not_share_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = _Counting(monkeypatch)
    everywhere = _layout("replicate()")
    cases = [
        (_layout("on_rank(1)"), everywhere, torch.float32),
        (_layout("on_rank(2)"), everywhere, torch.float32),
        (_layout("partial()"), everywhere, torch.float32),
        (_layout("partial()"), everywhere, torch.bfloat16),
    ]
    _check(cases)
    assert counting.calls == {"broadcast": 8, "all_reduce": 8}


def test_a_target_with_empty_boxes_beside_the_whole_is_no_collective() -> None:
    """Each rank has two local tensors then, of which the first is empty."""
    halves = [Box((0,), (2,)), Box((2,), (4,))]
    source = Layout((4,), halves, [0, 1])
    empty, whole = Box((0,), (0,)), Box((0,), (4,))
    target = Layout((4,), [empty, empty, whole, whole], [0, 1, 0, 1])
    assert recognise(TransferPlan(source, target, 4), (0, 1)) is None


def test_a_cap_keeps_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _Counting(monkeypatch)
    plan = TransferPlan(_layout("chunk(0)"), _layout("replicate()"), 4)

    def move(rank: int) -> None:
        shards = random_shards(plan.source)[rank]
        execute_all([Transfer(plan, shards)], max_bytes=64)

    simulate(move, 4, backend="nccl")
    assert counting.calls["all_gather"] == 0


def test_gloo_keeps_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _Counting(monkeypatch)
    plan = TransferPlan(_layout("chunk(0)"), _layout("replicate()"), 4)
    simulate(lambda rank: execute_all([Transfer(plan, random_shards(plan.source)[rank])]), 4)
    assert set(counting.calls) == {"flight"}


def test_outputs_may_be_strided() -> None:
    for text in ("chunk(0)", "on_rank(0)", "partial()"):
        plan = TransferPlan(_layout(text), _layout("replicate()"), 4)

        def move(rank: int, plan: TransferPlan = plan) -> torch.Tensor:
            out = torch.zeros(12, 8).t()
            shards = random_shards(plan.source).get(rank, [])
            execute_all([Transfer(plan, shards, [out])])
            return out

        results = simulate(move, 4, backend="nccl").results
        expected = assemble(plan.source, random_shards(plan.source))
        for result in results:
            torch.testing.assert_close(result, expected)


def test_boxes_that_lie_in_order_are_gathered_in_place() -> None:
    assert _is_flat_range(Box((2, 0), (4, 12)), SHAPE, 1)
    assert not _is_flat_range(Box((2, 0), (4, 12)), SHAPE, 2)
    assert not _is_flat_range(Box((0, 3), (8, 6)), SHAPE, 1)
    assert _is_flat_range(Box((1, 3), (2, 6)), (4, 6), 3)
