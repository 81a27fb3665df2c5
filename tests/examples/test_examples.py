"""The examples run, and what they print is what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.train_gpt import parse_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *options: str, num_ranks: int | None = None) -> str:
    """What the script prints on so many ranks of torchrun, or on none."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks else []), str(EXAMPLES / script), *options]
    environ = os.environ | {"TERM": "dumb"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed: str) -> list[tuple[float, float]]:
    """The pairs of losses, sharded and on one process."""
    found = re.findall(r"^ +\d+ +(\d+\.\d{6}) +(\d+\.\d{6})", printed, re.MULTILINE)
    return [(float(one), float(other)) for one, other in found]


@pytest.mark.long
def test_the_gpt_has_the_losses_of_one_process_under_both_plans() -> None:
    printed = run("train_gpt.py", "--steps=4", "--dtype=float64", "--sample=5", num_ranks=4)
    assert "fused(0, [128, 128, 128])" in printed  # the table of the plan
    assert "now the plan is grid" in printed
    pairs = losses(printed)
    assert len(pairs) == 4
    assert all(one == other for one, other in pairs)
    assert pairs[-1][0] < pairs[0][0]
    assert "What it writes" in printed


@pytest.mark.long
def test_the_gpt_runs_on_one_process() -> None:
    options = ("--steps=2", "--sample=1", "--plan=uneven", "--then=one-rank", "--dtype=bfloat16")
    pairs = losses(run("train_gpt.py", *options))
    assert len(pairs) == 2
    assert all(abs(one - other) < 1e-2 for one, other in pairs)


def test_the_help_of_the_gpt_tells_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    assert "Everything on the last rank" in capsys.readouterr().out


@pytest.mark.long
def test_the_recommender_goes_on_while_a_table_moves() -> None:
    printed = run("train_recommender.py", "--steps=8", num_ranks=4)
    assert "from rank 2 to rank 3" in printed
    pairs = losses(printed)
    assert len(pairs) == 8
    assert all(abs(one - other) < 2e-6 for one, other in pairs)
