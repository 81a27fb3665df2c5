"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["NUM_RANKS", "Checkpoint", "Jobs", "Json", "Picture", "WorldSize"]

NUM_RANKS = 4  # if nobody says how many

_MOST_RANKS = 10**6  # each is a placement in memory before anything is drawn or planned

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
# For how many ranks a spec is read; None if nobody says so, and then a spec may name any.
WorldSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST_RANKS,
        show_default=str(NUM_RANKS),
        help="Number of ranks; if given, a spec that names a rank beyond them is refused.",
    ),
]
# Where a drawing is written, beside that of the terminal.
Picture = Annotated[Path | None, typer.Option(help="Write a picture.", metavar="PATH")]
