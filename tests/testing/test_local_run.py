"""run_local: results in rank order, and what a rank finds around it."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.testing.on_ranks import pid_of

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.checks import check_timeout
from shardwise.errors import RankFailure
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from pathlib import Path


def _sum_of_ranks(rank: int) -> float:
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    return t.item()


# ---- results ----


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert run_local(lambda rank: rank * 10, world_size) == [10 * r for r in range(world_size)]


def test_sum_reaches_every_rank() -> None:
    assert run_local(_sum_of_ranks, world_size=3) == [3.0, 3.0, 3.0]


def test_lambdas_see_the_values_they_close_over() -> None:
    offset = 7
    assert run_local(lambda rank: rank + offset, 2) == [7, 8]


def test_tensors_come_back_by_value() -> None:
    big = torch.arange(100_000.0)  # larger than a pipe holds
    results = run_local(lambda rank, t: t + rank, 2, big)
    assert all(torch.equal(result, big + rank) for rank, result in enumerate(results))


def test_two_threads_may_call_at_once() -> None:
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(run_local, _sum_of_ranks, size) for size in (2, 3)]
    assert [call.result() for call in calls] == [[1.0, 1.0], [3.0, 3.0, 3.0]]


# ---- what a rank finds around it ----


def test_ranks_see_the_variables_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHARDWISE_PROBE")

    def variables(rank: int) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("RANK", "99")
    monkeypatch.setenv("SHARDWISE_PROBE", "now")
    assert run_local(variables, 2) == [["0", "2", "0", "2", "now"], ["1", "2", "1", "2", "now"]]
    monkeypatch.delenv("SHARDWISE_PROBE")
    assert run_local(variables, 1) == [["0", "1", "0", "1", None]]


def test_ranks_share_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_local(lambda rank: os.getcwd(), 1) == [str(tmp_path)]


def test_ranks_stay_where_they_are_when_the_callers_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RankFailure, match="SystemExit"):
        run_local(lambda rank: sys.exit(), 2)
    pids = run_local(pid_of, 2)  # new processes
    assert run_local(pid_of, 2) == pids
    with pytest.raises(FileNotFoundError):
        os.getcwd()


def test_ranks_have_the_callers_way_to_start_processes() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    expected = before or multiprocessing.get_all_start_methods()[0]
    assert run_local(lambda rank: multiprocessing.get_start_method(), 1) == [expected]
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_what_a_function_sets_in_torch_ends_with_its_call() -> None:
    def state(rank: int) -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
            torch.get_num_threads(),
            list(warnings.filters),
        )

    def change(rank: int) -> tuple[object, ...]:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(2)
        warnings.simplefilter("error")
        return state(rank)

    before = run_local(state, 1)
    changed = run_local(change, 1)
    assert all(new != old for new, old in zip(changed[0], before[0], strict=True))
    assert run_local(state, 1) == before


def test_every_rank_and_call_draws_numbers_of_its_own() -> None:
    def draw(rank: int) -> list[float]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return drawn

    calls = [*run_local(draw, 2), *run_local(draw, 2)]
    assert all(len(set(column)) == 4 for column in zip(*calls, strict=True))


def test_ranks_use_one_thread_and_gloo() -> None:
    found = run_local(lambda rank: (torch.get_num_threads(), dist.get_backend()), 2)
    assert found == [(1, "gloo"), (1, "gloo")]


def test_ranks_talk_over_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (interface,) = run_local(lambda rank: os.environ["GLOO_SOCKET_IFNAME"], 1)
    assert interface in ("lo", "lo0")


def test_each_call_has_a_process_group_of_its_own() -> None:
    def leave(rank: int) -> None:
        dist.destroy_process_group()

    # One rank only: with more, one could leave while another is still connecting to it.
    assert run_local(leave, 1) == [None]
    assert run_local(lambda rank: dist.get_world_size(), 3) == [3, 3, 3]


def test_the_rendezvous_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_local(pid_of, 2)  # multiprocessing keeps a folder of its own from its first start on
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_local(lambda rank, folder: len(os.listdir(folder)), 2, tmp_path) == [1, 1]
    assert list(tmp_path.iterdir()) == []


def _changes_settings(_: int) -> str:
    found = f"{check_timeout():g} {sharded_tensor.rand(shardwise.chunk(0), 2).full_tensor()}"
    shardwise.set_check("always", timeout=7)
    shardwise.implicit_comm("allow")
    shardwise.manual_seed(3)
    return found


def test_a_call_begins_with_shardwises_own_settings_as_new() -> None:
    first, second = run_local(_changes_settings, 1), run_local(_changes_settings, 1)
    assert first != second  # another seed
    assert first[0].split()[0] == second[0].split()[0] == "60"
