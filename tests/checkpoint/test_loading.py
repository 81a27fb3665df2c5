"""Loading into tensors of any layout: values, bytes read, dtypes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.loaded import equal, full, numbers, on_one, rows, same, to_fill
from tests.checkpoint.saved import write_checkpoint

import shardwise
from shardwise.checkpoint import load, reading, sharing
from shardwise.checkpoint.reading import Reader
from shardwise.comm.simulate import simulate
from shardwise.geometry import Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import wrap
from shardwise.testing.strategies import layouts, shapes

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.index import Index

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint8,
)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_tensor_of_any_layout_loads_into_any_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(shapes(max_ndim=3, max_size=6))
    saved = data.draw(layouts(shape=shape, addends=False))
    target = data.draw(layouts(shape=shape))
    dtype = data.draw(st.sampled_from(DTYPES))
    max_bytes = data.draw(st.sampled_from([None, 1, 40]))
    if target.pending is not None:
        dtype = torch.float64
    value = numbers(shape, dtype)
    folder = write_checkpoint(tmp_path_factory.mktemp("any"), {"x": value}, {"x": saved})

    def go(rank: int) -> torch.Tensor:
        state = {"x": to_fill(target, dtype, rank)}
        keys = load(state, folder, max_bytes=max_bytes, verify=True)
        assert keys == ([], [], [])
        return full(state["x"])

    world_size = data.draw(st.integers(max(target.ranks, default=0) + 1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST", 8)  # so that several ranks read of small boxes
        for loaded in simulate(go, world_size).results:
            if target.pending == "avg":
                torch.testing.assert_close(loaded, value)
            else:
                assert equal(loaded, value)


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is really asked of the files: bytes of preads, and of mapped memory that is copied."""
    counted = [0]
    pread, tensor_on = os.preadv, reading._tensor_on

    def counting(handle: int, buffers: Any, at: int) -> int:
        done: int = pread(handle, buffers, at)
        counted[0] += done
        return done

    def counting_map(*args: Any) -> torch.Tensor:
        return tensor_on(*args).as_subclass(_Counted)

    class _Counted(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            outer: Any = super()
            out = outer.__torch_function__(func, types, args, kwargs or {})
            if func is torch.Tensor.copy_:
                counted[0] += args[1].nbytes
            return out

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(reading, "_tensor_on", counting_map)
    return counted


@pytest.mark.parametrize(
    "target",
    [
        rows((64, 96), 3),
        rows((64, 96), 4, dim=1),
        shardwise.grid([2, 2], ranks=[3, 1, 0, 2]).layout((64, 96)),
        same((64, 96), 4),
    ],
    ids=["rows", "columns", "grid", "replicas"],
)
def test_each_byte_is_read_once_over_all_ranks(
    target: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = numbers((64, 96))
    folder = write_checkpoint(tmp_path, {"x": value}, {"x": rows((64, 96), 2)})
    monkeypatch.setattr(sharing, "_LEAST", 1000)
    counted = count_bytes(monkeypatch)

    def go(rank: int) -> bool:
        state = {"x": to_fill(target, torch.float32, rank)}
        load(state, folder)
        return equal(full(state["x"]), value)

    assert all(simulate(go, 4).results)
    assert counted[0] == value.nbytes


def test_replicas_read_parts_and_pass_them_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"big": numbers((40, 10)), **{f"small{k}": numbers((5,)) for k in range(8)}}
    folder = write_checkpoint(tmp_path, state)
    monkeypatch.setattr(sharing, "_LEAST", 100)
    readers: list[Reader] = []
    make = Reader.__init__

    def noted(self: Reader, index: Index, **options: Any) -> None:
        readers.append(self)
        make(self, index, **options)

    monkeypatch.setattr(Reader, "__init__", noted)

    def go(rank: int) -> bool:
        mine = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(mine, folder)
        return all(torch.equal(mine[name], state[name]) for name in state)

    run = simulate(go, 4)
    assert all(run.results)
    total = sum(tensor.nbytes for tensor in state.values())
    assert [reader.bytes_read for reader in readers] == [total // 4] * 4
    assert run.traffic.total_bytes >= 3 * total


def test_non_contiguous_memory_is_filled_under_a_cap(tmp_path: Path) -> None:
    value = numbers((30, 7))
    folder = write_checkpoint(tmp_path, {"x": value, "y": value})

    def go(rank: int) -> bool:
        turned = torch.zeros(7, 30).t()
        own = torch.zeros(7, 30).t() if rank == 0 else torch.zeros(0)
        single = Layout((30, 7), same((30, 7), 1).boxes, [0])
        shards = [own] if rank == 0 else []
        y = wrap(make_state(single, shards, group=None, dtype=torch.float32))
        load({"x": turned, "y": y}, folder, max_bytes=64)
        return torch.equal(turned, value) and torch.equal(full(y), value)

    assert all(simulate(go, 3).results)


def test_views_of_other_values_are_filled(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.tensor([1 + 2j]), "b": torch.tensor([3.0])})
    memory, other = (torch.zeros(1, dtype=torch.complex64) for _ in range(2))
    on_one(lambda: load({"a": memory.conj(), "b": other.conj().imag}, folder))
    assert memory.tolist() == [1 - 2j]
    assert other.tolist() == [-3j]


def test_dtypes_are_converted_and_named(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 1 + 2**-12, 300])
    saved = {"x": value, "n": torch.tensor([3, 4], dtype=torch.int32), "same": value}
    saved["state.0.step"] = torch.tensor(1001.0)  # which bfloat16 cannot hold
    folder = write_checkpoint(tmp_path, saved)

    def go(rank: int) -> None:
        state = {
            "x": torch.zeros(3, dtype=torch.bfloat16),
            "n": torch.zeros(2, dtype=torch.float64),
            "same": torch.zeros(3),
            "state.0.step": torch.tensor(0.0),
        }
        assert load(state, folder).converted == ["x", "n"]
        assert torch.equal(state["x"], value.bfloat16())
        assert state["n"].tolist() == [3, 4]
        assert torch.equal(state["same"], value)
        load(state, folder, dtype=torch.bfloat16)
        assert torch.equal(state["same"], value.bfloat16().float())
        assert state["n"].tolist() == [3, 4]
        assert state["state.0.step"].item() == 1001

    simulate(go, 2)


def _load_on_real_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    value = numbers((301, 200))
    x = shardwise.distribute(torch.zeros(301, 200), shardwise.chunk(1))
    y = torch.zeros(301, 200)
    mesh = init_device_mesh("cpu", (3,))
    state = {
        "x": x,
        "y": y,
        "z": distribute_tensor(torch.zeros(301, 200), mesh, [Shard(0)]),
        "w": distribute_tensor(torch.zeros(301, 200), mesh, [Replicate()]),
    }
    load(state, folder, verify=True, max_bytes=1 << 16)
    assert torch.equal(x.full_tensor(), value)
    assert torch.equal(y, value)
    assert torch.equal(state["z"].full_tensor(), value)  # type: ignore[attr-defined]  # a DTensor
    assert torch.equal(state["w"].to_local(), value)  # type: ignore[attr-defined]  # a DTensor


def test_real_ranks_load(tmp_path: Path) -> None:
    value = numbers((301, 200))
    state = dict.fromkeys("xyzw", value)
    folder = write_checkpoint(tmp_path, state, {"x": rows((301, 200), 4)})
    shardwise.run_local(_load_on_real_ranks, 3, str(folder))


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    folder = write_checkpoint(tmp_path, model)
    other = torch.nn.Linear(3, 2)
    load(other, folder)
    assert torch.equal(other.weight, model.weight)
