"""A rank that raises before an exchange does not leave the others waiting."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import shardwise
from shardwise import sharded_tensor
from shardwise.comm import watch
from shardwise.errors import AgreementError


def _one_rank_is_wrong(rank: int, call: str) -> str:
    watch._PATIENCE = 0.5
    x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
    x.full_tensor()
    to: Any = "rows" if rank == 1 else shardwise.chunk(1)
    calls: dict[str, Any] = {
        "reshard": lambda: shardwise.reshard(x, to),
        "in place": lambda: x.reshard(to),
    }
    try:
        calls[call]()
        x.full_tensor()  # for ranks that had only to send
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        watch._PATIENCE = 5.0
    return "nothing"


@pytest.mark.parametrize("call", ["reshard", "in place"])
def test_those_who_wait_for_a_rank_that_raised_are_told_why(call: str) -> None:
    results = shardwise.run_local(_one_rank_is_wrong, 3, call)
    wrong = results[1]
    assert not wrong.startswith("AgreementError")
    for rank in (0, 2):
        assert results[rank].startswith(f"AgreementError: [rank {rank}] another rank failed")
        assert f"[rank 1] {wrong}" in results[rank]
        assert "cannot be used any more" in results[rank]


def test_the_same_mistake_on_all_ranks_leaves_the_group_as_it_was() -> None:
    def run(rank: int) -> None:
        watch._PATIENCE = 0.5
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
        to: Any = "rows" if rank == 1 else shardwise.chunk(1)
        for _ in range(2):
            with pytest.raises(TypeError, match="a spec, a Layout"):
                shardwise.reshard(x, "rows")  # type: ignore[call-overload]
        if rank == 1:  # one comes late, and its old notice is no longer true
            time.sleep(2)
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))
        with shardwise.set_check("debug"), pytest.raises((AgreementError, TypeError)):
            shardwise.reshard(x, to)
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))

    shardwise.run_local(run, 2)
