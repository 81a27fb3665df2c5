"""`shardwise inspect`, `convert`, `verify` and `diff`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.folders import model, save_dcp
from tests.cli.running import run_command

from shardwise.checkpoint import load_index, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with plain values."""
    save({"model": model(), "step": 5, "groups": [{"lr": 0.1}]}, tmp_path / "saved")
    return tmp_path / "saved"


def test_inspect_tells_what_is_in_checkpoints_of_all_kinds(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(model(), tmp_path / "file.safetensors")
    save_dcp({"model": model(), "step": 5}, tmp_path / "dcp")
    for path, kind in [
        ("saved", "a checkpoint of shardwise, version 1"),
        ("dcp", "a checkpoint of torch.distributed.checkpoint"),
        ("file.safetensors", "safetensors"),
    ]:
        done = run_command("inspect", path)
        assert done.status == 0, done.err
        assert kind in done.out
        assert "1 rank, 1 file, 8 tensors, " in done.out
        assert "up.weight" in done.out
        assert "6x5" in done.out
        assert "bfloat16" in done.out
        assert ("step = 5" in done.out) is (path != "file.safetensors")
        assert max(map(len, done.out.splitlines())) <= 80
        assert "\x1b" not in done.out
    assert load_index("file.safetensors").kind == "safetensors"


def test_inspect_draws_a_tensor_and_prints_json(saved: Path, tmp_path: Path) -> None:
    assert run_command("convert", saved, tmp_path / "cut", "--world-size", "4").status == 0
    done = run_command("inspect", tmp_path / "cut", "--tensor", "model.up.weight")
    assert done.status == 0, done.err
    assert "model.up.weight: float32, 120 B" in done.out
    assert "40 B" in done.out
    told = json.loads(run_command("inspect", tmp_path / "cut", "--json").out)
    assert (told["kind"], told["world_size"], told["values"]) == (
        "shardwise",
        4,
        {"step": 5, "groups.0.lr": 0.1},
    )
    tensor = told["tensors"]["model.up.weight"]
    assert (tensor["shape"], tensor["dtype"], tensor["bytes"]) == ([6, 5], "float32", 120)
    assert [box["rank"] for box in tensor["boxes"]] == [0, 1, 2]
    done = run_command("inspect", tmp_path / "cut", "--tensor", "model.up.wieght")
    assert done.status == 2
    assert "Nearest: 'model.up.weight'" in done.err


def test_convert_diff_and_verify_work_together(saved: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('plan:\n  "model.up.weight": chunk(1)\n')
    words = ["--world-size", "2", "--plan", str(plan), "--max-bytes", "1KiB", "--jobs", "2"]
    done = run_command("convert", saved, tmp_path / "cut", *words)
    assert (done.status, done.err) == (0, "")
    assert "8 tensors, " in done.out
    grid = load_index(tmp_path / "cut").layout("model.up.weight").grid
    assert grid is not None
    assert grid.shape == (1, 2)
    done = run_command("convert", tmp_path / "cut", tmp_path / "dcp", "--to", "dcp", "--json")
    assert json.loads(done.out)["kind"] == "dcp"
    for path in ("cut", "dcp"):
        done = run_command("diff", saved, tmp_path / path)
        assert (done.status, done.out) == (0, "the same: 8 tensors\n")
        assert run_command("verify", tmp_path / path).status == 0
    done = run_command("convert", saved, tmp_path / "half", "--dtype", "bf16")
    done = run_command("diff", saved, tmp_path / "half")
    assert done.status == 1
    assert "differs: model.up.weight: float32 in A, bfloat16 in B; " in done.out
    told = json.loads(run_command("diff", saved, tmp_path / "half", "--json").out)
    assert told["same"] is False
    assert {one["name"] for one in told["tensors"]} == {
        f"model.{name}" for name in ("up.weight", "empty", "small")
    }


def test_convert_takes_the_model_out_of_a_run(tmp_path: Path) -> None:
    state = {"model": {"x": torch.ones(2, 3)}, "x": torch.zeros(2), "step": 5}
    save(state | {"models": {"y": torch.zeros(4)}}, tmp_path / "run")
    done = run_command("convert", tmp_path / "run", tmp_path / "hf", "--only", "model")
    assert done.status == 0, done.err
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["x"], torch.ones(2, 3))
    told = json.loads(run_command("inspect", tmp_path / "hf", "--json").out)
    assert (list(told["tensors"]), told["values"]) == (["x"], {})


def test_a_damaged_checkpoint_is_status_1(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    monkeypatch.setenv("COLUMNS", "80")
    assert "sound" in run_command("verify", saved).out
    index = load_index(saved)
    piece = index.tensors["model.wave"].piece(0)
    file = index.file_path(piece.file)
    data = bytearray(file.read_bytes())
    data[piece.start] ^= 4
    file.write_bytes(data)
    done = run_command("verify", saved.name)
    assert done.status == 1
    assert "  'model.wave': box [0:6, 0:5] of 'model.wave' in file" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    told = json.loads(run_command("verify", saved, "--json").out)
    assert (told["sound"], [one["tensor"] for one in told["problems"]]) == (False, ["model.wave"])
    file.write_bytes(data[:-1])
    done = run_command("convert", saved, saved.parent / "out")
    assert done.status == 1
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "{}/absent"], "no checkpoint at"),
        (["verify", "{}/absent"], "no checkpoint at"),
        (["diff", "{}/saved", "{}/absent"], "no checkpoint at"),
        (["convert", "{}/saved", "{}/out", "--max-bytes", "much"], "--max-bytes: expected a size"),
        (["convert", "{}/saved", "{}/out", "--max-bytes", "0"], "--max-bytes: expected a whole"),
        (["convert", "{}/saved", "{}/out", "--dtype", "int8"], "--dtype: expected"),
        (["convert", "{}/saved", "{}/a/b/c"], "Make it first"),
        (["convert", "{}/saved", "{}/saved"], "dst of convert: expected another path"),
        (
            ["convert", "{}/saved", "{}/out", "--only", "mdl"],
            "key of the state: model, got 'mdl'",
        ),
        (["convert", "{}/saved", "{}/out", "--plan", "{}/no.yaml"], "No such file"),
    ],
)
def test_a_wrong_call_gets_one_line_and_status_2(
    saved: Path, words: list[str], message: str
) -> None:
    done = run_command(*(word.format(saved.parent) for word in words))
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err


def test_the_help_of_each_command_has_examples() -> None:
    for command in ("inspect", "convert", "verify", "diff"):
        done = run_command(command, "--help")
        assert done.status == 0
        assert sum(f"shardwise {command} " in line for line in done.out.splitlines()) >= 3
        assert max(map(len, done.out.splitlines())) <= 80


def test_more_than_fits_is_counted(tmp_path: Path) -> None:
    one = {f"t{n}": torch.full((2,), float(n)) for n in range(30)}
    other = {name: value + 1 for name, value in one.items()}
    save(one | {"n": list(range(30))}, tmp_path / "a")
    save(other, tmp_path / "b")
    assert "... and 10 more (--json has all)" in run_command("inspect", tmp_path / "a").out
    done = run_command("diff", tmp_path / "a", tmp_path / "b")
    assert done.out.count("more (--json has all)") == 2
    assert "value n.0: 0 in A, absent in B" in done.out
