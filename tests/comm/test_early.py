"""[Note: early messages]: data fly beside the digests, and only between ranks that agree."""

from __future__ import annotations

import warnings
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


def _gather_wrongly(rank: int) -> list[str]:
    """What ranks say; after each wrong call a right one goes the long way, then the short one."""
    full, found = _full(), []
    rows = shardwise.distribute(full, shardwise.chunk(0))
    outs = [torch.empty_like(full), torch.empty_like(full[:5])]
    for odd in (2, 0, 1):
        calls: list[tuple[int, torch.Tensor | None]] = [
            (1 if rank == odd else 2, None),  # ranks differ as to who gets it
            (0, outs[0] if rank == 2 else None),  # a rank that gets nothing
            (0, outs[1] if rank == 0 else None),  # of another size
        ]
        for dst, out in calls:
            with pytest.raises(shardwise.ShardwiseError) as caught:
                rows.gather(dst, out)
            found.append(type(caught.value).__name__)
            for _ in range(2):
                whole = outs[0].zero_() if rank == 0 else None
                assert rows.gather(0, whole) is whole
                assert whole is None or torch.equal(whole, full)
    assert rows.gather(1) is None or rank == 1
    return found


def test_wrong_calls_of_gather_raise_on_all_ranks_and_they_go_on() -> None:
    found = shardwise.run_local(_gather_wrongly, 3, timeout=60)
    alike, wrong = "AgreementError", "ArgumentValueError"
    assert found[0] == [alike, alike, wrong] * 3
    assert found[1] == [alike, alike, alike] * 3
    assert found[2] == [alike, wrong, alike] * 3


def _ways_differ(rank: int) -> None:
    """Ranks that go the long way meet those that take the short one."""
    full = _full()
    for _ in range(2):  # the first time no rank has a plan
        with shardwise.trace(show=False) if rank == 1 else nullcontext():  # who looks goes long
            rows = shardwise.distribute(full, shardwise.chunk(0))
            out = torch.zeros_like(full) if rank == 2 else None
            assert rows.gather(2, out) is out
            assert out is None or torch.equal(out, full)
        assert torch.equal(rows.local_tensor(), full.chunk(3)[rank])
    one = shardwise.distribute(full, shardwise.on_rank(1))
    assert one.local_shards() if rank == 1 else not one.local_shards()
    alike = shardwise.distribute(full, shardwise.chunk(0), src_rank=None)
    assert torch.equal(alike.local_tensor(), full.chunk(3)[rank])
    everywhere = shardwise.distribute(full, shardwise.replicate())
    assert torch.equal(everywhere.local_tensor(), full)


def test_ranks_meet_whichever_way_they_go() -> None:
    shardwise.run_local(_ways_differ, 3)


def _ways_and_values_differ(rank: int) -> list[str]:
    """Rank 0 goes the long way, rank 1 the short one, and rank 2 differs: none waits in vain."""
    full, found = _full(), []
    rows = shardwise.distribute(full, shardwise.chunk(0))
    strided = torch.zeros(768, 4096)[:, ::2] if rank == 0 else None
    for _ in range(2):
        rows.gather(0)
    for _ in range(2):
        with pytest.raises(AgreementError) as caught:
            rows.gather(0, strided, dtype=torch.float64 if rank == 2 else None)
        found.append(str(caught.value))
        with (
            pytest.raises(AgreementError),
            shardwise.trace(show=False) if rank == 0 else nullcontext(),
        ):
            shardwise.distribute(full, shardwise.chunk(1 if rank == 2 else 0))
        assert rows.gather(0, strided) is strided
        assert strided is None or torch.equal(strided, full)
    return found


def test_ranks_that_differ_do_not_wait_for_those_that_go_another_way() -> None:
    found = shardwise.run_local(_ways_and_values_differ, 3, timeout=60)
    assert found == [found[0]] * 3
    assert "dtype (ranks 0, 1: None; rank 2: torch.float64" in found[0][0]


def _not_to_be_written(rank: int) -> list[str]:
    full, found = torch.arange(9.0).view(3, 3), []
    rows = shardwise.distribute(full, shardwise.chunk(0))
    with torch.inference_mode():
        refused = torch.zeros(3, 3) if rank == 0 else None
    for _ in range(3):  # the second goes the short way, or would
        with pytest.raises(shardwise.ShardwiseError, match="an inference tensor, outside"):
            rows.gather(0, refused)
        out = torch.zeros(3, 3) if rank == 0 else None
        rows.gather(0, out)
        found.append("" if out is None else str(torch.equal(out, full)))
    return found


def test_an_output_that_may_not_be_written_is_refused_on_all_ranks() -> None:
    found = shardwise.run_local(_not_to_be_written, 3, timeout=60)
    assert found == [["True"] * 3, [""] * 3, [""] * 3]


def _nested(rank: int) -> str:
    full = torch.ones(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about a prototype
        given = torch.nested.nested_tensor([full, full]) if rank == 1 else full
        with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is returned
            shardwise.distribute(given, shardwise.chunk(0))
    assert shardwise.distribute(full, shardwise.chunk(0)).local_tensor().shape == (2, 2)
    return type(caught.value).__name__


def test_a_tensor_that_has_no_shape_raises_on_all_ranks() -> None:
    found = shardwise.run_local(_nested, 2, timeout=30)
    assert found[0] == "AgreementError"
    assert found[1] != "AbsentRanksError"


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
