"""agree: the same error on every rank, naming who has what, for one small exchange."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise import Box, Layout
from shardwise.comm.agreement import agree
from shardwise.comm.checks import set_check
from shardwise.comm.fingerprint import identity
from shardwise.comm.process_group import communicator
from shardwise.comm.ranks import GroupRanks
from shardwise.errors import AbsentRanksError, AgreementError, SpecError
from shardwise.testing.local_run import run_local


class _Alone:
    """A communicator that must not be used."""

    def __init__(self, num_ranks: int) -> None:
        self.rank = 0
        self.ranks = GroupRanks(tuple(range(num_ranks)))
        self.num_disagreements = 0

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        raise AssertionError("an exchange")

    def tell(self, problem: Exception) -> None:
        """Which is no exchange."""


class _Recording(_Alone):
    """One that answers as if all ranks had come with the same, or with what is given."""

    def __init__(self, *, others: bytes | None = None) -> None:
        super().__init__(2)
        self.digests: list[bytes] = []
        self.others = others

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        self.digests.append(digest)
        return [digest, self.others or digest]


def _group(group: object) -> Any:
    return group


def _digests(*values: object) -> list[bytes]:
    """By which ranks would compare each."""
    group = _Recording()
    for value in values:
        agree("zeros", {"value": value}, group=_group(group))
    return group.digests


# ---- when ----


def test_never_means_no_exchange_and_the_own_problem_is_raised() -> None:
    with set_check("never"):
        agree("zeros", {"size": 3}, group=_group(_Alone(2)))
        with pytest.raises(SpecError, match="bad dim"):
            agree("zeros", {}, group=_group(_Alone(2)), problem=SpecError("bad dim"))


def test_hot_calls_are_compared_in_debug_only() -> None:
    with set_check("always"):
        agree("add", {}, group=_group(_Alone(2)), hot=True)
    with set_check("debug"), pytest.raises(AssertionError, match="an exchange"):
        agree("add", {}, group=_group(_Alone(2)), hot=True)


def test_one_rank_agrees_with_itself() -> None:
    agree("zeros", {"size": 3}, group=_group(_Alone(1)))
    with pytest.raises(SpecError, match="bad dim"):
        agree("zeros", {}, group=_group(_Alone(1)), problem=SpecError("bad dim"))


def test_agreement_is_one_exchange_of_sixteen_bytes() -> None:
    group = _Recording()
    agree("zeros", {"size": (4,) * 1000}, group=_group(group))
    assert [len(digest) for digest in group.digests] == [16]


def test_names_values_and_problems_never_run_together() -> None:
    group = _Recording()
    for what, values in (
        ("f", {"a": "b", "c": "d"}),
        ("f", {"a": "b', 'c': 'd"}),
        ("fa", {"": "b", "c": "d"}),
        ("f", {"a": "d", "c": "b"}),
        ("f", {}),
    ):
        agree(what, values, group=_group(group))
    with pytest.raises(SpecError):
        agree("f", {}, group=_group(group), problem=SpecError("x"))
    assert len(set(group.digests)) == 6
    agree("f", {"c": "d", "a": "b"}, group=_group(group))  # keyword arguments have no order
    assert group.digests[-1] == group.digests[0]


# ---- what ----

HALVES = [Box((0,), (2,)), Box((2,), (4,))]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ((4, 6), torch.Size([4, 6])),
        ([1, (2,)], (np.int64(1), [2])),
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        ({"x", "y", "z"}, frozenset("zyx")),
        (0.5, np.float64(0.5)),
        (object(), object()),
        (Layout((4,), HALVES, [0, 1]), Layout((4,), HALVES[::-1], [1, 0])),
        (torch.zeros(2), torch.ones(2)),
    ],
)
def test_equal_values_have_one_identity(one: object, same: object) -> None:
    assert identity(one) == identity(same)
    assert _digests(one, same, one) == _digests(one) * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((4, 6), (4, 5)),
        ("1", 1),
        (True, 1),
        (None, "None"),
        ((1,), 1),
        (((1, 2), 3), (1, (2, 3))),
        (torch.float32, torch.float64),
        (torch.float32, "torch.float32"),
        (torch.device("cpu"), torch.device("meta")),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (Layout((4,), HALVES, [0, 1]), Layout((4,), HALVES, [1, 0])),
        ([Layout((4,), HALVES, [0, 1])], [Layout((4,), HALVES, [1, 0])]),
        (torch.zeros, torch.ones),
        (Box, Layout),
        (object(), SimpleNamespace()),
    ],
)
def test_different_values_have_different_identities(one: object, other: object) -> None:
    assert identity(one) != identity(other)
    first, second, *again = _digests(one, other, one, other)  # of which some are remembered
    assert first != second
    assert again == [first, second]


# ---- who ----


def test_a_difference_is_told_on_every_rank_in_the_same_words() -> None:
    def differ(rank: int) -> list[str]:
        group = communicator()
        calls: list[tuple[str, dict[str, object]]] = [
            ("zeros('w')", {"dtype": "same", "size": (4, 5 if rank == 1 else 6), "seed": rank}),
            ("load", {"names": "a" * 500 + str(rank // 2)}),
            ("load", {"extra": 1} if rank == 2 else {}),
            ("reshard" if rank == 0 else "gather", {}),
            ("cut", {"layout": Layout((4,), HALVES, [0, 1] if rank else [1, 0])}),
        ]
        texts = []
        for what, values in calls:
            with pytest.raises(AgreementError) as caught:
                agree(what, values, group=group)
            texts.append(str(caught.value))
        agree("zeros('w')", {"size": (4, 6)}, group=group)  # they can go on
        return texts

    first, *others = run_local(differ, 3)
    assert others == [first, first]
    assert first[:4] == [
        "zeros('w'): ranks differ in size (ranks 0, 2: (4, 6); rank 1: (4, 5)), "
        "seed (rank 0: 0; rank 1: 1; rank 2: 2). Pass the same on every rank of the group.",
        f"load: ranks differ in names (ranks 0, 1: ...{'a' * 20}0'; rank 2: ...{'a' * 20}1'). "
        "Pass the same on every rank of the group.",
        "load: ranks differ in extra (ranks 0, 1: (absent); rank 2: 1). "
        "Pass the same on every rank of the group.",
        "ranks made different calls: rank 0: reshard; ranks 1, 2: gather. "
        "Every rank of the group must make the same calls in the same order.",
    ]
    assert first[4].startswith("cut: ranks differ in layout (rank 0: Layout: [0:2] on 1, ")


def test_values_that_look_alike_are_told_apart() -> None:
    class Mute:
        def __init__(self, fingerprint: str) -> None:
            self.fingerprint = fingerprint

        def __repr__(self) -> str:
            return "Mute()"

    def differ(rank: int) -> str:
        with pytest.raises(AgreementError) as caught:
            agree("cut", {"by": Mute(str(rank))}, group=communicator())
        return str(caught.value)

    first, second = run_local(differ, 2)
    assert first == second
    shown = first.split("(", 1)[1]
    assert shown.startswith("rank 0: Mute() [")
    assert "; rank 1: Mute() [" in shown
    assert shown.split("[")[1][:8] != shown.split("[")[2][:8]


def test_layouts_that_look_alike_show_where_they_differ() -> None:
    def differ(rank: int) -> str:
        layout = shardwise.chunk(0, sizes=[3 + rank, 5 - rank], ranks=[0, 1]).layout((8, 6))
        with pytest.raises(AgreementError) as caught:
            agree("cut", {"layout": layout}, group=communicator())
        return str(caught.value)

    first, second = run_local(differ, 2)
    assert first == second
    assert "rank 0: Layout: [0:3, 0:6] on 0, [3:8, 0:6] on 1" in first
    assert "rank 1: Layout: [0:4, 0:6] on 0, [4:8, 0:6] on 1" in first


def test_a_problem_of_some_ranks_stops_all() -> None:
    def fail(rank: int) -> list[str]:
        group = communicator()
        texts = []
        for faulty in ((1, 2), (0, 1, 2)):
            problem = SpecError("dim", rank=rank, got=9) if rank in faulty else None
            with pytest.raises((SpecError, AgreementError)) as caught:
                agree("zeros", {"size": rank}, group=group, problem=problem)
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
        return texts

    told = (
        "AgreementError: zeros failed on other ranks: rank 1: SpecError: [rank 1] dim: got 9; "
        "rank 2: SpecError: [rank 2] dim: got 9. It was stopped on all ranks, and nothing was "
        "changed but what it was to fill."
    )
    own = [f"SpecError: [rank {rank}] dim: got 9" for rank in range(3)]
    assert run_local(fail, 3) == [[told, own[0]], [own[1], own[1]], [own[2], own[2]]]


def test_an_absent_rank_is_told_with_the_call_that_waited() -> None:
    class Waiting(_Alone):
        def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
            raise AbsentRanksError(f"rank 1 did not come within {timeout} s", ranks=[1])

    with set_check("always", timeout=3), pytest.raises(AbsentRanksError, match="3") as caught:
        agree("zeros('w')", {}, group=_group(Waiting(2)))
    assert caught.value.ranks == (1,)
    assert caught.value.__notes__ == ["Compared were the arguments of zeros('w')."]
