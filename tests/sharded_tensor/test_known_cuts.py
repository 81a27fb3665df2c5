"""Distributing again by the same spec: as the first time, for other values."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError
from shardwise.metadata import TensorProperties
from shardwise.sharded_tensor import distributing, known_cuts
from shardwise.sharding_spec import EnumerableShardingSpec
from shardwise.testing.strategies import examples, shapes, specs
from shardwise.testing.tensors import assemble

if TYPE_CHECKING:
    from shardwise.sharding_spec import ShardingSpec

Case = tuple[tuple[int, ...], "ShardingSpec"]


@st.composite
def cases(draw: st.DrawFn, world_size: int = 4) -> Case:
    shape = draw(shapes(max_size=5))
    return shape, draw(specs(shape, world_size=world_size))


def full_of(shape: tuple[int, ...], turn: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 3 % 101 + turn).double().view(shape)


def _turns(rank: int, case: Case, src_rank: int | None, *, grad: bool) -> list[Any]:
    """Shards of four calls with the same spec; the second time the one rank knows less."""
    shape, spec = case
    found = []
    for turn in range(4):
        if turn == 1 and rank == 2:
            communicator().cuts.clear()
        has_data = src_rank is None or src_rank == rank
        full = full_of(shape, turn) if has_data else torch.empty(shape, dtype=torch.float64)
        made = shardwise.distribute(full.requires_grad_(grad), spec, src_rank=src_rank)
        assert made.sharding_spec() is spec
        assert made.shard_layout == spec.layout(shape)
        assert (made.dtype, made.requires_grad, made.is_leaf) == (torch.float64, grad, True)
        for shard in made.local_shards():
            assert shard.tensor.requires_grad == grad or made.shard_layout.pending is not None
            assert shard.tensor.dtype == torch.float64
            assert shard.tensor.is_leaf
        found.append([shard.tensor.detach().clone() for shard in made.local_shards()])
        with torch.no_grad():
            for shard in made.local_shards():
                shard.tensor.zero_()
        if has_data:
            assert torch.equal(full.detach(), full_of(shape, turn))  # no memory is shared
    return found


def _check(case: Case, results: list[list[Any]]) -> None:
    shape, spec = case
    for turn in range(4):
        held = {rank: result[turn] for rank, result in enumerate(results)}
        found = assemble(spec.layout(shape), held).double()  # of no pieces it has no dtype
        torch.testing.assert_close(found, full_of(shape, turn))


@given(cases(), st.sampled_from([None, 0, 3]), st.booleans())
def test_every_turn_gives_the_tensor(case: Case, src_rank: int | None, grad: bool) -> None:
    pending = case[1].layout(case[0]).pending
    grad = grad and pending in (None, "sum", "avg")
    _check(case, simulate(lambda rank: _turns(rank, case, src_rank, grad=grad), 4).results)


def _on_ranks(rank: int, listed: list[Case]) -> list[Any]:
    return [_turns(rank, case, 1, grad=False) for case in listed]


def test_ranks_that_know_meet_ranks_that_do_not() -> None:
    listed = examples(cases(world_size=3), 25)
    results = shardwise.run_local(_on_ranks, 3, listed)
    for number, case in enumerate(listed):
        _check(case, [result[number] for result in results])


def _known(rank: int) -> None:
    rows, full = shardwise.chunk(0), torch.arange(12.0).view(4, 3)
    shardwise.distribute(full, rows)
    with pytest.MonkeyPatch.context() as patch:  # which would look at the arguments
        patch.delattr(distributing, "checked_full")
        again = shardwise.distribute(full + 1, rows)
        assert torch.equal(again.full_tensor(), full + 1)
        with shardwise.set_check("never"):
            assert torch.equal(shardwise.distribute(full, rows).full_tensor(), full)


def test_arguments_are_looked_at_once() -> None:
    shardwise.run_local(_known, 2)
    simulate(_known, 1)


def _wrong(rank: int) -> None:
    rows, full = shardwise.chunk(0), torch.ones(4, 4)
    one: Any = True
    shardwise.distribute(full, rows)
    shardwise.distribute(full, rows, src_rank=None)
    sparse, meta = full.to_sparse(), full.to("meta")
    columns = shardwise.chunk(1)
    shardwise.distribute(full, columns)
    for expected, call in [
        ("does not match with sharding_spec", lambda: shardwise.distribute(
            full, columns if rank else rows)),
        ("ranks differ in dtype", lambda: shardwise.distribute(
            full.double() if rank else full, rows)),
        ("ranks differ in requires_grad", lambda: shardwise.distribute(
            full.clone().requires_grad_(rank == 1), rows)),
        ("does not match with src_rank", lambda: shardwise.distribute(full, rows, src_rank=rank)),
        ("not a contiguous Tensor", lambda: shardwise.distribute(full.t()[:, ::2].t(), rows)),
        ("not a contiguous Tensor", lambda: shardwise.distribute(
            torch.ones(8, 4)[::2] if rank == 0 else full, rows)),
        ("Only torch.strided layout", lambda: shardwise.distribute(
            sparse if rank else full, rows)),
        ("a meta tensor", lambda: shardwise.distribute(meta, rows)),
        ("expected a whole number", lambda: shardwise.distribute(full, rows, src_rank=one)),
    ]:  # fmt: skip
        for _ in range(2):
            with pytest.raises((AgreementError, ValueError, TypeError), match=expected):
                call()
            assert torch.equal(shardwise.distribute(full, rows).full_tensor(), full)


def test_wrong_calls_raise_on_all_ranks_after_right_ones() -> None:
    shardwise.run_local(_wrong, 2)


def _other_place(rank: int) -> list[list[float]]:
    found, full = [], torch.arange(2.0)
    properties = TensorProperties()
    listed = shardwise.chunk(0).build_metadata(torch.Size([2]), properties).shards_metadata
    spec = EnumerableShardingSpec(listed)
    for _ in range(2):
        for _ in range(2):
            found.append(shardwise.distribute(full, spec).local_tensor().tolist())
        first, second = spec.shards
        first.placement, second.placement = second.placement, first.placement
    return found


def test_a_spec_whose_places_were_assigned_is_looked_at() -> None:
    assert shardwise.run_local(_other_place, 2) == [
        [[0.0], [0.0], [1.0], [1.0]],
        [[1.0], [1.0], [0.0], [0.0]],
    ]


def _compared_and_told(rank: int) -> list[str]:
    rows, told = shardwise.chunk(0), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage().split()[0])

    mine = torch.full((2,), float(rank))
    shardwise.distribute(mine, rows, src_rank=None)
    with shardwise.set_check("debug"), pytest.raises(AgreementError, match="ranks differ in data"):
        shardwise.distribute(mine, rows, src_rank=None)
    with shardwise.trace(show=False) as sent:
        shardwise.distribute(torch.ones(2), rows)
        shardwise.distribute(torch.ones(2), rows)
    assert [event.op for event in sent.events] == ["compare arguments", "reshard"] * 2
    log, listener = logging.getLogger("shardwise"), Listener()
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        shardwise.distribute(mine, rows)
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
    return told


def test_debugging_traces_and_the_log_see_known_calls_too() -> None:
    assert shardwise.run_local(_compared_and_told, 2) == [["distributing", "distributing"], []]


def _remade(_: int) -> list[int]:
    full, kept = torch.arange(6.0), list[int]()
    for turn in range(20):  # specs of which each may have the id of the last
        spec = shardwise.chunk(0) if turn % 2 else shardwise.block_cyclic(0, 1)
        for _ in range(2):
            made = shardwise.distribute(full + turn, spec)
            assert torch.equal(made.full_tensor(), full + turn)
            assert made.sharding_spec() is spec
        gone = weakref.ref(spec)
        del spec, made
        kept.append(gone() is not None)
    return kept


def test_specs_made_anew_are_not_kept() -> None:
    assert shardwise.run_local(_remade, 2) == [[False] * 20] * 2


def test_no_more_than_so_many_are_kept() -> None:
    def run(_: int) -> int:
        specs = [shardwise.chunk(0) for _ in range(known_cuts._MOST_KEPT + 2)]
        most = 0
        for spec in specs:
            shardwise.distribute(torch.ones(2), spec)
            most = max(most, len(communicator().cuts))
        return most

    assert simulate(run, 2).results == [known_cuts._MOST_KEPT] * 2
