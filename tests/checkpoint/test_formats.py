"""Checkpoints of others: Hugging Face folders, DCP's, and what is wrong with some."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.checkpoint.folders import assert_same, model, read_all, save_dcp

from shardwise import run_local
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.structure import unflatten
from shardwise.checkpoint.torch_zips import find_chunk
from shardwise.checkpoint.verifying import verify
from shardwise.errors import CheckpointError, DamagedError

# -- Hugging Face ----------------------------------------------------------------------------------


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        index = load_index(path)
        assert (index.kind, index.world_size) == ("safetensors", 1)
        assert_same(read_all(index), model())
        assert_same(unflatten(index.structure, read_all(index).__getitem__), model())


def write_two_files(folder: Path) -> None:
    """A folder of two files with an index, as transformers writes it, and a file beside it."""
    tensors = list(model().items())
    halves = {"model-00001-of-00002.safetensors": dict(tensors[:3])}
    halves["model-00002-of-00002.safetensors"] = dict(tensors[3:])
    for name, half in halves.items():
        save_file(half, folder / name)
    weights = {key: name for name, half in halves.items() for key in half}
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(text)


def test_many_files_with_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    write_two_files(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert_same(read_all(load_index(tmp_path)), model())
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    assert_same(read_all(load_index(tmp_path)), model())


def test_what_a_folder_of_files_says_must_fit(tmp_path: Path) -> None:
    write_two_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    for name, message in [
        ("model-00001-of-00002.safetensors", "none of that name there"),
        ("../model.safetensors", "a file in the folder of the checkpoint"),
        ("absent.safetensors", "No such file"),
    ]:
        said["weight_map"]["wave"] = name
        index.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=message):
            load_index(tmp_path)
    index.unlink()
    save_file({"wave": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"'wave': expected in one file, got whole in model-"):
        load_index(tmp_path)


# -- DCP -------------------------------------------------------------------------------------------


def nested_state() -> dict[str, Any]:
    """A state as DCP saves it: nested, lists of tensors, plain values, other orders of memory."""
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2))
    return {
        "model": model(),
        "list": [torch.ones(2), torch.arange(3)],
        "columns": torch.arange(12.0).reshape(3, 4).t(),
        "last": image.to(memory_format=torch.channels_last),
        "part": torch.arange(12.0)[2:6],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "step": 5,
        "rates": [0.1, "x", None],
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}, {"lr": 1e-3}],
    }


def test_a_folder_of_dcp_is_read_with_its_nesting(tmp_path: Path) -> None:
    save_dcp(nested_state(), tmp_path)
    index = load_index(tmp_path)
    assert (index.kind, index.world_size, index.unreadable) == ("dcp", 1, {})
    got = unflatten(index.structure, read_all(index).__getitem__)
    expected = nested_state()
    assert_same(got.pop("model"), expected.pop("model"))
    for name in ("columns", "last", "part", "parameter"):
        assert torch.equal(got.pop(name), expected.pop(name))
    assert all(map(torch.equal, got.pop("list"), expected.pop("list")))
    assert got == expected


class Private:
    """Something that only pickle can keep."""


def test_objects_in_a_folder_of_dcp_are_named_and_left_out(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "kept": 3, "object": Private()}
    save_dcp(state, tmp_path)
    index = load_index(tmp_path)
    assert list(index.unreadable) == ["object"]
    assert "a pickled object" in index.unreadable["object"]
    assert unflatten(index.structure, str) == {"a": "a", "kept": 3}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("touched"),))


def test_metadata_of_a_stranger_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"it names builtins\.getattr|it names pathlib"):
        load_index(tmp_path)
    assert not (tmp_path / "touched").exists()
    for data in (b"", b"\x80\x04r\xff\xff\xff\x7f.", b"\x80\x04N.", pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(DamagedError):
            load_index(tmp_path)


def test_a_damaged_file_of_dcp_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_dcp({"a": torch.ones(2, 3)}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    data = file.read_bytes()
    for damaged, message in [
        (data[:-1], "'a' at .* got a file of"),
        (b"\0" * len(data), "'a' at .* a tensor as torch.save writes it"),
        (data.replace(b"FloatStorage", b"DoublStorage"), "'a' at .*Bad CRC-32"),
    ]:
        assert damaged != data
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match=message):
            load_index(tmp_path)
    file.unlink()
    with pytest.raises(DamagedError, match=r"'__0_0.distcp' of .* cannot be read: got No such"):
        load_index(tmp_path)


def _pickled(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """`data.pkl` as torch.save writes it, which may say what it likes."""
    saved = io.BytesIO()
    torch.save(torch.ones(6), saved)
    data = zipfile.ZipFile(saved).read("archive/data.pkl")
    numbers = pickle.dumps(shape, 2)[2:-1] + pickle.dumps(strides, 2)[2:-1]
    first, last = data.index(b"K\x06\x85"), data.index(b"\x89ccollections")
    return data[:first] + numbers.replace(b"q\x00", b"") + data[last:]


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps(Evil()), "Nothing of it was run"),
        (pickle.dumps([1]), "expected a tensor, got list"),
        (_pickled((7,), (1,)), "28 bytes of .7,. in a record of 24"),
        (_pickled((2**40, 2**40), (2**40, 1)), "in a record of 24"),
        (_pickled((3, 2), (1,)), "strides .1,. of shape .3, 2."),
        (_pickled((3, 2), (0, 1)), "expected a tensor of which the elements lie next to each"),
    ],
)
def test_an_archive_of_a_stranger_is_refused(tmp_path: Path, pickled: bytes, message: str) -> None:
    path = tmp_path / "file"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"\0" * 24)
    with path.open("rb") as file, pytest.raises(CheckpointError, match=message):
        find_chunk(file.fileno(), 0, path.stat().st_size, "'a'")


@pytest.mark.parametrize("name", ["dcp/.metadata", "dcp/__0_0.distcp", "model.safetensors"])
def test_random_damage_is_an_error_and_nothing_else(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3).to(torch.float8_e5m2)}
    save_dcp({"model": tensors, "list": [torch.ones(2)], "step": 5}, tmp_path / "dcp")
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / name
    path = tmp_path / "dcp" if name.startswith("dcp") else file
    data = file.read_bytes()
    numbers = random.Random(name)
    for _ in range(40):
        damaged = bytearray(data)
        at = numbers.randrange(len(data))
        length = numbers.choice([0, 0, 1, 4, len(data)])
        damaged[at : at + length + 1] = numbers.randbytes(numbers.choice([0, 1, 1, 3]))
        file.write_bytes(damaged)
        with suppress(CheckpointError):  # bytes that nothing depends on may be anything
            read_all(load_index(path))
        with suppress(CheckpointError):
            verify(path)


def _save_dtensors(rank: int, folder: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "whole": Replicate()}
    state = {
        name: distribute_tensor(tensor, mesh, [placements[name]])
        for name, tensor in whole_tensors().items()
    }
    save(state | {"step": 4}, checkpoint_id=f"{folder}/dcp")
    writer = HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True)
    save(state, storage_writer=writer)


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(7, 4, generator=generator),
        "columns": torch.randn(5, 8, generator=generator).to(torch.bfloat16),
        "few": torch.randn(2, 3, generator=generator),  # of which one rank has none
        "whole": torch.randn(3, generator=generator),
    }


def test_what_dcp_saved_from_dtensors_on_three_ranks_is_read(tmp_path: Path) -> None:
    run_local(_save_dtensors, 3, str(tmp_path))
    for kind, folder in (("dcp", "dcp"), ("safetensors", "hf")):
        index = load_index(tmp_path / folder)
        assert (index.kind, index.world_size) == (kind, 3)
        assert_same(read_all(index), whole_tensors())
        layout = index.layout("rows")
        assert [box.shape[0] for box in layout.boxes] == [3, 3, 1]
        assert layout.owners.tolist() == [0, 1, 2]
    assert unflatten(load_index(tmp_path / "dcp").structure, str)["step"] == 4


# -- wrong paths -----------------------------------------------------------------------------------


def test_a_wrong_path_is_told_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("hello")
    (tmp_path / "none").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__0.metadata").write_text("")
    for name, message in [
        ("absent", "got nothing. Beside it: none, own, run"),
        ("a/b", "got nothing; nor is there a folder above it"),
        ("run", "got a folder with notes.txt"),
        ("run/notes.txt", "got a file of 5 bytes"),
        ("none", "got an empty folder"),
        ("own", "use_collectives=False"),
    ]:
        with pytest.raises(CheckpointError, match="no checkpoint at ") as raised:
            load_index(tmp_path / name)
        assert message in str(raised.value)
