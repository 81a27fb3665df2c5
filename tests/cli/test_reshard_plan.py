"""`shardwise reshard-plan`, and pictures that commands write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.cli.running import run_command

import shardwise

if TYPE_CHECKING:
    from pathlib import Path


SQUARE = ("--shape", "8,8", "--from", "chunk(0)", "--to", "grid([2, 2])")


def test_a_plan_is_told_and_drawn_in_80_plain_columns() -> None:
    done = run_command("reshard-plan", *SQUARE, "--max-bytes", "16")
    assert (done.status, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    for words in (
        "128 B = lower bound",
        "4 messages, at most 32 B",
        "with at most 16 B of staging",
        "from\\to",
        "before",
    ):
        assert words in done.out
    assert done.out.count("Layout((8, 8): grid 4x1") == 1, "the layouts are named once"


def test_numbers_for_programs_are_those_of_the_plan() -> None:
    found = json.loads(run_command("reshard-plan", *SQUARE, "--dtype", "int8", "--json").out)
    rows, grid = (
        shardwise.parse_spec(text, ranks=range(4), device="cpu").layout((8, 8))
        for text in ("chunk(0)", "grid([2, 2])")
    )
    plan = shardwise.plan_reshard(rows, grid, 1)
    assert found["total_bytes"] == found["lower_bound"] == plan.total_bytes == 32
    assert (found["num_messages"], found["num_rounds"], found["kept_bytes"]) == (4, 1, 32)
    assert found["ranks"][3] == {
        "rank": 3,
        "sent": plan.bytes_sent(3),
        "received": plan.bytes_received(3),
        "kept": 8,
        "num_peers": 1,
        "peak_bytes": plan.peak_bytes(3),
    }


def test_messages_of_both_steps_are_counted() -> None:
    words = ("--shape", "512,512", "--from", "partial()", "--to", "replicate()")
    assert json.loads(run_command("reshard-plan", *words, "--json").out)["num_messages"] == 24
    assert "24 messages between 12 pairs of ranks" in run_command("reshard-plan", *words).out


def test_a_thousand_ranks_fit_80_columns() -> None:
    words = ("--shape", "1000,8", "--from", "chunk(0)", "--to", "on_rank(0)")
    done = run_command("reshard-plan", *words, "--world-size", "1000")
    assert max(map(len, done.out.splitlines())) <= 80
    assert len(done.out.splitlines()) < 80
    assert "999 messages, at most 32 B" in done.out


@pytest.mark.parametrize(
    "words", [("reshard-plan", *SQUARE), ("show", "--shape", "8,8", "--spec", "chunk(0)")]
)
def test_pictures_are_written_beside_the_drawing(words: tuple[str, ...], tmp_path: Path) -> None:
    page, svg = tmp_path / "a.html", tmp_path / "a.svg"
    done = run_command(*words, "--html", str(page), "--svg", str(svg), "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["shape"] == [8, 8]
    assert [line.split(" (")[0] for line in done.err.splitlines()] == [
        f"wrote {page}",
        f"wrote {svg}",
    ]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert svg.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-bytes", "8Q"], "--max-bytes: expected a size such as 2GiB or 500MB"),
        (["--max-bytes", "0"], "--max-bytes: expected a whole number >= 1, got 0"),
        (["--max-bytes", "1"], "--max-bytes: expected at least 4, which hold one element of"),
        (["--to", "chunk(2)"], "--to: ChunkShardingSpec: Invalid sharding dim"),
        (["--from", "chunk"], "--from: expected a call with plain values, got 'chunk'"),
        (
            ["--world-size", "4", "--to", "chunk(0, ranks=[1, 4, 9])"],
            "--to: expected ranks below 4, which is --world-size, got ranks 4, 9. Pass a larger",
        ),
        (["--html", "plan.svg"], "--html: expected a path that ends in .html, got 'plan.svg'"),
        (
            ["--svg", "/nowhere/a.svg"],
            "--svg: /nowhere/a.svg: No such file or directory; make the folder '/nowhere' first",
        ),
        (["--world-size", "4200", "--shape", "4200,4200", "--to", "chunk(1)"], "at most"),
    ],
)
def test_a_wrong_argument_gets_one_line(words: list[str], message: str) -> None:
    done = run_command("reshard-plan", *SQUARE, *words)  # the last of two wins
    assert (done.status, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert message in done.err


def test_ranks_beyond_those_of_other_specs_are_told_of_where_nobody_said_how_many() -> None:
    words = ("reshard-plan", "--shape", "8,8", "--from", "chunk(0)", "--to", "on_rank(9)", "--json")
    done = run_command(*words)
    assert [one["rank"] for one in json.loads(done.out)["ranks"]] == [0, 1, 2, 3, 9]
    assert done.err == (
        "rank 9: beyond 0-3, for which specs are that name no ranks. "
        "Pass --world-size to say how many there are.\n"
    )
    done = run_command(*words, "--world-size", "10")
    assert (done.status, done.err) == (0, "")
    assert len(json.loads(done.out)["ranks"]) == 10


def test_help_teaches_by_example() -> None:
    out = run_command("reshard-plan", "--help").out
    assert 'shardwise reshard-plan --shape 8192,8192 --from "chunk(0)" --to "chunk(1)"' in out
    assert max(map(len, out.splitlines())) <= 80
