"""`save` on simulated ranks: what is read back from the files is what was there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.folders import read_state

import shardwise
from shardwise.checkpoint import AsyncSave, load, load_index, save
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.writing import FileWriter, Staging
from shardwise.comm import communicator
from shardwise.comm.simulate import SimulatedCommunicator, simulate
from shardwise.errors import (
    AgreementError,
    ArgumentValueError,
    CheckpointError,
    RankFailure,
    ShardwiseError,
)
from shardwise.geometry import Box
from shardwise.testing.strategies import layouts
from shardwise.testing.tensors import assemble, random_shards, random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.geometry import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def on_ranks(world_size: int, run: Callable[[int], Any]) -> list[Any]:
    return simulate(run, world_size).results


def errors_on_ranks(world_size: int, run: Callable[[int], Any]) -> list[Exception]:
    """What each rank raises."""

    def caught(rank: int) -> Exception:
        with pytest.raises((ShardwiseError, OSError)) as info:
            run(rank)
        return info.value

    return simulate(caught, world_size).results


@settings(max_examples=min(settings().max_examples // 2, 200))
@given(
    st.lists(st.tuples(layouts(), st.sampled_from(DTYPES)), min_size=1, max_size=4), st.booleans()
)
def test_tensors_of_any_layout_are_read_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[Layout, torch.dtype]],
    is_async: bool,
) -> None:
    path = tmp_path_factory.mktemp("any") / "ck"
    kinds = [
        (layout, dtype if layout.pending is None else torch.float32) for layout, dtype in kinds
    ]

    def run(rank: int) -> None:
        state = {str(k): random_tensor(*kind, seed=k) for k, kind in enumerate(kinds)}
        done = save(state, path, async_op=True) if is_async else save(state, path)
        if isinstance(done, AsyncSave):
            assert done.wait().path == path

    on_ranks(4, run)
    found = read_state(path)
    for k, (layout, dtype) in enumerate(kinds):
        shards = random_shards(layout, dtype, seed=k)
        if layout.pending is None:
            assert_same(
                found[str(k)],
                assemble(layout, shards) if shards else torch.empty(layout.shape, dtype=dtype),
            )
        else:
            torch.testing.assert_close(found[str(k)], assemble(layout, shards))


def test_a_state_of_everything_is_read_state(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    full = torch.arange(12.0).view(4, 3)
    values = {3: [1.5, (True, None)], "text": "x", "infinite": float("inf"), "bytes": b"\0"}

    def state(rank: int) -> dict[str, Any]:
        rows = shardwise.distribute(full, shardwise.chunk(0, ranks=[2, 0]))
        return {
            "rows": rows,
            "tied": rows.detach(),
            "columns": full.t(),  # not contiguous
            "conj": torch.tensor([1 + 2j]).conj(),
            "scalar": torch.tensor(5),
            "empty": torch.zeros(0, 4),
            "nested": values,
        }

    saved = on_ranks(3, lambda rank: save(state(rank), path, max_bytes=16))
    found = read_state(path)
    assert list(found) == ["rows", "tied", "columns", "conj", "scalar", "empty", "nested"]
    assert found["nested"] == values
    for name, expected in (("rows", full), ("tied", full), ("columns", full.t())):
        assert_same(found[name], expected.contiguous())
    assert_same(found["conj"], torch.tensor([1 - 2j]))
    assert (found["scalar"].item(), found["empty"].shape) == (5, (0, 4))
    # Tied tensors are written once.
    assert {one.nbytes for one in saved} == {48 + 48 + 8 + 8}
    assert sum(one.rank_bytes for one in saved) == saved[0].nbytes
    assert {one.num_tensors for one in saved} == {6}


def test_ranks_may_bring_tensors_of_their_own_and_of_subgroups(tmp_path: Path) -> None:
    path = tmp_path / "ck"

    def run(rank: int) -> None:
        world = communicator()
        assert isinstance(world, SimulatedCommunicator)
        state: dict[str, Any] = {"epoch": 2, f"stage{rank // 2}": torch.full((3,), rank // 2)}
        ranks = [0, 1] if rank < 2 else [2, 3]
        pair = world.subgroup(ranks)
        layout = shardwise.chunk(0, ranks=ranks).layout((10,))
        if rank < 2:
            pending = shardwise.partial(ranks=[0, 1]).layout((10,))
            state["sum"] = random_tensor(pending, group=pair)
        state[f"group{rank // 2}"] = random_tensor(layout, seed=rank // 2, group=pair)
        save(state, path, process_group=world)

    on_ranks(4, run)
    found = read_state(path)
    assert sorted(found) == ["epoch", "group0", "group1", "stage0", "stage1", "sum"]
    for k, ranks in enumerate(([0, 1], [2, 3])):
        layout = shardwise.chunk(0, ranks=ranks).layout((10,))
        assert_same(found[f"group{k}"], assemble(layout, random_shards(layout, seed=k)))
        assert found[f"stage{k}"].tolist() == [k] * 3
    pending = shardwise.partial(ranks=[0, 1]).layout((10,))
    assert_same(found["sum"], assemble(pending, random_shards(pending)))


def test_a_process_without_a_group_saves_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer, "step": 1}, tmp_path / "ck")
    found = read_state(tmp_path / "ck")
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(found["optimizer"])
    assert_same(again.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert_same(found["model"]["weight"], model.weight.detach())


# -- a folder that others read -----------------------------------------------------------------


def test_unsharded_tensors_make_a_hugging_face_folder(tmp_path: Path) -> None:
    tensors = {f"layer.{k}": torch.full((4,), float(k)) for k in range(3)}
    on_ranks(2, lambda rank: save(tensors, tmp_path / "two"))
    save(tensors, tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == ["model.safetensors", INDEX_NAME]
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == tensors.keys()
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48}
    for name, file in index["weight_map"].items():
        assert_same(load_file(tmp_path / "two" / file)[name], tensors[name])
    assert len(set(index["weight_map"].values())) == 2


def test_safetensors_opens_every_file_of_a_sharded_folder(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(6, 4)

    def run(rank: int) -> None:
        spec = shardwise.block_cyclic(0, 1, ranks=[0, 1])
        save({"w": shardwise.distribute(full, spec)}, tmp_path / "ck")

    on_ranks(2, run)
    index = load_index(tmp_path / "ck")
    found = torch.zeros_like(full)
    for file in index.files:
        with safe_open(tmp_path / "ck" / file.name, framework="pt") as opened:
            offset = json.loads(opened.metadata()["DCP_SHARDING_INFO"])["w"]["saved_offsets"]
            part = opened.get_tensor("w")
            found[Box.at(offset, part.shape).slices()] = part
    assert len(index.files) == 6
    assert_same(found, full)


# -- what goes wrong ---------------------------------------------------------------------------


def test_what_differs_between_ranks_is_told_on_all_of_them(tmp_path: Path) -> None:
    found = errors_on_ranks(3, lambda rank: save({"epoch": rank // 2}, tmp_path / "ck"))
    assert {str(error)[:70] for error in found} == {
        "save: ranks differ in 'epoch' (ranks 0, 1: 0; rank 2: 1). Save the sam"
    }
    found = errors_on_ranks(2, lambda rank: save({}, tmp_path / "ck", max_bytes=64 + rank))
    assert all("ranks differ in max_bytes" in str(error) for error in found)
    found = errors_on_ranks(2, lambda rank: save({"x": [1, object][rank]}, tmp_path / "ck"))
    assert "failed on other ranks: rank 1: CheckpointError: 'x' of the state" in str(found[0])
    assert "'x' of the state: expected a tensor" in str(found[1])
    found = errors_on_ranks(2, lambda rank: save({}, [str(tmp_path / "ck"), ""][rank]))
    assert "failed on other ranks: rank 1: ArgumentTypeError: path of a chec" in str(found[0])
    found = errors_on_ranks(2, lambda rank: save(torch.ones(2), tmp_path / "ck"))
    assert all("state of save: expected a dict" in str(error) for error in found)
    assert os.listdir(tmp_path) == []


def test_plain_tensors_that_differ_are_found_where_everything_is_compared(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        save({"same": torch.ones(2), "own": torch.full((2, 2), float(rank)).t()}, tmp_path / "ck")

    on_ranks(2, run)
    with shardwise.set_check("debug"):
        found = errors_on_ranks(2, run)
    assert all("ranks differ in 'own' (rank 0: plain (2, 2)" in str(error) for error in found)


@pytest.mark.parametrize("keywords", [{"max_bytes": 8}, {"if_busy": "skip"}])
def test_wrong_arguments_are_refused(tmp_path: Path, keywords: dict[str, Any]) -> None:
    with pytest.raises(ArgumentValueError, match=f"{next(iter(keywords))} of save"):
        save({}, tmp_path / "ck", **keywords)


def test_a_shard_of_which_the_owner_is_not_in_the_group_is_an_error(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        world = communicator()
        assert isinstance(world, SimulatedCommunicator)
        rows = shardwise.distribute(torch.ones(4), shardwise.chunk(0, ranks=[0, 1]))
        save({"rows": rows}, tmp_path / "ck", process_group=world.subgroup([rank]))

    for rank, error in enumerate(errors_on_ranks(2, run)):
        assert f"got nothing from rank {1 - rank}" in str(error)


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ck"
    state = {f"t{k}": torch.ones(100) for k in range(4)}
    on_ranks(2, lambda rank: save(state, path))
    before = sorted(os.listdir(path))
    write = FileWriter._write
    count = [0]

    def full(self: FileWriter, data: memoryview) -> None:
        count[0] += 1
        if count[0] == 5:  # on one rank, in the middle of its file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(FileWriter, "_write", full)
    errors = errors_on_ranks(2, lambda rank: save(state, path))
    assert sum("No space left on device" in str(error) for error in errors) == 2
    assert sum("Make room on the disk" in str(error) for error in errors) == 2
    assert {type(error) for error in errors} == {CheckpointError, AgreementError}
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["ck"]
    assert sorted(os.listdir(path)) == before
    assert read_state(path).keys() == state.keys()


@pytest.mark.parametrize("path", ["/proc/self/ck", "{tmp_path}/none/ck", "{tmp_path}"])
def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path, path: str) -> None:
    (tmp_path / "mine").write_text("")
    where = path.format(tmp_path=tmp_path)
    found = errors_on_ranks(2, lambda rank: save({"w": torch.ones(2)}, where))
    assert all(isinstance(error, CheckpointError | AgreementError) for error in found)
    assert all("ck" in str(error) or "mine" in str(error) for error in found)
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize(
    "next_call",
    [
        lambda folder: save({"w": torch.ones(2)}, folder / "ck"),
        lambda folder: load({"w": torch.ones(2)}, folder / "ck"),
    ],
    ids=["save", "load"],
)
def test_an_error_in_the_background_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_call: Callable[[Path], object]
) -> None:
    def broken(self: FileWriter, data: memoryview) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(FileWriter, "_write", broken)
    handle = save({"w": torch.ones(2)}, tmp_path / "ck", async_op=True)
    handle._is_over.wait()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="failed: broken"):
        next_call(tmp_path)
    save({"w": torch.ones(2)}, tmp_path / "ck")  # it was told once
    with pytest.raises(CheckpointError, match="failed: broken"):
        handle.wait()


# -- staging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [16, 40, 1000])
def test_staging_gives_the_bytes_in_order_in_parts_of_at_most_what_is_allowed(
    max_bytes: int,
) -> None:
    tensor = torch.arange(60).view(3, 4, 5).permute(2, 0, 1)
    parts = [bytes(part) for part in Staging(max_bytes).parts(tensor)]
    assert b"".join(parts) == tensor.contiguous().numpy().tobytes()
    assert max(map(len, parts)) <= max_bytes
    assert [len(part) for part in Staging(max_bytes).parts(tensor[0, 0, 0])] == [8]


def test_an_async_save_beyond_its_staging_is_written_at_once(tmp_path: Path) -> None:
    state = {f"t{k}": torch.full((8,), float(k)) for k in range(4)}
    handle = save(state, tmp_path / "ck", async_op=True, max_bytes=64)
    for tensor in state.values():
        tensor.zero_()
    handle.wait()
    found = read_state(tmp_path / "ck")
    assert [found[name].tolist() for name in state] == [[float(k)] * 8 for k in range(4)]


@pytest.mark.long
def test_the_interpreter_ends_when_a_save_in_the_background_is_over(tmp_path: Path) -> None:
    code = f"""
import time, torch
from shardwise.checkpoint import save
from shardwise.checkpoint.writing import FileWriter
write = FileWriter.write
FileWriter.write = lambda *args: time.sleep(0.3) or write(*args)
handle = save({{"w": torch.ones(3)}}, {str(tmp_path / "ck")!r}, async_op=True)
assert not handle.done()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert read_state(tmp_path / "ck")["w"].tolist() == [1, 1, 1]


def test_a_simulated_failure_is_no_deadlock(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            save({"w": torch.ones(2)}, tmp_path / "ck")

    with pytest.raises(RankFailure, match="rank 1 did not come"):
        simulate(run, 2)
