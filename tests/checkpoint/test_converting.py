"""Converted checkpoints hold the same; verify and diff tell where they do not."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.folders import assert_same, flip, model, read_all, save_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from shardwise import Box, ShardingPlan, run_local
from shardwise.checkpoint import convert, diff, fuse, load_index, save, transpose, verify
from shardwise.checkpoint.blocks import blocks_of, read_mosaic
from shardwise.checkpoint.structure import unflatten
from shardwise.errors import CheckpointError, PlanNameError, ShardingPlanError

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.converting import Format

PLAN = {"*.weight": "grid([2, 2])", "mask": "chunk(1, sizes=[0, 3, 1, 1])", "wave": "flat()"}


def state() -> dict[str, Any]:
    """Tensors and plain values, tied and empty ones too."""
    tied = torch.arange(20.0).reshape(4, 5)
    return {
        "model": model(),
        "tied": [tied, tied],
        "step": 5,
        "rate": float("inf"),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        "nothing": {},
        "name": "run",
    }


def loaded_by_dcp(folder: Path) -> dict[str, Any]:
    """The state as torch.distributed.checkpoint reads it into plain tensors."""
    found = state()
    for name, tensor in found["model"].items():
        found["model"][name] = torch.zeros_like(tensor)
    found |= {"tied": [torch.zeros(4, 5), torch.zeros(4, 5)], "step": 0, "rate": 0.0, "name": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_dcp(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize(("world_size", "plan"), [(1, None), (3, None), (4, PLAN)])
def test_what_is_converted_there_and_back_is_the_same(
    tmp_path: Path,
    to: Format,
    world_size: int,
    plan: dict[str, str] | None,
) -> None:
    plan = plan and {f"model.{key}": spec for key, spec in plan.items()}
    save(state(), tmp_path / "saved")
    convert(
        tmp_path / "saved",
        tmp_path / "converted",
        to=to,
        world_size=world_size,
        plan=plan,
        max_bytes=200,
        jobs=2,
    )
    index = load_index(tmp_path / "converted")
    assert index.kind == ("dcp" if to == "dcp" else "shardwise")
    assert_same(read_all(index), read_all(load_index(tmp_path / "saved")))
    assert diff(tmp_path / "saved", tmp_path / "converted", max_bytes=50).is_same
    assert verify(tmp_path / "converted", jobs=2).is_sound
    if plan:
        assert index.layout("model.mask").ranks == (1, 2, 3)
    convert(tmp_path / "converted", tmp_path / "back")
    assert diff(tmp_path / "back", tmp_path / "saved").is_same
    if to == "dcp":
        got, expected = loaded_by_dcp(tmp_path / "converted"), state()
        assert_same(got.pop("model"), expected.pop("model"))
        assert all(map(torch.equal, got.pop("tied"), expected.pop("tied")))
        assert got == expected


def test_for_one_rank_it_is_a_hugging_face_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dcp({"model": model(), "step": 1}, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "one")
    names = {f"model.{name}": tensor for name, tensor in model().items()}
    assert_same(load_file(tmp_path / "one" / "model.safetensors"), names)
    monkeypatch.setattr("shardwise.checkpoint.converting._HUGGING_FACE_FILE", 200)
    convert(tmp_path / "dcp", tmp_path / "many")
    weights = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(weights["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found = {
        name: load_file(tmp_path / "many" / file)[name]
        for name, file in weights["weight_map"].items()
    }
    assert_same(found, names)
    index = load_index(tmp_path / "many")
    assert (index.world_size, index.layout("model.mask").ranks) == (1, (0,))
    (tmp_path / "many" / "shardwise.index.json").unlink()
    assert_same(read_all(load_index(tmp_path / "many")), names)


def test_cut_files_are_read_by_dcps_hugging_face_reader(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in model().items() if name.startswith("up")}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "cut", world_size=3)
    (tmp_path / "cut" / "shardwise.index.json").unlink()
    assert_same(read_all(load_index(tmp_path / "cut")), tensors)
    got = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = HuggingFaceStorageReader(str(tmp_path / "cut"))
        load_dcp(got, storage_reader=reader, no_dist=True)
    assert_same(got, tensors)


def test_dtype_is_for_floating_point(tmp_path: Path) -> None:
    count = {"state.0.step": torch.tensor(1001.0)}  # which bfloat16 cannot hold
    save_file(model() | count, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "half", dtype=torch.bfloat16, max_bytes=64)
    found = read_all(load_index(tmp_path / "half"))
    for name, tensor in model().items():
        cast = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert_same({name: found[name]}, {name: cast})
    assert found["state.0.step"].item() == 1001


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_no_more_is_read_at_once_than_max_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Format
) -> None:
    save({"a": torch.randn(64, 64), "b": torch.randn(3)}, tmp_path / "a")
    sizes = []

    def counted(*arguments: Any) -> torch.Tensor:
        found = read_mosaic(*arguments)
        sizes.append(found.untyped_storage().nbytes())
        return found

    monkeypatch.setattr("shardwise.checkpoint.converting.read_mosaic", counted)
    plan = {"a": "chunk(1)"}
    convert(tmp_path / "a", tmp_path / "b", to=to, world_size=3, plan=plan, max_bytes=4096)
    assert max(sizes) <= 4096 // 4
    assert sum(sizes) == 64 * 64 * 4 + 12
    assert diff(tmp_path / "a", tmp_path / "b").is_same


def test_a_plan_must_fit_the_checkpoint(tmp_path: Path) -> None:
    save({"up.weight": torch.ones(4, 4), "train.bias": torch.ones(3)}, tmp_path / "a")
    plan = ShardingPlan({"*.weight": "chunk(0)"})
    plan.save(tmp_path / "plan.yaml")
    convert(tmp_path / "a", tmp_path / "b", world_size=2, plan=tmp_path / "plan.yaml")
    assert load_index(tmp_path / "b").layout("up.weight").summary == "grid 2x1, ranks 0, 1"
    assert len(load_index(tmp_path / "b").layout("train.bias")) == 1
    wrong_plans: list[tuple[Any, type[Exception], str]] = [
        ({"*.wieght": "chunk(0)"}, PlanNameError, "Nearest: 'up.weight'"),
        ({"up.weight": "chunk(2)"}, ShardingPlanError, "Invalid sharding dim"),
        ({"up.weight": "chunk(0, ranks=[7])"}, ShardingPlanError, "rank 7 does not exist"),
        ({"up.weight": "partial()"}, CheckpointError, "nothing to be reduced"),
        (tmp_path / "absent.yaml", ShardingPlanError, "No such file"),
    ]
    for wrong, kind, message in wrong_plans:
        with pytest.raises(kind, match=message):
            convert(tmp_path / "a", tmp_path / "c", world_size=2, plan=wrong)
    assert not (tmp_path / "c").exists()


def test_nothing_is_left_of_a_conversion_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": torch.ones(4, 4)}, tmp_path / "a")
    save({"b": torch.ones(2)}, tmp_path / "b")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    formats: tuple[Format, ...] = ("safetensors", "dcp")
    for to in formats:
        monkeypatch.setattr("shardwise.checkpoint.converting.read_mosaic", full)
        with pytest.raises(CheckpointError, match="Make room"):
            convert(tmp_path / "a", tmp_path / "b", to=to)
        monkeypatch.undo()
        assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
        assert list(load_index(tmp_path / "b").tensors) == ["b"]
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
    assert sorted(one.name for one in (tmp_path / "b").iterdir()) == [".metadata", "__0_0.distcp"]


class Private:
    """Something that only pickle can keep."""


def test_pickled_objects_are_left_out_if_one_says_so(tmp_path: Path) -> None:
    save_dcp({"a": torch.ones(2), "object": Private()}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"'object': got a pickled object.* strict=False"):
        convert(tmp_path / "dcp", tmp_path / "out")
    convert(tmp_path / "dcp", tmp_path / "out", strict=False)
    assert unflatten(load_index(tmp_path / "out").structure, str) == {"a": "a"}


@pytest.mark.parametrize("max_bytes", [16, 10**6])
def test_tensors_are_renamed_joined_and_left_out_on_the_way(tmp_path: Path, max_bytes: int) -> None:
    layers = {f"model.{n}.{key}": torch.randn(4, 6) for n in range(2) for key in "qkvo"}
    save({**layers, "model.head": torch.ones(3), "list": [torch.ones(1), 2]}, tmp_path / "a")
    rules: dict[str, Any] = {
        "net.*.qkv": fuse("model.*.q", "model.*.k", "model.*.v"),
        "net.*.o": transpose("model.*.o"),
        "tail": "model.head",
        "list.*": None,
    }
    convert(tmp_path / "a", tmp_path / "b", map=rules, world_size=3, max_bytes=max_bytes)
    expected = {"tail": torch.ones(3)}
    for n in range(2):
        q, k, v, o = (layers[f"model.{n}.{key}"] for key in "qkvo")
        expected |= {f"net.{n}.qkv": torch.cat([q, k, v]), f"net.{n}.o": o.t().contiguous()}
    index = load_index(tmp_path / "b")
    assert_same(read_all(index), expected)
    assert unflatten(index.structure, str) == dict(zip(expected, expected, strict=True)) | {
        "list": [None, 2]
    }
    wrong_rules: list[tuple[dict[str, Any], str]] = [
        ({"net.*": "modle.*"}, "fits no saved tensor. Nearest"),
        ({"net.*.qkv": fuse("model.*.q", "model.*.x")}, "no saved tensor 'model.0.x'"),
        ({"net.*.*": "model.*"}, "more \\* than 'model"),
        ({"x": fuse("model.head", "model.0.q")}, "shapes that join"),
    ]
    for wrong, message in wrong_rules:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "a", tmp_path / "c", map=wrong)


def _load_dtensors(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    got = {"model": {"up.weight": zeros(6, 5, device_mesh=mesh, placements=[Shard(1)])}}
    load_dcp(got, checkpoint_id=folder)
    assert torch.equal(got["model"]["up.weight"].full_tensor(), model()["up.weight"])


def test_dcp_loads_a_converted_checkpoint_into_dtensors(tmp_path: Path) -> None:
    save(state(), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "dcp", to="dcp", world_size=3, max_bytes=100)
    run_local(_load_dtensors, 2, str(tmp_path / "dcp"))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (1, 1, 9), (2, 3, 4), (0, 4), (4, 0)])
@pytest.mark.parametrize("max_bytes", [1, 8, 40, 10**6])
def test_blocks_are_runs_in_order_and_fit_the_limit(shape: tuple[int, ...], max_bytes: int) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = Box.whole(shape)
    box = Box(tuple(size // 3 for size in shape), whole.stop)
    blocks = list(blocks_of(box, shape, 8, max_bytes))
    joined = torch.cat([numbers[one.slices()].reshape(-1) for one in blocks])
    assert torch.equal(joined, numbers[box.slices()].reshape(-1))
    assert all(one.volume * 8 <= max(max_bytes, 8) for one in blocks)


# -- verify and diff -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_verify_tells_every_problem(tmp_path: Path, to: Format) -> None:
    tensors = {name: torch.full((64, 4), float(i)) for i, name in enumerate("abc")}
    save(tensors, tmp_path / "saved")
    path = tmp_path / "converted"
    index = convert(tmp_path / "saved", path, to=to, world_size=4)
    sound = verify(path)
    assert sound.is_sound
    assert sound.num_bytes >= index.nbytes
    for name in ("a", "c"):
        piece = index.tensors[name].piece(1)
        flip(index.file_path(piece.file), piece.start + 17)
    assert {problem.tensor for problem in verify(path, jobs=3).problems} == {"a", "c"}
    index.file_path(0).unlink()
    cut = index.file_path(3)
    cut.write_bytes(cut.read_bytes()[:-1])
    found = verify(path)
    assert not found.is_sound
    assert {"a", "b", "c"} >= {p.tensor for p in found.problems if p.tensor} >= {"a"}
    told = "\n".join(map(str, found.problems))
    assert index.files[0].name in told
    assert index.files[3].name in told


def test_verify_tells_where_headers_say_other_than_the_index(tmp_path: Path) -> None:
    save({"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}, tmp_path / "a")
    file = load_index(tmp_path / "a").file_path(0)
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"shape":[4,4]', b'"shape":[2,8]', 1))
    (problem,) = verify(tmp_path / "a").problems
    assert "is not at byte" in problem.message
    file.write_bytes(b"\xff" * 8 + data[8:])
    assert any("a safetensors file" in one.message for one in verify(tmp_path / "a").problems)
    flip(tmp_path / "a" / "shardwise.index.json", 30)
    (problem,) = verify(tmp_path / "a").problems
    assert problem.file == "shardwise.index.json"


def test_verify_checks_what_can_be_checked_of_a_hugging_face_folder(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    assert verify(tmp_path).is_sound
    with (tmp_path / "one.safetensors").open("ab") as file:
        file.write(b"more")
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.message) == (
        "one.safetensors",
        "has 4 bytes behind its tensors",
    )
    for name in ("two", "three"):
        data = (tmp_path / f"{name}.safetensors").read_bytes()
        (tmp_path / f"{name}.safetensors").write_bytes(data[:-5])
    found = verify(tmp_path).problems
    assert [one.file for one in found] == ["three.safetensors", "two.safetensors"]
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        verify(tmp_path / "absent")


def test_diff_tells_what_differs_and_by_how_much(tmp_path: Path) -> None:
    a: dict[str, Any] = {
        "same": torch.tensor([1.0, float("nan")]),
        "changed": torch.arange(100.0).reshape(10, 10),
        "shape": torch.ones(3),
        "dtype": torch.tensor([1.0, 1.0 + 2**-12, float("nan")]),
        "zero": torch.tensor([0.0]),
        "gone": torch.ones(1),
        "large": torch.tensor([2**60, 5]),
        "step": 5,
        "flag": True,
        "list": [1, {"x": 2}],
    }
    b = a | {
        "changed": torch.arange(100.0).reshape(10, 10).index_fill(0, torch.tensor([7]), 0.0),
        "shape": torch.ones(4),
        "dtype": a["dtype"].to(torch.bfloat16),
        "zero": torch.tensor([-0.0]),
        "new": torch.ones(1),
        "large": torch.tensor([2**60, 3]),
        "step": 6,
        "flag": 1,
        "list": [1, {"x": 3}],
    }
    del b["gone"]
    save(a, tmp_path / "a")
    save_dcp(b, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b", max_bytes=64)
    assert (found.only_in_a, found.only_in_b) == (("gone",), ("new",))
    by_name = {one.name: (one.num_different, one.max_abs) for one in found.tensors}
    assert by_name == {
        "changed": (10, 79.0),
        "shape": (None, None),
        "dtype": (1, 2**-12),
        "zero": (1, 0.0),
        "large": (1, 2.0),
    }
    assert found.values == (("step", 5, 6), ("flag", True, 1), ("list.1.x", 2, 3))
    assert found.num_same == 1
    assert diff(tmp_path / "a", tmp_path / "a").is_same
