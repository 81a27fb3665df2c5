"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Checkpoint", "Jobs", "Json"]

# A checkpoint of any kind that we read.
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint of shardwise, of Hugging Face or of torch.distributed.checkpoint.",
    ),
]
# Whether what is found is printed as JSON.
Json = Annotated[bool, typer.Option("--json", help="Print it for a program.")]
# How many threads read files.
Jobs = Annotated[int, typer.Option(min=1, help="How many files are worked on at once, by threads.")]
