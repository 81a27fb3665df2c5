"""`shardwise verify`: whether a checkpoint is sound."""

from __future__ import annotations

import json
import shutil
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from shardwise.cli.options import Checkpoint, Jobs, Json  # noqa: TC001  # typer reads the annotations
from shardwise.words import plural

if TYPE_CHECKING:
    from shardwise.checkpoint.verifying import Verified

__all__ = ["verify"]


def verify(path: Checkpoint, jobs: Jobs = 4, as_json: Json = False) -> None:
    """Check sizes, headers and checksums of a checkpoint; exit 1 if something is wrong.

    \b
    Examples:
      shardwise verify run/step_100
      shardwise verify run/step_100 --json || echo damaged
    """
    from shardwise.checkpoint.verifying import verify as verified

    found = verified(path, jobs=jobs)
    if as_json:
        print(json.dumps(_verified_in_json(found), indent=2))
    else:
        _print_verified(found)
    if not found.is_sound:
        raise typer.Exit(1)


def _verified_in_json(found: Verified) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "kind": found.kind,
        "sound": found.is_sound,
        "files": found.num_files,
        "tensors": found.num_tensors,
        "checked_bytes": found.num_bytes,
        "problems": [problem._asdict() for problem in found.problems],
    }


def _print_verified(found: Verified) -> None:
    from shardwise.transfer.units import format_bytes

    width = shutil.get_terminal_size().columns
    for file, problems in groupby(found.problems, key=lambda one: one.file):
        print(f"{file or found.path}:")
        for _, tensor, message in problems:
            line = f"{tensor!r}: {message}" if tensor else message
            print(
                textwrap.fill(
                    line,
                    width,
                    initial_indent="  ",
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
    if found.problems:
        print(f"{found.path}: {plural(len(found.problems), 'problem')}")
        return
    told = f"{plural(found.num_files, 'file')}, {plural(found.num_tensors, 'tensor')}"
    checked = f"checksums of {format_bytes(found.num_bytes)} fit"
    if found.kind == "safetensors":
        checked = "headers and sizes fit; there are no checksums in such files"
    print(f"{found.path}: sound. {told}, {checked}")
