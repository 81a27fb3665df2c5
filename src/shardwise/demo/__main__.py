"""`python -m shardwise.demo`, or under torchrun: `torchrun -m shardwise.demo`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from shardwise.demo.story import run

__all__ = ["main"]


def main() -> None:
    """The demo, by the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.demo",
        description="Shards, trains, reshards, saves, resumes and converts a small GPT. Starts its "
        "own ranks; under torchrun (torchrun --nproc-per-node 4 -m shardwise.demo) it uses those, "
        "also on several hosts, if --folder is one that all of them see.",
    )
    parser.add_argument("--folder", type=Path, help="for the checkpoint (a temporary one)")
    parser.add_argument("--steps", type=int, default=40, help="of training (40)")
    parser.add_argument("--ranks", type=int, default=4, help="local ranks, without torchrun (4)")
    found = parser.parse_args()
    folder = found.folder or Path(tempfile.gettempdir()) / "shardwise-demo"
    folder.mkdir(parents=True, exist_ok=True)
    run(folder, found.steps, found.ranks)


if __name__ == "__main__":
    main()
