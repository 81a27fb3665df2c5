"""Communicators over NCCL, as far as one GPU goes. Run where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.process_group import communicator
from shardwise.comm.roll_call import RollCall

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A default process group of this one process."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group(request.param, init_method=store, rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_messages_go_by_gpu_unless_the_cpu_is_chosen(backend: str) -> None:
    assert communicator().backend == "nccl"
    assert communicator().wire_device == torch.device("cuda:0")
    if "gloo" in backend:
        by_cpu = communicator(wire="cpu")
        assert (by_cpu.backend, by_cpu.wire_device.type) == ("gloo", "cpu")


@pytest.mark.usefixtures("backend")
def test_collectives_run_on_the_gpu() -> None:
    group = communicator()
    mine = torch.tensor([3.0, 5.0], device="cuda")
    gathered, part = torch.zeros_like(mine), torch.zeros_like(mine)
    group.all_gather(gathered, mine)
    group.reduce_scatter(part, mine, "avg")
    group.all_reduce(mine, "avg")
    group.broadcast(mine, 0)
    assert gathered.tolist() == part.tolist() == mine.tolist() == [3.0, 5.0]
    assert group.gather_objects("x") == ["x"]


@pytest.mark.usefixtures("backend")
def test_a_batch_of_messages_reaches_its_buffers() -> None:
    flight = communicator().flight()
    inbox = torch.zeros(4, dtype=torch.uint8, device="cuda")
    flight.receive(0, inbox)
    flight.send(0, torch.arange(4, dtype=torch.uint8, device="cuda"))
    flight.launch()
    flight.land(0)
    assert inbox.tolist() == [0, 1, 2, 3]
    flight.finish()


@pytest.mark.usefixtures("backend")
def test_digests_are_compared_on_the_gpu() -> None:
    world = dist.group.WORLD
    assert world is not None
    calls = RollCall(communicator().ranks, 0, device=torch.device("cuda"), name="gpu")
    assert [calls.compare(world, bytes([n] * 16), timeout=60) for n in range(3)] == [
        [bytes([n] * 16)] for n in range(3)
    ]
