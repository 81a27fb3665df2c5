"""[Note: early messages]: data fly beside the digests, and only between ranks that agree."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm import agreement
from shardwise.comm.agreement import Agreement, to_agree_on
from shardwise.comm.process_group import communicator
from shardwise.errors import AgreementError


def _full(num_rows: int = 768) -> torch.Tensor:
    """Of several MiB, so that its messages take a while."""
    return torch.arange(num_rows * 2048, dtype=torch.float32).view(num_rows, 2048)


def _differ_again_and_again(rank: int) -> list[str]:
    """What ranks say; after each disagreement the very same calls are made, and all agree."""
    full, found = _full(), []
    for odd in (2, 1, 0, 2):
        with pytest.raises(AgreementError) as caught:
            shardwise.distribute(_full(765) if rank == odd else full, shardwise.chunk(0))
        found.append(str(caught.value))
        for num_rows in (768, 765):
            rows = shardwise.distribute(_full(num_rows), shardwise.chunk(0))
            assert torch.equal(rows.local_tensor(), _full(num_rows).chunk(3)[rank])
        with pytest.raises(AgreementError, match="sharding_spec"):
            shardwise.distribute(full, shardwise.chunk(1) if rank == odd else shardwise.chunk(0))
        columns = shardwise.distribute(full, shardwise.chunk(1))
        assert torch.equal(columns.local_tensor(), full.chunk(3, 1)[rank])
    assert communicator().num_disagreements == 8
    return found


def test_ranks_that_differ_raise_and_go_on() -> None:
    first, second, third = shardwise.run_local(_differ_again_and_again, 3)
    assert first == second == third
    assert "ranks 0, 1: (768, 2048); rank 2: (765, 2048)" in first[0]
    assert "rank 0: (765, 2048); ranks 1, 2: (768, 2048)" in first[2]


def _one_fails(rank: int) -> str:
    full = _full()
    shardwise.distribute(full, shardwise.chunk(0))
    given: Any = "no tensor" if rank == 1 else full
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.distribute(given, shardwise.chunk(0))
    rows = shardwise.distribute(full, shardwise.chunk(0))
    assert torch.equal(rows.local_tensor(), full.chunk(3)[rank])
    return type(caught.value).__name__


def test_a_rank_that_fails_sends_nothing_and_the_others_raise() -> None:
    names = shardwise.run_local(_one_fails, 3)
    assert names == ["AgreementError", "ArgumentTypeError", "AgreementError"]


def _ways_differ(rank: int) -> None:
    """Ranks that go the long way meet those that take the short one."""
    full = _full()
    for _ in range(2):  # the first time no rank has a plan
        with shardwise.trace(show=False) if rank == 1 else nullcontext():  # who looks goes long
            rows = shardwise.distribute(full, shardwise.chunk(0))
        assert torch.equal(rows.local_tensor(), full.chunk(3)[rank])
    one = shardwise.distribute(full, shardwise.on_rank(1))
    assert one.local_shards() if rank == 1 else not one.local_shards()
    alike = shardwise.distribute(full, shardwise.chunk(0), src_rank=None)
    assert torch.equal(alike.local_tensor(), full.chunk(3)[rank])
    everywhere = shardwise.distribute(full, shardwise.replicate())
    assert torch.equal(everywhere.local_tensor(), full)


def test_ranks_meet_whichever_way_they_go() -> None:
    shardwise.run_local(_ways_differ, 3)


def _many_disagreements(rank: int) -> list[bool]:
    """Whether messages may be early, when ranks have differed so often."""
    members = communicator()
    found = []
    for count in (0, agreement._MOST_DISAGREEMENTS - 1, agreement._MOST_DISAGREEMENTS):
        members.num_disagreements = count
        reached = to_agree_on("count", {"count": count}, group=members)
        assert isinstance(reached, Agreement)
        found.append(reached.flight() is not None)
        reached.reach()
        rows = shardwise.distribute(_full(), shardwise.chunk(0))
        assert torch.equal(rows.local_tensor(), _full().chunk(2)[rank])
    return found


def test_tags_of_left_messages_are_never_used_again() -> None:
    assert shardwise.run_local(_many_disagreements, 2) == [[True, True, False]] * 2
