"""`shardwise show`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from tests.cli.running import run_command

import shardwise

if TYPE_CHECKING:
    from pathlib import Path


def test_show_draws_a_layout_in_80_plain_columns() -> None:
    done = run_command("show", "--shape", "8,6", "--spec", "chunk(0)", "--world-size", "4")
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    for rank in range(4):
        assert f" {rank} " in done.out
    assert "48 B" in done.out


def test_show_prints_entries_for_programs() -> None:
    done = run_command(
        "show", "--shape", "4,2", "--spec", "partial('max')", "--world-size", "2", "--json"
    )
    assert json.loads(done.out) == {
        "shape": [4, 2],
        "pending": "max",
        "bytes_per_rank": {"0": 32, "1": 32},
        "entries": [
            {"start": [0, 0], "stop": [4, 2], "rank": rank, "term": rank} for rank in range(2)
        ],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "8,x", "--spec", "chunk(0)"], "--shape: expected sizes such as 8,6"),
        (["--shape", "1 000,6", "--spec", "chunk(0)"], "got '1 000,6'"),
        (["--shape", "(8,6", "--spec", "chunk(0)"], "got '(8,6'"),
        (["--shape", "9" * 5000, "--spec", "chunk(0)"], "--shape: expected sizes such as 8,6"),
        (["--shape", f"{10**12}", "--spec", "block_cyclic(0, 1)"], "at most 10,000,000 blocks"),
        (["--shape", "8", "--spec", "chunk(" + "-" * 10**5 + "1)"], "spec"),
        (["--shape", "8", "--spec", f"on_rank({2**63})"], "shardwise: "),
        (["--shape", "8", "--spec", "chunk(1)"], "--spec: ChunkShardingSpec: Invalid sharding"),
        (
            ["--shape", "8", "--spec", "on_rank(4)", "--world-size", "4"],
            "--spec: expected ranks below 4, which is --world-size, got rank 4",
        ),
        (["--shape", "8", "--spec", "chonk(0)"], "--spec: expected one of block_cyclic, chunk"),
        (["--shape", "8", "--spec", "chunk(0)", "--dtype", "int999"], "--dtype: expected"),
    ],
)
def test_a_wrong_argument_gets_one_line(words: list[str], message: str) -> None:
    done = run_command("show", *words)
    assert done.status == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert message in done.err
    assert len(done.err) < 400


@pytest.mark.parametrize("shape", ["8,6", "8x6", "8, 6", "(8,6)", "[8, 6]", " 8 , 6 ", "8,6,"])
def test_shapes_are_written_in_many_ways(shape: str) -> None:
    done = run_command("show", "--shape", shape, "--spec", "on_rank(0)", "--dtype", "torch.float32")
    assert done.status == 0, done.err
    assert "Layout((8, 6): " in done.out


@pytest.mark.parametrize("shape", ["", "()"])
def test_a_shape_without_sizes_is_0d(shape: str) -> None:
    assert "Layout((): " in run_command("show", "--shape", shape, "--spec", "on_rank(0)").out


@pytest.mark.parametrize("rank", [99, 10**9, 2**63 - 1])
def test_the_only_holder_is_shown_however_far_it_is(rank: int) -> None:
    done = run_command("show", "--shape", "8,6", "--spec", f"on_rank({rank})")
    assert done.status == 0, done.err
    assert re.search(rf" {rank} +1 +48 +192 B$", done.out, re.MULTILINE)
    assert "ranks 0-3 hold nothing" in done.out


def test_help_teaches_by_example() -> None:
    done = run_command("show", "--help")
    examples = [line.strip() for line in done.out.splitlines() if "--spec " in line]
    assert 'shardwise show --shape 8,6 --spec "chunk(0)"' in examples  # alone on its line
    assert run_command("--version").out.startswith("shardwise 0.")


def test_a_tensor_of_a_checkpoint_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shardwise.checkpoint.save({"weight": torch.ones(4, 6)}, path)
    done = run_command("show", "--checkpoint", path, "--tensor", "weight")
    assert done.status == 0
    assert "Layout((4, 6): whole, rank 0)" in done.out
    wrong = run_command("show", "--checkpoint", path, "--tensor", "wieght")
    assert wrong.status == 2
    assert "weight" in wrong.err


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ([], "neither"),
        (["--shape", "8,6"], "--shape"),
        (["--shape", "8,6", "--tensor", "w"], "--shape and --tensor"),
    ],
)
def test_a_half_choice_gets_one_line(words: list[str], got: str) -> None:
    done = run_command("show", *words)
    assert done.status == 2
    assert done.err.splitlines() == [
        f"shardwise: show: expected --shape and --spec, or --checkpoint and --tensor, "
        f"got {got}. Examples: shardwise show --help"
    ]
