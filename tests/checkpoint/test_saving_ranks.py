"""`save` on real ranks: processes that are killed, work in the background, DCP as a reader."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint import background, committing, load_index, save, saving
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.writing import FileWriter
from shardwise.errors import CheckpointError, RankFailure
from shardwise.geometry import Box

FULL = torch.arange(40.0).view(8, 5)


def read(path: Path | str, name: str) -> torch.Tensor:
    index = load_index(path)
    out = torch.empty(index.tensors[name].shape)
    with Reader(index) as reader:
        reader.read(name, Box.whole(index.tensors[name].shape), out)
    return out


def state_of(value: float) -> dict[str, Any]:
    """Shards on all ranks but the first, and a plain tensor."""
    ranks = list(range(1, dist.get_world_size())) or [0]
    rows = shardwise.distribute(FULL + value, shardwise.chunk(0, ranks=ranks))
    return {"rows": rows, "plain": torch.full((3,), value), "value": value}


# -- killed ------------------------------------------------------------------------------------

# Where a rank is when it is killed: the function that it does not come to the end of.
POINTS = {
    "making the folder": (committing.Aside, "make", 1),
    "writing": (FileWriter, "write", 1),
    "between the meetings": (saving, "report_of", 2),
    "making the index": (saving, "_commit", 0),
    "renaming": (committing, "fsync_folder", 0),
    "after the rename": (committing.Destination, "remove_remains", 0),
}
SHORT = ("writing", "between the meetings", "renaming")


def _killed(rank: int, folder: str, point: str) -> str:
    path = f"{folder}/ck"
    save(state_of(1.0), path)
    home, name, victim = POINTS[point]
    before = getattr(home, name)

    def die(*args: Any, **kwargs: Any) -> None:
        if point == "after the rename":
            before(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    if rank == victim:
        setattr(home, name, die)
    with shardwise.set_check("always", timeout=20), pytest.raises(CheckpointError) as info:
        save(state_of(2.0), path)
    Path(f"{folder}/told-{rank}").write_text(str(info.value))
    return str(info.value)


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if point in SHORT else pytest.mark.long) for point in POINTS],
)
def test_a_killed_rank_leaves_the_older_checkpoint_and_the_others_raise(
    tmp_path: Path, point: str
) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        shardwise.run_local(_killed, 3, str(tmp_path), point)
    is_new = point == "after the rename"
    expected = 2.0 if is_new else 1.0
    assert torch.equal(read(tmp_path / "ck", "rows"), FULL + expected)
    told = [file.read_text() for file in sorted(tmp_path.glob("told-*"))]
    assert len(told) == 2 or is_new  # who has heard of the last step is through
    remains = list(tmp_path.glob(".ck.saving-*"))
    for text in told:
        assert "was cut off, since ranks are missing" in text
        assert "the next save to the same path removes it" in text
        assert is_new or remains[0].name in text
    save({"value": 3.0}, tmp_path / "ck")
    assert list(tmp_path.glob(".ck*")) == []


# -- in the background -------------------------------------------------------------------------


def _in_background(rank: int, folder: str) -> list[bool]:
    state = state_of(1.0)
    handle = save(state, f"{folder}/ck", async_op=True)
    # The caller goes on, with exchanges of its own, and the tensors change.
    state["rows"].zero_()
    assert state["rows"].sum().item() == 0
    memory = background.background_of(shardwise.comm.communicator())._memory
    assert handle.wait().rank_bytes <= len(memory)
    assert handle.done()
    others = [save(state_of(float(k)), f"{folder}/ck{k}", async_op=True) for k in (2, 3)]
    assert background.background_of(shardwise.comm.communicator())._memory is memory
    save(state_of(4.0), f"{folder}/ck4")  # which waits for them
    return [other.done() for other in others]


def test_a_save_in_the_background_is_of_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    assert shardwise.run_local(_in_background, 3, str(tmp_path)) == [[True, True]] * 3
    assert torch.equal(read(tmp_path / "ck", "rows"), FULL + 1)
    for k in (2, 3, 4):
        assert torch.equal(read(tmp_path / f"ck{k}", "rows"), FULL + k)
        assert read(tmp_path / f"ck{k}", "plain").tolist() == [k] * 3
    assert sorted(os.listdir(tmp_path)) == ["ck", "ck2", "ck3", "ck4"]


def _fails_in_background(rank: int, folder: str) -> tuple[str, str]:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state = {"rows": shardwise.distribute(torch.ones(8, 4096), shardwise.chunk(0))}
    if rank == 1:  # which may write no file of this size
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    handle = save(state, f"{folder}/ck", async_op=True)
    with pytest.raises((CheckpointError, shardwise.ShardwiseError)) as busy:
        save(state, f"{folder}/ck", if_busy="raise")
    with pytest.raises(shardwise.ShardwiseError) as info:
        handle.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    save(state, f"{folder}/ck")
    return str(busy.value), str(info.value)


def test_an_error_in_the_background_of_one_rank_is_told_on_all(tmp_path: Path) -> None:
    told = shardwise.run_local(_fails_in_background, 2, str(tmp_path))
    for busy, failed in told:
        assert "File too large" in failed
        assert "File too large" in busy or "a save in the background is not over yet" in busy
    assert torch.equal(read(tmp_path / "ck", "rows"), torch.ones(8, 4096))
    assert os.listdir(tmp_path) == ["ck"]


# -- DCP reads our folders ---------------------------------------------------------------------


def _read_by_dcp(rank: int, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

        mesh = init_device_mesh("cpu", (2,))
        columns = distribute_tensor(FULL, mesh, [Shard(1)])
        state = {
            "rows": shardwise.distribute(FULL, shardwise.chunk(0, sizes=[5, 3])),
            "grid": shardwise.distribute(FULL, shardwise.grid([2, 2], ranks=[1, 0, 0, 1])),
            "plain": torch.arange(3.0),
            "columns": columns,
            "tied": columns.detach(),
            "copies": distribute_tensor(FULL, mesh, [Replicate()]),
        }
        save(state, f"{folder}/ck")
        del state["tied"]  # which DCP cannot know to be the same
        target = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
        rows = zeros(8, 5, device_mesh=mesh, placements=[Shard(0)])
        reader = HuggingFaceStorageReader(f"{folder}/ck")
        state_dict_loader.load({**target, "columns": rows}, storage_reader=reader)
    for name in ("rows", "grid", "copies"):
        assert torch.equal(target[name], FULL), name
    assert torch.equal(rows.full_tensor(), FULL)
    assert target["plain"].tolist() == [0, 1, 2]


def test_dcp_reads_a_sharded_folder_into_plain_tensors_and_dtensors(tmp_path: Path) -> None:
    shardwise.run_local(_read_by_dcp, 2, str(tmp_path))
    index = load_index(tmp_path / "ck")
    assert index.tensors["tied"].starts.tolist() == index.tensors["columns"].starts.tolist()
    assert len(index.tensors["columns"].boxes) == 2
    assert len(index.tensors["copies"].boxes) == 1
    assert torch.equal(read(tmp_path / "ck", "tied"), FULL)
