"""How much memory an exchange needs: its tensors, counted exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import shardwise
from shardwise.comm import execute, short
from shardwise.comm.pages import new_like
from shardwise.comm.simulate import simulate
from shardwise.testing.memory import peak_tensor_bytes
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import TransferPlan, plan_reshard

if TYPE_CHECKING:
    import pytest

MIB = 1 << 20
SHAPE = (2048, 4096)  # 32 MiB of float32: 8 on each of four ranks

PAIRS = [
    ("chunk(0)", "chunk(1)"),
    ("chunk(1)", "chunk(0)"),
    ("chunk(0)", "chunk(0, ranks=[1, 2, 3, 0])"),
    ("chunk(0)", "replicate()"),
    ("chunk(1)", "grid([2, 2])"),
    ("chunk(0)", "on_rank(0)"),
    ("partial()", "chunk(0)"),
    ("partial()", "replicate()"),
    ("partial()", "on_rank(3)"),
]


def _plans() -> list[TransferPlan]:
    found = []
    for pair in PAIRS:
        source, target = (shardwise.parse_spec(s, ranks=range(4), device="cpu") for s in pair)
        found.append(plan_reshard(source.layout(SHAPE), target.layout(SHAPE), 4))
    return found


def _peaks(rank: int, cap: int | None) -> list[int]:
    """Bytes that were counted, plan by plan."""
    found = []
    for plan in _plans():
        shards = [torch.full(box.shape, float(rank)) for box in plan.source.boxes_of(rank)]

        def run(plan: TransferPlan = plan, shards: list[torch.Tensor] = shards) -> object:
            return execute(plan, shards, dtype=torch.float32, max_bytes=cap)

        found.append(peak_tensor_bytes(run))
    return found


def test_the_peak_is_what_the_plan_says() -> None:
    counted = shardwise.run_local(_peaks, 4, None)
    for k, plan in enumerate(_plans()):
        assert [counted[rank][k] for rank in range(4)] == [plan.peak_bytes(r) for r in range(4)]
        output = max(plan.output_bytes.values())
        assert max(counted[rank][k] for rank in range(4)) <= output + max(output, 16 * MIB)


def test_a_cap_bounds_the_peak_of_a_tensor_that_is_larger() -> None:
    counted = shardwise.run_local(_peaks, 4, MIB)
    for k, plan in enumerate(_plans()):
        for rank in range(4):
            output = plan.output_bytes.get(rank, 0)
            assert counted[rank][k] <= plan.peak_bytes(rank, MIB) <= output + MIB


def test_the_counter_counts_views_once_and_forgets_what_is_gone() -> None:
    given = torch.zeros(100)

    def run() -> torch.Tensor:
        first = torch.empty(10, dtype=torch.uint8)
        del first
        second = given[::2].contiguous()  # 200 bytes
        return second.view(torch.uint8)[10:].clone()  # 190 more

    assert peak_tensor_bytes(run) == 390


def test_rounds_of_a_sum_use_the_memory_of_the_round_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is given back and taken again may come on top, whatever the allocator is."""
    shape = (4095, 2048)  # too large for one round, and the last pieces are smaller
    source, target = (
        shardwise.parse_spec(text, ranks=range(4), device="cpu").layout(shape)
        for text in ("partial()", "chunk(0)")
    )
    plan = plan_reshard(source, target, 4)
    programs = [plan.schedule().program(rank) for rank in range(4)]
    assert min(len([r for r in program.rounds if r.receives]) for program in programs) > 1
    taken: list[tuple[int, ...]] = []

    def noted(like: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
        taken.append(wanted)
        return new_like(like, wanted)

    def move(rank: int) -> list[torch.Tensor]:
        shards = random_shards(source)[rank]
        execute(plan, shards)  # the short way is taken by plans that are known
        return execute(plan, shards)

    monkeypatch.setattr(short, "new_like", noted)
    results = simulate(move, 4).results
    assert len(taken) == 4 * 3  # on every rank, one for each of the others
    found = assemble(target, dict(enumerate(results)))
    torch.testing.assert_close(found, assemble(source, random_shards(source)))
