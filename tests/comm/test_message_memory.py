"""The memory of messages under a cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import shardwise
from shardwise.comm import execute, execute_all, message_memory
from shardwise.comm.load import Transfer
from shardwise.comm.message_memory import Slab
from shardwise.comm.pages import new_tensor
from shardwise.comm.simulate import simulate
from shardwise.testing.memory import peak_growth
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    import pytest

    from shardwise.geometry import Layout

CPU = torch.device("cpu")
MIB = 1 << 20


def _layouts(source: str, target: str, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    first, second = (
        shardwise.parse_spec(text, ranks=range(4), device="cpu").layout(shape)
        for text in (source, target)
    )
    return first, second


def test_every_round_gets_the_same_memory() -> None:
    memory = Slab([[40, 24], [64]], {torch.float32}, CPU)
    first, second = memory.take((2, 5), torch.float32), memory.take((6,), torch.float32)
    assert first.is_contiguous()
    assert (first.shape, second.shape) == ((2, 5), (6,))
    assert second.data_ptr() == first.data_ptr() + 40
    memory.next_round()
    again = memory.take((64,), torch.uint8)  # a message of several parts
    assert again.data_ptr() == first.data_ptr()
    assert again.untyped_storage().nbytes() == 64


def test_elements_of_any_dtype_start_where_they_may() -> None:
    memory = Slab([[3, 16, 5, 8]], {torch.bool, torch.complex128, torch.float64}, CPU)
    flags, numbers = memory.take((3,), torch.bool), memory.take((1,), torch.complex128)
    packed = memory.take((5,), torch.uint8)
    last = memory.take((1,), torch.float64)
    starts = [one.data_ptr() - flags.data_ptr() for one in (numbers, packed, last)]
    assert starts == [16, 32, 48]


def test_a_message_that_was_not_foreseen_has_memory_of_its_own() -> None:
    memory = Slab([[8]], {torch.float32}, CPU)
    first, second = memory.take((2,), torch.float32), memory.take((1,), torch.float32)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_nothing_is_taken_for_messages_that_lie_as_they_are_sent() -> None:
    assert Slab([], {torch.float32}, CPU)._memory is None
    assert Slab([[], []], (), CPU)._memory is None


def test_many_rounds_of_many_dtypes_take_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def noted(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        taken.append(shape)
        return new_tensor(shape, dtype, device)

    monkeypatch.setattr(message_memory, "new_tensor", noted)
    source, target = _layouts("chunk(0)", "chunk(1)", (37, 53))
    dtypes = (torch.float32, torch.bool, torch.complex128, torch.bfloat16)
    held = {
        dtype: {r: [s.to(dtype) for s in shards] for r, shards in random_shards(source).items()}
        for dtype in dtypes
    }

    def move(rank: int) -> list[list[torch.Tensor]]:
        transfers = [
            Transfer(plan_reshard(source, target, dtype.itemsize), held[dtype][rank])
            for dtype in dtypes
        ]
        return execute_all(transfers, max_bytes=512)

    results = simulate(move, 4).results
    assert len(taken) == 4
    assert max(shape[0] for shape in taken) <= 512 + 16 * 8
    for k, dtype in enumerate(dtypes):
        found = assemble(target, {rank: results[rank][k] for rank in range(4)})
        assert torch.equal(found, assemble(source, held[dtype]))


def _growth(rank: int) -> int:
    source, target = _layouts("chunk(0)", "chunk(1)", (8192, 4096))
    plan = plan_reshard(source, target, 4)
    shards = [torch.full(box.shape, float(rank)) for box in source.boxes_of(rank)]

    def run() -> object:
        return execute(plan, shards, max_bytes=4 * MIB)

    run()  # what is used for the first time counts too
    return min(peak_growth(run) for _ in range(3)) - plan.output_bytes[rank]


def test_the_process_grows_by_the_output_and_the_cap() -> None:
    """It was 4 times the cap when every round took memory of its own; large pages are of 2 MiB."""
    assert max(shardwise.run_local(_growth, 4)) <= (4 + 4) * MIB
