"""`to`, `cpu` and `cuda` take the seed's `process_group`, which torch's own methods refuse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import run_local
from shardwise.errors import LayoutError
from shardwise.sharded_tensor import ones


def _moves(rank: int) -> None:
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    st = ones(shardwise.chunk(0, ranks=[0, 1]), 5, 3)
    if rank == 2:
        return
    for moved in (st.to(torch.float64, process_group=pair), st.cpu(process_group=pair)):
        assert moved._state.process_group is pair
        assert moved.full_tensor().sum() == 15  # of which rank 2 knows nothing
    assert st.to("cpu", copy=True, process_group=pair).dtype == torch.float32
    assert st.cpu() is st
    assert st.to(st) is st
    assert st.to("cpu", torch.float32, False, False) is st
    assert st.to(torch.float32, False, True) is not st  # a copy, by position
    if rank == 1:
        with pytest.raises(LayoutError, match="Global rank 0 does not exist"):
            st.to("cpu", process_group=other)


def test_a_tensor_moves_into_another_group() -> None:
    run_local(_moves, 3)
