"""GroupRanks: global ranks to group ranks and back, for any group."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch.distributed as dist

from shardwise.comm.ranks import GroupRanks
from shardwise.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LayoutError,
    NotInitializedError,
    ShardwiseError,
)
from shardwise.testing.local_run import run_local


@pytest.mark.parametrize("ranks", [(0,), (1, 3), (2, 0, 1), (7,)])
def test_ranks_translate_there_and_back(ranks: tuple[int, ...]) -> None:
    group = GroupRanks(ranks)
    assert (group.ranks, tuple(group), len(group)) == (ranks, ranks, len(ranks))
    assert [group.group_rank(rank) for rank in ranks] == list(range(len(ranks)))
    assert [group.rank_at(at) for at in range(len(ranks))] == list(ranks)
    assert ranks[0] in group
    assert 99 not in group


def test_equal_groups_are_equal_and_hash_alike() -> None:
    group = GroupRanks(np.array([1, 3]))  # type: ignore[arg-type]  # arrays are accepted
    assert group == GroupRanks((1, 3)) == pickle.loads(pickle.dumps(group))
    assert hash(group) == hash(GroupRanks((1, 3)))
    assert group != GroupRanks((3, 1))
    assert repr(group) == "GroupRanks(ranks=(1, 3))"


def test_a_rank_outside_is_named_with_the_ranks_inside() -> None:
    group = GroupRanks((1, 3))
    with pytest.raises(
        ArgumentValueError, match=r"rank 2 .*expected one of the group's ranks 1, 3"
    ):
        group.group_rank(2)
    with pytest.raises(ArgumentValueError, match="group rank: expected 0 to 1, got -1"):
        group.rank_at(-1)


@pytest.mark.parametrize("ranks", [(), (1, 1), (-1,)])
def test_what_is_no_group_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentValueError, match="ranks of a group"):
        GroupRanks(ranks)


def test_members_pass_and_others_are_listed() -> None:
    group = GroupRanks((1, 3))
    group.check_members(np.array([3, 1, 3]), what="layout")
    group.check_members([], what="layout")
    with pytest.raises(LayoutError) as caught:
        group.check_members(iter([0, 1, 2, 0]), what="layout of 'w'")
    assert str(caught.value).startswith(
        "layout of 'w': Global rank 0 does not exist in input process group: expected only "
        "ranks of its group (ranks 1, 3), got ranks 0, 2. Name"
    )
    with pytest.raises(LayoutError, match=r"^\[rank 3\] to: Global rank 0 .*got rank 0. Do not.$"):
        group.check_members([0], what="to", rank=3, fix="Do not.")


def test_without_a_process_group_the_error_says_how_to_start_one() -> None:
    with pytest.raises(NotInitializedError, match=r"torchrun .*shardwise\.run_local"):
        GroupRanks.of(None)


def test_process_groups_are_read_and_strangers_refused() -> None:
    def read(rank: int) -> tuple[object, ...]:
        group = dist.new_group([1, 3])
        wrong: list[str] = []
        for given in (group, "world"):
            try:
                of_group = GroupRanks.of(given)  # type: ignore[arg-type]  # one of them is wrong
            except ShardwiseError as error:
                wrong.append(f"{type(error).__name__} {error}")
            else:
                assert of_group.group_rank(rank) == dist.get_rank(group)
                assert of_group.ranks == (1, 3)
        return GroupRanks.of(None).ranks, wrong

    results = run_local(read, 4)
    assert [ranks for ranks, _ in results] == [(0, 1, 2, 3)] * 4
    not_one = f"{ArgumentTypeError.__name__} process_group: expected a torch.distributed.Process"
    for rank, (_, wrong) in enumerate(results):
        assert isinstance(wrong, list)
        assert wrong[-1].startswith(not_one)
        assert "the argument of shardwise.comm.execute and execute_all is group=" in (wrong[-1])
        assert len(wrong) == (1 if rank in (1, 3) else 2)
        if len(wrong) == 2:
            assert f"[rank {rank}] process_group: expected a group that this rank is" in wrong[0]
