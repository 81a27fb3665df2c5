"""`shardwise convert`: a checkpoint for other ranks, in another format or dtype."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Json  # noqa: TC001  # typer reads the annotations
from shardwise.cli.words import find_dtype, parse_cap
from shardwise.errors import ArgumentValueError
from shardwise.words import plural

if TYPE_CHECKING:
    import torch

__all__ = ["Format", "convert"]


class Format(StrEnum):
    """What `convert` writes."""

    safetensors = "safetensors"
    dcp = "dcp"


def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint, of any kind.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[Format, typer.Option(help="What to write.")] = Format.safetensors,
    world_size: Annotated[int, typer.Option(min=1, help="For how many ranks.")] = 1,
    plan: Annotated[
        Path | None,
        typer.Option(help="A .yaml or .json file of a ShardingPlan: specs by names or patterns."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Only what was saved under this key, by names without it: model."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="For tensors of floating point: bf16, float32, ...")
    ] = None,
    max_bytes: Annotated[
        str, typer.Option(help="How much data each job may have in memory: 2GiB, 500MB.")
    ] = "256MiB",
    jobs: Annotated[
        int,
        typer.Option(min=1, help="How many processes write files at once, one a GiB at most."),
    ] = 1,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out pickled objects of DCP.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint anew: for other ranks, in another dtype or format.

    Needs no GPU and does not hold the model. For one rank, without a plan,
    it writes a Hugging Face folder; for more, rows of each tensor for each
    rank, or what the plan says.

    \b
    Examples:
      shardwise convert run/step_100 model_hf --only model --dtype bf16
      shardwise convert model_hf for_8 --world-size 8 --plan plan.yaml
      shardwise convert run/step_100 run_dcp --to dcp --max-bytes 2GiB

    A plan.yaml:

    \b
      plan:
        "*.mlp.up.weight": chunk(0)
        "*.mlp.down.weight": chunk(1)
    """
    from shardwise.checkpoint.converting import convert as converted
    from shardwise.transfer.units import format_bytes

    index = converted(
        src,
        dst,
        to=to.value,
        world_size=world_size,
        plan=plan,
        only=only,
        dtype=_parse_dtype(dtype),
        max_bytes=parse_cap(max_bytes),
        jobs=jobs,
        strict=not skip_unreadable,
    )
    done = {
        "path": str(index.path),
        "kind": index.kind,
        "files": len(index.files),
        "tensors": len(index.tensors),
        "bytes": index.nbytes,
    }
    if as_json:
        print(json.dumps(done))
    else:
        print(
            f"{index.path}: {plural(len(index.tensors), 'tensor')}, {format_bytes(index.nbytes)} "
            f"in {plural(len(index.files), 'file')}"
        )


def _parse_dtype(text: str | None) -> torch.dtype | None:
    if text is None:
        return None
    found = find_dtype(text)
    if found is None or not found.is_floating_point:
        raise ArgumentValueError(
            "--dtype", expected="a dtype of floating point such as bf16", got=repr(text)[:60]
        )
    return found
