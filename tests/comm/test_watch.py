"""A rank that raises before an exchange does not leave the others waiting."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import sharded_tensor
from shardwise._torch_compat import HashStore, group_store
from shardwise.comm import batch, communicator, execute, executor, roll_call, short, watch
from shardwise.comm.agreement import heard_by_all
from shardwise.comm.alike import FEWEST
from shardwise.errors import AbsentRanksError, AgreementError, OpError
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.comm.checks import CheckMode


def _outcome(run: Callable[[], object]) -> str:
    """What it raises, with little patience."""
    watch._PATIENCE = 0.5
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        watch._PATIENCE = 5.0
    return "nothing"


def _check_told(results: list[str]) -> None:
    """Of three ranks, 1 has raised alone, and the others with what it said."""
    wrong = results[1]
    assert not wrong.startswith("AgreementError")
    for rank in (0, 2):
        assert results[rank].startswith(f"AgreementError: [rank {rank}] another rank failed")
        assert f"[rank 1] {wrong}" in results[rank]
        assert "cannot be used any more" in results[rank]


def _one_rank_is_wrong(rank: int, call: str) -> str:
    x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
    x.full_tensor()
    to: Any = "rows" if rank == 1 else shardwise.chunk(1)
    calls: dict[str, Any] = {
        "reshard": lambda: shardwise.reshard(x, to),
        "in place": lambda: x.reshard(to),
    }

    def run() -> None:
        calls[call]()
        x.full_tensor()  # for ranks that had only to send

    return _outcome(run)


@pytest.mark.parametrize(("call", "num_interfaces"), [("reshard", 1), ("in place", 2)])
def test_those_who_wait_for_a_rank_that_raised_are_told_why(
    call: str, num_interfaces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (loopback,) = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join([loopback] * num_interfaces))
    results = shardwise.run_local(_one_rank_is_wrong, 3, call)
    _check_told(results)


def _one_rank_has_bad_data(rank: int, call: str) -> str:
    rows = shardwise.chunk(0)
    good = torch.eye(2).expand(6, 2, 2).clone()
    bad, classes = good.clone(), torch.tensor([0, 1, 0, 7, 1, 0])
    bad[2:4] = -1.0
    calls: dict[str, Callable[[Any], Any]] = {
        "pieces": lambda x: F.cross_entropy(x[:, 0], shardwise.distribute(classes, rows)),
        "one call": torch.linalg.cholesky,
        "a known call": torch.linalg.cholesky,
        "pieces in place": lambda x: x.scatter_(
            1, shardwise.distribute(classes.reshape(6, 1, 1), rows), 0.0
        ),
    }

    def run() -> None:
        if call == "a known call":
            calls[call](shardwise.distribute(good, rows))
        x: Any = shardwise.distribute(bad, rows)
        calls[call](x)
        x.full_tensor()

    return _outcome(run)


@pytest.mark.parametrize("call", ["pieces", "one call", "a known call", "pieces in place"])
def test_those_who_wait_for_a_rank_whose_kernel_raised_are_told_why(call: str) -> None:
    results = shardwise.run_local(_one_rank_has_bad_data, 3, call)
    _check_told(results)


def _one_rank_has_no_memory(rank: int, call: str) -> str:
    def fail(*_: object) -> Any:
        raise MemoryError("none left")

    x: Any = shardwise.distribute(torch.ones(6, 6), shardwise.chunk(0))
    columns = shardwise.chunk(1)
    calls: dict[str, Callable[[], object]] = {
        "short": lambda: shardwise.reshard(x, columns),
        "long": lambda: shardwise.reshard(x, columns, max_bytes=64),
        "started": lambda: shardwise.reshard(x, columns, async_op=True).wait(),
    }
    shardwise.reshard(x, columns)  # from now on it is known, and goes the short way

    def run() -> None:
        calls[call]()
        x.full_tensor()  # for ranks that had only to send

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(short, "packed", fail)
            patch.setattr(executor, "_landing_place", fail)
        return _outcome(run)


@pytest.mark.parametrize("call", ["short", "long", "started"])
def test_those_who_wait_for_a_rank_that_failed_in_an_exchange_are_told_why(call: str) -> None:
    _check_told(shardwise.run_local(_one_rank_has_no_memory, 3, call))


def _one_rank_fails_when_all_has_left(rank: int, call: str) -> str:
    """Then all go on."""

    def fail(*_: object) -> Any:
        raise MemoryError("none left")

    x: Any = shardwise.distribute(torch.arange(36.0).view(6, 6), shardwise.chunk(1))
    rows = shardwise.chunk(0)
    calls: dict[str, Callable[[], object]] = {
        "short": lambda: shardwise.reshard(x, rows),
        "long": lambda: shardwise.reshard(x, rows, max_bytes=1 << 20),
        "started": lambda: shardwise.reshard(x, rows, async_op=True).wait(),
        "sum": lambda: shardwise.reshard(pending, shardwise.on_rank(0)),
    }
    pending: Any = sharded_tensor.ones(shardwise.partial(), 2, 3)
    for run in calls.values():
        run()  # from now on it is known, and goes the short way if it can
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            for module, name in ((short, "_unpack"), (short, "_add_up"), (executor, "_copy")):
                patch.setattr(module, name, fail)
            with pytest.raises(MemoryError, match="none left"):
                calls[call]()
            assert not communicator()._watch.has_notice  # type: ignore[attr-defined]  # the point
        else:
            calls[call]()
    for _ in range(2):
        found = shardwise.reshard(x, rows).full_tensor()
        assert torch.equal(found, torch.arange(36.0).view(6, 6))
    return "goes on"


@pytest.mark.parametrize("call", ["short", "long", "started", "sum"])
def test_a_group_goes_on_if_a_rank_failed_when_all_that_it_sends_had_left(call: str) -> None:
    results = shardwise.run_local(_one_rank_fails_when_all_has_left, 3, call)
    assert results == ["goes on"] * 3


def _one_rank_fails_while_the_last_of_several_exchanges_flies(rank: int) -> str:
    """It makes the results of the one before, while messages of others are yet to come."""
    full = torch.arange(36.0).view(6, 6)
    xs: list[Any] = [shardwise.distribute(full, shardwise.chunk(1)) for _ in range(2 * FEWEST)]
    rows = shardwise.chunk(0)
    store = group_store(dist.group.WORLD)  # type: ignore[arg-type]  # there is one
    launch, num_launched = executor._launch, 0

    def comes_late(*args: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 2:
            store.wait(["failed"])
        return launch(*args)

    def fails(*_: object) -> None:
        threading.Timer(0.2, store.set, ("failed", "")).start()
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_SLICE", 1)
        if rank == 0:
            patch.setattr(batch.Batch, "hand_out", fails)
            with pytest.raises(MemoryError, match="none left"):
                shardwise.reshard_all(xs, rows)
        else:
            patch.setattr(executor, "_launch", comes_late)
            shardwise.reshard_all(xs, rows)
            assert num_launched == 2
    for _ in range(2):
        assert torch.equal(shardwise.reshard(xs[0], rows).full_tensor(), full)
    return "goes on"


def test_a_group_goes_on_if_a_rank_failed_while_its_last_messages_fly() -> None:
    run = _one_rank_fails_while_the_last_of_several_exchanges_flies
    assert shardwise.run_local(run, 3) == ["goes on"] * 3


def _one_rank_is_elsewhere(rank: int, how: str) -> str:
    full = torch.arange(48.0).view(6, 8)
    x: Any = shardwise.distribute(full, shardwise.chunk(0))
    y: Any = shardwise.distribute(-full, shardwise.chunk(0))
    columns, turned = shardwise.chunk(1), shardwise.chunk(1, ranks=[1, 0, 2])
    for spec in (columns, turned):  # from now on both are known
        shardwise.reshard(x, spec)

    def run() -> None:
        if how == "another spec":
            shardwise.reshard(x, turned if rank == 1 else columns)
        elif how == "another dtype":
            z = sharded_tensor.zeros(
                shardwise.chunk(0), 6, 8, dtype=torch.float32 if rank != 1 else torch.int32
            )
            shardwise.reshard(z, columns)
        elif how == "another cap":
            shardwise.reshard(x, columns, max_bytes=64 if rank == 1 else 1 << 20)
        elif how == "another order":
            for one, to in ((x, columns), (y, turned))[:: -1 if rank == 1 else 1]:
                shardwise.reshard(one, to)
        elif rank != 1:
            shardwise.reshard(x, columns)
        for _ in range(3):
            x.full_tensor()

    with shardwise.set_check("never" if how == "another dtype" else "always"):
        return _outcome(run)


@pytest.mark.parametrize(
    "how", ["another spec", "another dtype", "another cap", "another order", "one call less"]
)
def test_ranks_in_different_exchanges_are_told_so_and_mix_no_data(how: str) -> None:
    results = shardwise.run_local(_one_rank_is_elsewhere, 3, how)
    for rank, text in enumerate(results):
        start = rf"AgreementError: \[rank {rank}\] ranks do not move the same: rank \d: Layout"
        assert re.match(start, text)
        assert "cannot be used any more" in text
    if how in ("another dtype", "another cap"):
        is_dtype = how == "another dtype"
        for words in ("float32", "int32") if is_dtype else ("max_bytes=64", "max_bytes=1048576"):
            assert words in results[0]


def _one_rank_has_another_cap(rank: int, max_bytes: int) -> str:
    rows, columns = (shardwise.chunk(dim).layout((8, 6)) for dim in (0, 1))
    shards = [torch.ones(box.shape) for box in rows.boxes_of(rank)]
    cap = max_bytes if rank == 1 else 2 * max_bytes
    return _outcome(lambda: execute(plan_reshard(rows, columns, 4), shards, max_bytes=cap))


def test_ranks_that_wait_in_vain_by_way_of_others_are_told_so_too() -> None:
    """In a round of a capped exchange a rank may wait for one that waits for another."""
    for _ in range(4):  # who waits for whom, and who sees it first, is not always the same
        for rank, text in enumerate(shardwise.run_local(_one_rank_has_another_cap, 4, 8)):
            start = rf"AgreementError: \[rank {rank}\] ranks do not move the same: rank \d: Layout"
            assert re.match(start, text)
            assert "max_bytes=8" in text
            assert "max_bytes=16" in text


def _notes_of_two_groups(rank: int) -> list[str]:
    store, notes = HashStore(), []
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        members: Any = communicator()
        both: list[Any] = [members, communicator(wire="cpu")]
        for one in both:
            notes.append(one._watch._board.read("raised", [rank]).get(rank, ""))
            assert one._roll_call._book(dist.group.WORLD).verdict() is None
        members.tell(ValueError("a mistake"))
        notes.append(members._watch._board.read("raised", [rank]).get(rank, ""))
        members._roll_call._book(dist.group.WORLD).judge(1, timed_out=True)
    return notes


def test_what_is_noted_about_a_group_that_was_destroyed_is_not_about_the_next() -> None:
    """Also where both are on one store, as under torchrun."""
    assert shardwise.run_local(_notes_of_two_groups, 1) == [
        ["", "", "1 failed ValueError: a mistake"] * 2
    ]


def _one_rank_has_no_room_for_what_it_makes(rank: int, call: str) -> str:
    def fail(*_: object) -> Any:
        raise MemoryError("none left")

    full = torch.ones(6, 6)
    x: Any = shardwise.distribute(full, shardwise.chunk(0))
    calls: dict[str, Callable[[], object]] = {
        "reshard": lambda: shardwise.reshard(x, shardwise.chunk(1)),
        "distribute": lambda: shardwise.distribute(full, shardwise.chunk(0)),
    }
    calls[call]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            for name in ("new_like", "new_tensor", "new_tensors"):
                patch.setattr(executor, name, fail)
        return _outcome(calls[call])


@pytest.mark.parametrize("call", ["reshard", "distribute"])
def test_those_who_wait_for_a_rank_without_room_are_told_why(call: str) -> None:
    results = shardwise.run_local(_one_rank_has_no_room_for_what_it_makes, 3, call)
    if call == "reshard":
        _check_told(results)
    else:
        told = f"AgreementError: distribute failed on other ranks: rank 1: {results[1]}"
        assert results[0].startswith(told)
        assert results[0] == results[2]


def _one_rank_is_gone(rank: int) -> str:
    x: Any = shardwise.distribute(torch.ones(6, 6), shardwise.chunk(0))
    if rank == 2:
        communicator()._watch.close()  # type: ignore[attr-defined]  # as if its process had ended
        return "gone"
    return _outcome(lambda: shardwise.reshard(x, shardwise.chunk(1)))


def test_a_rank_that_hears_of_the_end_of_another_is_not_taken_for_its_cause() -> None:
    """Each sees that a connection broke, or hears so of one that it waits for."""
    results = shardwise.run_local(_one_rank_is_gone, 3)
    assert results[2] == "gone"
    lost = f"AgreementError: [rank {{}}] {watch._LOST_TEXT}: [rank {{}}] RuntimeError: "
    for rank, other in ((0, 1), (1, 0)):
        starts = "RuntimeError: ", lost.format(rank, other)
        assert results[rank].startswith(starts)
    assert any(results[rank].startswith("RuntimeError: ") for rank in (0, 1))


def _one_rank_raises_in_backward(rank: int, call: str) -> str:
    def check(grad: Any) -> None:
        if rank == 1:
            raise ValueError("no such gradient")

    def through(x: Any) -> Any:
        """Of which backward exchanges data before the hook and after it."""
        columns = shardwise.reshard(x, shardwise.chunk(1)) * 2
        columns.register_hook(check)
        return shardwise.reshard(columns, shardwise.chunk(0)).sum()

    x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4, requires_grad=True)
    calls: dict[str, Callable[[Any], Any]] = {
        "backward": lambda y: y.backward(),
        "backward of several": lambda y: torch.autograd.backward([y, (x * 1).sum()]),
        "grad": lambda y: torch.autograd.grad(y, [x]),
    }

    def run() -> None:
        calls[call](through(x))
        x.full_tensor()  # for ranks that had only to send

    return _outcome(run)


@pytest.mark.parametrize("call", ["backward", "backward of several", "grad"])
def test_those_who_wait_for_a_rank_whose_backward_raised_are_told_why(call: str) -> None:
    results = shardwise.run_local(_one_rank_raises_in_backward, 3, call)
    assert results[1] == "ValueError: no such gradient"
    _check_told(results)


def _one_rank_is_wrong_in(rank: int, call: str, mode: CheckMode) -> str:
    """Rank 1 makes the call with another argument than the others."""
    is_wrong = rank == 1
    x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
    columns: Any = sharded_tensor.ones(shardwise.chunk(1), 6, 4)
    wrong: Any = "wrong"

    def hooked() -> None:
        def raises(_: Any) -> None:
            if is_wrong:
                raise ValueError("no such gradient")

        leaf: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4, requires_grad=True)
        moved: Any = shardwise.reshard(leaf, shardwise.chunk(1))
        moved.register_hook(raises)
        moved.full_tensor().sum().backward()  # of a plain tensor

    calls: dict[str, Callable[[], object]] = {
        "full_tensor": lambda: x.full_tensor(grad=wrong if is_wrong else "same"),
        "reshard": lambda: shardwise.reshard(torch.ones(6, 4) if is_wrong else x, columns),
        "reshard of a group": lambda: shardwise.reshard(
            x, columns, process_group=wrong if is_wrong else None
        ),
        "allclose": lambda: torch.allclose(x, torch.ones(3) if is_wrong else columns),
        "copy_": lambda: x.copy_(wrong if is_wrong else columns),
        "sum": lambda: x.sum(dim=7 if is_wrong else 0),
        "matmul": lambda: x @ (torch.ones(7, 7) if is_wrong else torch.ones(4, 4)),
        "backward": hooked,
    }

    def run() -> None:
        calls[call]()
        x.full_tensor()  # for ranks that had only to send

    with shardwise.set_check(mode, timeout=20):
        outcome = _outcome(run)
        if mode == "debug":  # where the group survives
            assert x.full_tensor().shape == (6, 4)
    return outcome


@pytest.mark.parametrize(
    "call",
    [
        "full_tensor",
        "reshard",
        "copy_",
        "sum",
        "backward",
        pytest.param("reshard of a group", marks=pytest.mark.long),
        pytest.param("matmul", marks=pytest.mark.long),
    ],
)
def test_those_who_wait_for_a_rank_with_a_wrong_argument_are_told_why(call: str) -> None:
    _check_told(shardwise.run_local(_one_rank_is_wrong_in, 3, call, "always"))


@pytest.mark.parametrize(
    "call",
    ["full_tensor", "reshard", "allclose", "copy_", "sum", "backward"],
)
def test_under_debug_a_wrong_argument_of_one_rank_raises_on_all(call: str) -> None:
    results = shardwise.run_local(_one_rank_is_wrong_in, 3, call, "debug")
    assert not results[1].startswith("AgreementError")
    for rank in (0, 2):
        assert results[rank].startswith("AgreementError")
        assert f"failed on other ranks: rank 1: {results[1]}"[:120] in results[rank]


def test_ranks_that_others_miss_in_a_comparison_are_named() -> None:
    def run(rank: int, call: str, has_links: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not has_links:
                patch.setattr(roll_call, "MOST_RANKS", 0)
            communicator()
        x = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        other: Any = 3 if rank == 1 else x * 1
        generator = None if rank == 1 else torch.Generator()
        calls: dict[str, Callable[[], object]] = {
            "equal": lambda: torch.equal(x, other),
            "generator": lambda: torch.nn.init.normal_(x, generator=generator),
        }
        shardwise.sharded_tensor.rand(shardwise.chunk(0), 3)  # the first random call is an exchange
        with shardwise.set_check("always", timeout=1):
            if rank != 1:
                with pytest.raises(AbsentRanksError, match="rank 1 did not come"):
                    calls[call]()
            else:  # which torch refuses before it asks us; and one that is no mistake
                with suppress(TypeError):
                    calls[call]()
                with pytest.raises(AgreementError, match="rank 1 did not come within 1 s"):
                    x.full_tensor()

    for call, has_links in (("equal", True), ("generator", True), ("equal", False)):
        shardwise.run_local(run, 3, call, has_links)


def test_one_rank_may_ask_what_others_do_not() -> None:
    """It is refused, and tells nobody of that: the group is as it was."""

    def run(rank: int) -> None:
        watch._PATIENCE = 0.2
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        told = x._state.comm._watch
        if rank == 1:
            for ask in (x.numpy, x.tolist, x.data_ptr, lambda: bool(x), lambda: copy(x * 1).nope):
                with pytest.raises((OpError, AttributeError)):
                    ask()
            assert not hasattr(x, "__cuda_array_interface__")
            assert (x == "wrong") is False
            assert len(x) == 6
            assert not told.has_notice
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))
        watch._PATIENCE = 5.0

    shardwise.run_local(run, 2)


def test_an_exception_is_told_once() -> None:
    def run(rank: int) -> None:
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        told = x._state.comm._watch
        if rank == 1:
            with pytest.raises(IndexError), heard_by_all("outer", x._state.comm):
                torch.nn.functional.normalize(x, dim=7)  # several functions, one in another
            assert (told._num_raised, told.has_notice) == (1, True)
            with pytest.raises(AgreementError), heard_by_all("outer", x._state.comm):
                raise AgreementError("another rank failed")
            assert told._num_raised == 1
        assert torch.equal(x, x * 1)  # where all have come, it is over
        assert not told.has_notice

    shardwise.run_local(run, 2)


def test_the_same_wrong_calls_on_all_ranks_leave_the_group_as_it_was() -> None:
    def run(rank: int) -> None:
        watch._PATIENCE = 0.2
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        calls: list[Callable[[], object]] = [
            lambda: x.full_tensor(grad="wrong"),
            lambda: shardwise.reshard(torch.ones(6, 4), shardwise.chunk(1)),
            lambda: torch.allclose(x, torch.ones(3)),
            lambda: x.copy_("wrong"),
            lambda: x.sum(dim=7),
            lambda: x @ torch.ones(7, 7),
            lambda: torch.nn.init.normal_(x, generator="wrong"),  # type: ignore[arg-type]  # wrong on purpose
        ]
        modes: tuple[CheckMode, ...] = ("always", "debug")
        for mode in modes:
            with shardwise.set_check(mode, timeout=20):
                for call in calls:
                    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)) as found:
                        call()
                    assert not isinstance(found.value, AgreementError)
                    assert torch.equal(x.full_tensor(), torch.ones(6, 4))
        watch._PATIENCE = 5.0

    shardwise.run_local(run, 2)


def test_the_same_mistake_on_all_ranks_leaves_the_group_as_it_was() -> None:
    def run(rank: int) -> None:
        watch._PATIENCE = 0.5
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        to: Any = "rows" if rank == 1 else shardwise.chunk(1)
        for _ in range(2):
            with pytest.raises(TypeError, match="a spec, a Layout"):
                shardwise.reshard(x, "rows")  # type: ignore[call-overload]  # wrong on purpose
        if rank == 1:  # one comes late, and its old notice is no longer true
            time.sleep(2)
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))
        with shardwise.set_check("debug"), pytest.raises((AgreementError, TypeError)):
            shardwise.reshard(x, to)
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))
        watch._PATIENCE = 5.0

    shardwise.run_local(run, 2)
