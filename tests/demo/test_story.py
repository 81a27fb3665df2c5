"""The demo shows what it says, on local ranks and under torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def told(words: list[str]) -> str:
    """What python prints with these words."""
    environ = os.environ | {"TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_story(printed: str) -> None:
    """All acts were there, and the losses are those of one process."""
    pairs = re.findall(r"^ +\d+ +(\d+\.\d{6}) +(\d+\.\d{6})", printed, re.MULTILINE)
    assert len(pairs) >= 5
    assert all(abs(float(one) - float(other)) < 1e-4 for one, other in pairs)
    found = re.search(
        r"moved ([\d,]+) bytes between ranks;\nthe fewest possible are ([\d,]+)", printed
    )
    assert found is not None
    assert found[1] == found[2] != "0"
    assert "- Converted to a Hugging Face folder" in printed


def test_without_torchrun(tmp_path: Path) -> None:
    printed = told(["-m", "shardwise.demo", "--steps=4", f"--folder={tmp_path}"])
    check_story(printed)
    assert "on 2 ranks, under a plan of uneven parts" in printed
    assert (tmp_path / "huggingface" / "model.safetensors").exists()


@pytest.mark.long
def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    check_story(told([*launcher, "-m", "shardwise.demo", "--steps=4", f"--folder={tmp_path}"]))


@pytest.mark.long
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    """Two launchers that share a folder, each with two of the four ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=demo"]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *meeting]
    words = [*launcher, "-m", "shardwise.demo", "--steps=4", f"--folder={tmp_path}"]
    with ThreadPoolExecutor(2) as hosts:
        printed = list(hosts.map(told, [words] * 2))
    (story,) = filter(None, printed)  # of the host that has rank 0
    check_story(story)
