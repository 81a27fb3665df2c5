"""Ranks in one process: messages, meetings, failures."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import shardwise
from shardwise.comm import communicator, execute, should_check
from shardwise.comm.simulate import SimulatedCommunicator, simulate
from shardwise.errors import (
    AbsentRanksError,
    AgreementError,
    ArgumentValueError,
    DeviceError,
    RankFailure,
)
from shardwise.transfer import plan_reshard


def _world() -> SimulatedCommunicator:
    return cast("SimulatedCommunicator", communicator())


def _round_trip(rank: int) -> list[float]:
    """Everybody's number goes to the next rank."""
    size = len(_world().ranks)
    flight = _world().flight()
    heard = torch.zeros(2)
    flight.receive((rank - 1) % size, heard)
    flight.send((rank + 1) % size, torch.full((2,), float(rank)))
    flight.launch()
    flight.finish()
    return heard.tolist()


def test_messages_arrive_and_are_counted_by_link() -> None:
    simulation = simulate(_round_trip, 3)
    assert simulation.results == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    assert dict(simulation.traffic.bytes) == {(0, 1): 8, (1, 2): 8, (2, 0): 8}
    assert simulation.traffic.total_bytes == 24


def test_an_element_of_an_expanded_tensor_is_sent() -> None:
    def one(rank: int) -> float:
        flight, heard = _world().flight(), torch.zeros(1)
        flight.receive(1 - rank, heard)
        flight.send(1 - rank, torch.tensor(float(rank)).expand(4)[2:3])
        flight.launch()
        flight.finish()
        return heard.item()

    assert simulate(one, 2).results == [1.0, 0.0]


def test_what_is_sent_is_what_it_was_when_it_was_sent() -> None:
    def overwrite(rank: int) -> float:
        flight = _world().flight()
        buffer = torch.full((1,), 5.0)
        if rank == 0:
            flight.send(1, buffer)
            buffer.zero_()
        else:
            flight.receive(0, buffer)
            flight.land(0)
        return buffer.item()

    assert simulate(overwrite, 2).results == [0.0, 5.0]


def _collectives(rank: int) -> list[list[float]]:
    world = _world()
    gathered = torch.empty(6)
    world.all_gather(gathered, torch.full((2,), float(rank)))
    scattered = torch.empty(2)
    world.reduce_scatter(scattered, torch.arange(6.0) + rank, "sum")
    reduced = torch.tensor([float(rank)])
    world.all_reduce(reduced, "avg")
    sent = torch.full((1,), float(rank))
    world.broadcast(sent, 2)
    return [gathered.tolist(), scattered.tolist(), reduced.tolist(), sent.tolist()]


def test_collectives_do_what_torchs_do() -> None:
    simulation = simulate(_collectives, 3, backend="nccl")
    for rank, (gathered, scattered, reduced, sent) in enumerate(simulation.results):
        assert gathered == [0, 0, 1, 1, 2, 2]
        assert scattered == [3 * (2 * rank) + 3, 3 * (2 * rank + 1) + 3]
        assert reduced == [1.0]
        assert sent == [2.0]


def test_subgroups_have_mail_and_meetings_of_their_own() -> None:
    def meet(rank: int) -> list[object]:
        world = _world()
        if rank in (1, 3):
            return world.subgroup([3, 1]).gather_objects(rank)
        return world.subgroup([0, 2]).gather_objects(rank)

    assert simulate(meet, 4).results == [[0, 2], [3, 1], [0, 2], [3, 1]]
    with pytest.raises(RankFailure) as failure:
        simulate(lambda rank: _world().subgroup([1]), 2)
    assert isinstance(failure.value.__cause__, ArgumentValueError)


def test_a_deadlock_says_who_waits_for_whom() -> None:
    def wait(rank: int) -> None:
        flight = _world().flight()
        flight.receive(1 - rank, torch.zeros(1))
        flight.land(0)

    with pytest.raises(RankFailure, match="rank 0 waits for a message from rank 1") as failure:
        simulate(wait, 2)
    assert sorted(failure.value.failures) == [0, 1]


def test_the_cause_of_a_failure_is_told_before_those_who_waited() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such thing")
        _world().gather_objects(rank)

    with pytest.raises(RankFailure, match="no such thing") as failure:
        simulate(fail, 3)
    assert isinstance(failure.value.__cause__, ValueError)
    assert list(failure.value.failures) == [1, 0, 2]


def test_ranks_that_do_not_come_to_an_agreement_are_named() -> None:
    def come(rank: int) -> tuple[int, ...]:
        if rank == 2:
            return ()
        with pytest.raises(AbsentRanksError, match="rank 2 did not come") as absent:
            _world().compare(b"same", timeout=1)
        return absent.value.ranks

    assert simulate(come, 3).results == [(2,), (2,), ()]


def test_agreements_work_as_on_real_ranks() -> None:
    def differ(rank: int) -> str:
        with shardwise.set_check("debug"), pytest.raises(shardwise.errors.AgreementError) as error:
            shardwise.comm.agree("a call", {"size": rank // 2}, group=communicator())
        return str(error.value)

    first, *others = simulate(differ, 4).results
    assert "ranks 0, 1: 0; ranks 2, 3: 1" in first
    assert others == [first] * 3


def test_groups_of_the_same_ranks_are_one_group() -> None:
    def meet(rank: int) -> list[list[object]]:
        world = _world()
        return [world.gather_objects(rank), world.subgroup([0, 1]).gather_objects(rank + 10)]

    assert simulate(meet, 2).results == [[[0, 1], [10, 11]]] * 2


def test_ranks_that_meet_in_different_calls_are_told() -> None:
    def differ(rank: int) -> None:
        if rank == 0:
            _world().broadcast(torch.zeros(1), 0)
        else:
            _world().all_reduce(torch.zeros(1), "sum")

    with pytest.raises(RankFailure, match="ranks meet in different calls"):
        simulate(differ, 2)


def test_specs_without_ranks_are_for_the_simulated_ones() -> None:
    shards = simulate(lambda rank: shardwise.chunk(0).layout((6, 2)).boxes_of(rank), 3).results
    assert [boxes[0].start for boxes in shards] == [(0, 0), (2, 0), (4, 0)]
    with pytest.raises(RuntimeError, match=r"the spec's ranks are not known.*run_local"):
        shardwise.chunk(0)


def test_settings_of_the_caller_hold_for_the_ranks() -> None:
    with shardwise.set_check("debug"):
        assert simulate(lambda rank: should_check(hot=True), 2).results == [True, True]
    assert simulate(lambda rank: should_check(hot=True), 2).results == [False, False]


def test_a_rank_goes_on_after_it_was_told_of_an_absent_one() -> None:
    def go_on(rank: int) -> float:
        if rank == 0:
            with pytest.raises(AbsentRanksError):
                _world().compare(b"x", timeout=1)
            flight = _world().flight()
            flight.send(1, torch.ones(1))
            return 0.0
        heard = torch.zeros(1)
        flight = _world().flight()
        flight.receive(0, heard)
        flight.land(0)
        return heard.item()

    assert simulate(go_on, 2).results == [0.0, 1.0]


@pytest.mark.parametrize("wrong", ["ncll", "NCCL", "undefined", None])
def test_a_backend_that_torch_does_not_know_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentValueError, match=r"backend of simulate: expected one .*gloo, nccl"):
        simulate(lambda rank: rank, 2, backend=wrong)
    assert simulate(lambda rank: rank, 2, backend="mpi").results == [0, 1]


@pytest.mark.parametrize("wrong", ["gpu", None])
def test_a_device_that_torch_does_not_know_is_refused(wrong: Any) -> None:
    with pytest.raises(DeviceError, match=r"device of simulate: expected a device .*'meta'"):
        simulate(lambda rank: rank, 2, device=wrong)


def test_a_thousand_ranks_are_no_problem() -> None:
    assert simulate(_round_trip, 1000).traffic.total_bytes == 8000


def test_ranks_that_move_different_things_are_told_and_mix_no_data() -> None:
    """As on real ranks, where messages of different exchanges never meet."""

    def move(rank: int) -> None:
        x = shardwise.distribute(torch.arange(48.0).view(8, 6), shardwise.chunk(0))
        turned = shardwise.chunk(1, ranks=[2, 0, 1])
        shardwise.reshard(x, shardwise.chunk(1) if rank else turned)

    words = (
        r"AgreementError: .* rank 0: Layout: .* to Layout: \[0:8, 0:2\] on 2, .* in torch.float32; "
        r"rank \d: Layout: .* to Layout: \[0:8, 0:2\] on 0, "
    )
    with pytest.raises(RankFailure, match=words):
        simulate(move, 3)


def test_a_message_of_another_exchange_is_waited_for_once() -> None:
    """Those who were told of it may move on with others."""
    rows, columns, all_of_it, here, there = (
        shardwise.parse_spec(text, ranks=range(2)).layout((8, 6))
        for text in ("chunk(0)", "chunk(1)", "replicate()", "on_rank(0)", "on_rank(2)")
    )
    plans = [plan_reshard(rows, to, 4) for to in (columns, all_of_it)]
    later = plan_reshard(here, there, 4)

    def move(rank: int) -> int:
        if rank < 2:
            with pytest.raises(AgreementError, match="ranks do not move the same"):
                execute(plans[rank], [torch.ones(4, 6)])
        return len(execute(later, [torch.ones(8, 6)] * (rank == 0), dtype=torch.float32))

    assert simulate(move, 3).results == [0, 0, 1]
