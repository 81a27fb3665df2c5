"""Communicators over gloo: messages, collectives, and ranks that do not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardwise._torch_compat import start_all_gather
from shardwise.comm import host_links, roll_call
from shardwise.comm.agreement import agreed_bytes
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.flights import BatchedFlight
from shardwise.comm.process_group import ProcessGroupCommunicator, communicator
from shardwise.comm.roll_call import RollCall
from shardwise.errors import (
    AbsentRanksError,
    AgreementError,
    ArgumentTypeError,
    ArgumentValueError,
    NotInitializedError,
    OpError,
    ShardwiseError,
)
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.comm.communicator import Communicator, Flight

# Tells "named the absent rank after its timeout of 1 s" from "hung until something else ended it".
HANG_GUARD = 15.0


def _bytes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- which communicator ----


def test_without_a_process_group_the_error_says_how_to_start_one() -> None:
    with pytest.raises(NotInitializedError, match=r"torchrun .*shardwise\.run_local"):
        communicator()


def test_the_simulated_rank_of_this_thread_comes_first() -> None:
    class Simulated:
        def flight(self) -> None: ...

    simulated: Any = Simulated()
    token = simulated_rank.set(simulated)
    try:
        assert communicator() is simulated
    finally:
        simulated_rank.reset(token)
    assert communicator(simulated) is simulated


def test_a_group_has_one_communicator_which_ends_with_it() -> None:
    def ask(rank: int) -> list[str]:
        first = communicator()
        assert first is communicator(dist.group.WORLD) is communicator(first)
        assert (first.rank, first.ranks.ranks, first.backend) == (0, (0,), "gloo")
        assert first.wire_device == torch.device("cpu") == communicator(wire="cpu").wire_device
        errors = [
            _error_of(lambda: communicator(wire="cuda")),
            _error_of(lambda: communicator("gloo")),  # type: ignore[arg-type]  # the point
        ]
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not marked
        dist.destroy_process_group()
        errors.append(_error_of(first.flight))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert communicator() is not first
        return errors

    (errors,) = run_local(ask, 1)
    assert errors[0].startswith(f"{ArgumentValueError.__name__}: wire: expected a device that the")
    assert errors[1].startswith(f"{ArgumentTypeError.__name__}: process_group: expected a torch.d")
    assert errors[2].startswith(f"{NotInitializedError.__name__}: [rank 0] the process group of t")


def test_a_group_of_one_rank_talks_to_itself() -> None:
    def alone(rank: int) -> list[object]:
        group = communicator()
        one = torch.tensor([3.0])
        gathered = torch.zeros(1)
        group.all_gather(gathered, one)
        flight = group.flight()
        flight.launch()
        flight.finish()
        return [gathered.item(), group.compare(b"ab", timeout=1), group.gather_objects("x")]

    assert run_local(alone, 1) == [[3.0, [b"ab"], ["x"]]]


# ---- messages and collectives ----


def _send_in_a_circle(flight: Flight, ranks: list[int], rank: int) -> list[int]:
    """What arrives of two messages to the next rank, one to the one before; 3 or 4 bytes each."""
    at = ranks.index(rank)
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    inbox = [torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)]
    flight.receive(before, inbox[0])
    if before != after:
        flight.receive(after, inbox[1])
    flight.send(after, _bytes(rank, 1, 2))
    if before != after:
        flight.send(before, _bytes(rank, 5, 6, 7))
    flight.launch()
    if before != after:
        flight.land(1)
        flight.land(1)
        assert inbox[1].tolist() == [after, 5, 6, 7]
    flight.finish()
    flight.finish()
    return inbox[0].tolist()


def test_messages_reach_their_peers_in_cycles_pairs_and_subgroups() -> None:
    def exchange(rank: int) -> list[object]:
        cycle, pair = dist.new_group([0, 2, 3]), dist.new_group([1, 3])
        found: list[object] = []
        for group, ranks in ((cycle, [0, 2, 3]), (pair, [1, 3]), (dist.group.WORLD, [0, 1, 2, 3])):
            if rank in ranks:
                for _ in range(2):
                    found.append(_send_in_a_circle(communicator(group).flight(), ranks, rank))
        world = dist.group.WORLD
        assert world is not None
        batched = BatchedFlight(world, lambda: None)
        return [*found, _send_in_a_circle(batched, [3, 1, 2, 0], rank)]

    results = run_local(exchange, 4)
    assert results[0] == [[3, 1, 2], [3, 1, 2], [3, 1, 2], [3, 1, 2], [2, 1, 2]]
    assert results[1] == [[3, 1, 2], [3, 1, 2], [0, 1, 2], [0, 1, 2], [3, 1, 2]]
    assert results[2] == [[0, 1, 2], [0, 1, 2], [1, 1, 2], [1, 1, 2], [1, 1, 2]]
    assert results[3][:4] == [[2, 1, 2], [2, 1, 2], [1, 1, 2], [1, 1, 2]]


def test_a_peer_outside_the_group_is_refused_before_anything_is_sent() -> None:
    def wrong(rank: int) -> str:
        group = dist.new_group([1])
        if rank == 0:
            return ""
        return _error_of(lambda: communicator(group).flight().send(0, _bytes(1)))

    assert "expected one of the group's rank 1, got 0" in run_local(wrong, 2)[1]


def test_collectives_follow_the_order_of_the_group() -> None:
    def collect(rank: int) -> list[object]:
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return [_error_of(lambda: communicator(group))]
        both = communicator(group)
        gathered = torch.zeros(4)
        both.all_gather(gathered, torch.tensor([rank, rank + 0.5]))
        mine = torch.zeros(2)
        both.reduce_scatter(mine, torch.arange(4.0) + rank, "sum")
        reduced: dict[str, float] = {}
        for op in ("sum", "max", "min", "product"):
            value = torch.tensor([float(rank)])
            both.all_reduce(value, op)
            reduced[op] = value.item()
        sent = torch.tensor([rank])
        both.broadcast(sent, 3)
        average = _error_of(lambda: both.all_reduce(torch.zeros(1), "avg"))
        return [
            gathered.tolist(),
            mine.tolist(),
            reduced,
            sent.item(),
            average,
            both.compare(bytes([rank] * 16), timeout=10),
            both.gather_objects({"rank": rank}),
        ]

    zero, one, two, three = run_local(collect, 4)
    for rank, (error,) in ((0, zero), (2, two)):
        assert str(error).startswith(
            f"{ArgumentValueError.__name__}: [rank {rank}] process_group: expected a group that"
        )
    average = f"{OpError.__name__}: [rank {{}}] reduction 'avg' over gloo: expected one of sum, max"
    for rank, found in ((1, one), (3, three)):
        assert found[0] == [1.0, 1.5, 3.0, 3.5]
        assert found[1] == ([4.0, 6.0] if rank == 1 else [8.0, 10.0])
        assert found[2] == {"sum": 4.0, "max": 3.0, "min": 1.0, "product": 3.0}
        assert found[3] == 3
        assert str(found[4]).startswith(average.format(rank))
        assert found[5] == [bytes([1] * 16), bytes([3] * 16)]
        assert found[6] == [{"rank": 1}, {"rank": 3}]


# ---- ranks that do not come ----


def _links_of(members: Communicator) -> Any:
    known: Any = members
    return known._roll_call._links


def _compare(group: Communicator, rank: int, *, timeout: float = 1) -> AbsentRanksError:
    """The error of a comparison that must neither succeed nor hang."""
    began = time.monotonic()
    with pytest.raises(AbsentRanksError) as caught:
        group.compare(bytes([rank]), timeout=timeout)
    assert time.monotonic() - began < HANG_GUARD
    return caught.value


_WAYS = pytest.mark.parametrize("has_links", [False, True])
_UNTIL_LINKS = 3  # comparisons, after which they go over links


@_WAYS
def test_a_rank_that_never_comes_is_named_on_all_that_wait(has_links: bool) -> None:
    def wait(rank: int) -> tuple[str, tuple[int, ...]] | None:
        group = communicator()
        for _ in range(_UNTIL_LINKS if has_links else 1):
            assert group.compare(b"\x01", timeout=10) == [b"\x01"] * 3
        assert _links_of(group).are_up == has_links
        if rank == 1:
            return None
        error = _compare(group, rank)
        assert str(_compare(group, rank)) == str(error)  # later calls do not wait again
        return str(error), error.ranks

    first, absent, last = run_local(wait, 3)
    assert absent is None
    for rank, found in ((0, first), (2, last)):
        assert found is not None
        text, ranks = found
        assert ranks == (1,)
        start = f"[rank {rank}] rank 1 did not come within 1 s to compare arguments. See what ran"
        assert text.startswith(start)


@_WAYS
def test_a_rank_that_comes_late_raises_too(has_links: bool) -> None:
    def be_late(rank: int) -> tuple[str, tuple[int, ...]]:
        # The bell rings when others have given up; it is a group whose connections stay open.
        bell = dist.new_group()
        for _ in range(_UNTIL_LINKS if has_links else 0):
            communicator().compare(b"\x01", timeout=10)
        assert _links_of(communicator()).are_up == has_links
        if rank in (1, 3):
            dist.recv(torch.zeros(1), 0, group=bell)
        error = _compare(communicator(), rank)
        if rank == 2:
            dist.send(torch.zeros(1), 0, group=bell)
        if rank == 0:
            dist.recv(torch.zeros(1), 2, group=bell)
            for late in (1, 3):
                dist.send(torch.zeros(1), late, group=bell)
        return str(error), error.ranks

    results = run_local(be_late, 4)
    assert [ranks for _, ranks in results] == [(1, 3)] * 4
    for rank, (text, _) in enumerate(results):
        late = "this rank came too late, after the others had waited 1 s"
        told = late if rank in (1, 3) else "ranks 1, 3 did not come within 1 s"
        assert text.startswith(f"[rank {rank}] {told}")


def test_a_rank_that_ended_is_named_and_not_one_that_comes_after_others_have_seen_it() -> None:
    def compare(rank: int) -> tuple[str, tuple[int, ...]] | None:
        bell = dist.new_group([0, 2])
        for _ in range(_UNTIL_LINKS):
            communicator().compare(b"\x01", timeout=10)
        if rank == 1:
            _links_of(communicator()).close()  # as if its process had ended
            return None
        if rank == 2:
            dist.recv(torch.zeros(1), 0, group=bell)
        error = _compare(communicator(), rank, timeout=30)
        if rank == 0:
            dist.send(torch.zeros(1), 2, group=bell)
        return str(error), error.ranks

    first, _, last = run_local(compare, 3)
    for rank, found in ((0, first), (2, last)):
        assert found is not None
        text, ranks = found
        told = f"[rank {rank}] a connection broke while ranks compared arguments, rank 1 missing. "
        assert text.startswith(told)
        assert ranks == (1,)


def test_a_backend_that_leaves_connections_open_is_polled() -> None:
    """The way of NCCL, tried with gloo."""

    def poll(rank: int) -> list[object]:
        world, bell = dist.group.WORLD, dist.new_group([0, 1])
        assert world is not None
        known = communicator(world)
        calls = RollCall(known.ranks, rank, device=torch.device("cpu"), name="polled")
        calls._links = None  # as on several hosts
        found: list[object] = [calls.compare(world, bytes([rank] * 3), timeout=10)]
        if rank == 1:
            dist.recv(torch.zeros(1), 0, group=bell)
        with pytest.raises(AbsentRanksError) as caught:
            calls.compare(world, b"abc", timeout=1)
        if rank == 0:
            dist.send(torch.zeros(1), 1, group=bell)
        else:  # the other half of what rank 0 still has under way, so that both can leave
            packet = torch.zeros(roll_call._PACKET_BYTES, dtype=torch.uint8)
            start_all_gather(world, packet.repeat(2), packet).wait()
        return [*found, str(caught.value).split(".")[0], caught.value.ranks]

    digests = [b"\x00\x00\x00", b"\x01\x01\x01"]
    assert run_local(poll, 2) == [
        [digests, "[rank 0] rank 1 did not come within 1 s to compare arguments", (1,)],
        [digests, "[rank 1] this rank came too late, after the others had waited 1 s", (1,)],
    ]


def test_a_communicator_made_by_hand_is_like_any_other() -> None:
    def made(rank: int) -> tuple[int, ...]:
        return ProcessGroupCommunicator().ranks.ranks

    assert run_local(made, 2) == [(0, 1), (0, 1)]


def _compare_by_collective(rank: int) -> str:
    """As groups of many ranks do."""
    members = ProcessGroupCommunicator()
    members._roll_call._links = None
    for _ in range(4):
        found = members.compare(bytes([rank]) * 16, timeout=20)
        assert found == [bytes([k]) * 16 for k in range(3)]
    if rank == 1:
        return "elsewhere"
    with pytest.raises(AbsentRanksError, match="rank 1 did not come") as caught:
        members.compare(b"0" * 16, timeout=0.5)
    return str(caught.value.ranks)


def test_large_groups_compare_by_a_collective_and_name_the_absent() -> None:
    assert run_local(_compare_by_collective, 3) == ["(1,)", "elsewhere", "(1,)"]


def test_ranks_of_one_host_compare_over_links_from_the_fourth_time_on() -> None:
    def compare(rank: int) -> list[bool]:
        group = dist.new_group([2, 0, 3])
        if rank == 1:
            return []
        members = ProcessGroupCommunicator(group)
        are_up = []
        for length in (16, 48, 1, 16, 17, 30):  # a digest of any length
            found = members.compare(bytes([rank]) * length, timeout=20)
            assert found == [bytes([k]) * length for k in members.ranks]
            are_up.append(_links_of(members).are_up)
        return are_up

    up = [False, False, True, True, True, True]
    assert run_local(compare, 4) == [up, [], up, up]


def test_ranks_that_cannot_reach_each_other_compare_by_the_backend() -> None:
    def compare(rank: int) -> list[bool]:
        # On another host the name is not known.
        address = host_links._address
        elsewhere = rank == 1
        host_links._address = (lambda secret: address(secret) + b"/1") if elsewhere else address
        try:
            members = ProcessGroupCommunicator()
            for k in range(4):
                assert members.compare(bytes([k, rank]), timeout=20) == [
                    bytes([k, at]) for at in range(3)
                ]
        finally:
            host_links._address = address
        return [_links_of(members).are_up]

    assert run_local(compare, 3) == [[False]] * 3


def test_a_rank_that_has_left_an_exchange_comes_to_the_next() -> None:
    """As after an interrupt: the others have heard this rank, and it has not heard them."""

    def leave(rank: int) -> list[bytes]:
        members = ProcessGroupCommunicator()
        for _ in range(_UNTIL_LINKS):
            members.compare(b"first", timeout=20)
        assert _links_of(members).are_up
        if rank == 0:
            members._roll_call.tell(members.process_group, b"left")
        else:
            assert members.compare(b"left", timeout=20) == [b"left"] * 3
        return members.compare(b"next", timeout=20)

    assert run_local(leave, 3) == [[b"next"] * 3] * 3


@pytest.mark.parametrize("at", range(_UNTIL_LINKS + 1))
def test_a_comparison_that_is_interrupted_on_one_rank_keeps_ranks_in_step(at: int) -> None:
    def run(rank: int, at: int) -> list[bool]:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        members, are_up = ProcessGroupCommunicator(), []
        for number in range(_UNTIL_LINKS + 3):
            if rank == 1 and number == at:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(RollCall, "_wait", interrupted)
                    patch.setattr(host_links.HostLinks, "hear", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        members.compare(bytes([number, rank]), timeout=20)
            else:
                expected = [bytes([number, k]) for k in range(3)]
                assert members.compare(bytes([number, rank]), timeout=20) == expected
            are_up.append(_links_of(members).are_up)
        return are_up

    first, second, third = run_local(run, 3, at)
    assert first == third
    assert all(up[-1] for up in (first, second, third))


def test_calls_of_different_lengths_are_told_apart() -> None:
    def differ(rank: int) -> list[str]:
        group, texts = communicator(), []
        for _ in range(_UNTIL_LINKS + 2):  # by the backend, and then over links
            with pytest.raises(AgreementError) as caught:
                agreed_bytes(f"save {rank // 2}", {}, bytes(16 * rank), group=group)
            texts.append(str(caught.value))
        return texts

    found = run_local(differ, 3)
    assert found == [found[0]] * 3
    for text in found[0]:
        assert text.startswith("ranks made different calls: ranks 0, 1: save 0; rank 2: save 1.")


def test_who_waits_for_data_of_a_rank_that_gives_up_is_told_at_once() -> None:
    def wait(rank: int) -> str:
        group = communicator()
        for _ in range(_UNTIL_LINKS):
            group.compare(b"0", timeout=20)
        if rank == 0:
            return str(_compare(group, rank).ranks)
        flight = group.flight()
        flight.receive(0, torch.zeros(1))
        flight.launch()
        with pytest.raises(AgreementError, match=r"\[rank 0\] rank 1 did not come within"):
            flight.finish()
        return "told"

    assert run_local(wait, 2, timeout=60) == ["(1,)", "told"]


def test_a_default_device_is_not_where_digests_lie() -> None:
    def compare(_: int) -> int:
        with torch.device("meta"):
            return len(communicator().compare(b"0" * 16, timeout=20))

    assert run_local(compare, 2) == [2, 2]
