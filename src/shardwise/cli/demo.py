"""`shardwise demo`: what this library does, in a minute."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="For the checkpoint; a temporary one by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of training.")] = 40,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Local processes.")] = 4,
) -> None:
    """Shard, train, reshard, save, resume and convert a small GPT on local processes.

    \b
    Examples:
      shardwise demo
      shardwise demo --steps 100 --ranks 3 --folder /tmp/demo
      torchrun --nproc-per-node 4 -m shardwise.demo
    """
    import tempfile
    from pathlib import Path

    from shardwise.demo.story import run

    chosen = folder or Path(tempfile.mkdtemp(prefix="shardwise-demo-"))
    chosen.mkdir(parents=True, exist_ok=True)
    run(chosen, steps, ranks)
