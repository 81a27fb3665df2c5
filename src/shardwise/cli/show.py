"""`shardwise show`: who holds which part of a tensor."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.inspect import saved_layout
from shardwise.cli.options import NUM_RANKS, Picture, WorldSize
from shardwise.cli.words import itemsize_of, layout_of, parse_shape, write_pictures
from shardwise.errors import ArgumentValueError

if TYPE_CHECKING:
    from shardwise.geometry import Layout

__all__ = ["show"]


def show(
    shape: Annotated[
        str | None, typer.Option(help="The tensor's sizes, e.g. 8,6; '' for a 0-d tensor.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            help="How to cut it: chunk(dim), grid(splits), fused(dim, sections), "
            "block_cyclic(dim, block), flat(), replicate(), partial(), on_rank(rank)."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Instead of both: a checkpoint ...", metavar="PATH")
    ] = None,
    tensor: Annotated[str | None, typer.Option(help="... and the name of a tensor in it.")] = None,
    world_size: WorldSize = None,
    dtype: Annotated[str, typer.Option(help="For the bytes per rank.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print entries for a program.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to look at: all slices.", metavar="PATH")
    ] = None,
    png: Picture = None,
    svg: Picture = None,
) -> None:
    """Draw who holds which part of a tensor.

    \b
    Examples:
      shardwise show --shape 8,6 --spec "chunk(0)"
      shardwise show --shape 8,6 --spec "chunk(0, sizes=[1, 2, 0, 5])"
      shardwise show --shape 8,6 --spec "grid([2, 2])" --dtype bfloat16
      shardwise show --shape 8,6 --spec "grid([2, 1], ranks=[[0, 1], [2, 3]])"
      shardwise show --shape 12,4 --spec "fused(0, [6, 3, 3])" --world-size 3
      shardwise show --shape 2,4,6 --spec "flat()" --world-size 3
      shardwise show --shape 2,4,6 --spec "flat()" --html flat.html
      shardwise show --checkpoint run/step_100 --tensor model.norm.weight
    """
    title = _checked_choice({"--shape": shape, "--spec": spec}, checkpoint, tensor)
    if checkpoint is not None and tensor is not None:
        layout, itemsize, world_size = saved_layout(checkpoint, tensor)
    else:
        itemsize, sizes = itemsize_of(dtype), parse_shape(shape or "")
        layout = layout_of(spec or "", sizes, option="--spec", world_size=world_size)
        world_size = world_size or NUM_RANKS
    paths = {".html": html, ".png": png, ".svg": svg}
    write_pictures(layout, paths, title=title, itemsize=itemsize, world_size=world_size)
    if as_json:
        print(json.dumps(_entries(layout, itemsize), indent=2))
        return
    from shardwise.viz import print_layout

    print_layout(layout, title=title, itemsize=itemsize, world_size=world_size)


def _checked_choice(
    drawn: dict[str, str | None], checkpoint: Path | None, tensor: str | None
) -> str:
    """What is to be drawn, in words; raises unless it is a spec of a shape or a saved tensor."""
    saved = {"--checkpoint": checkpoint, "--tensor": tensor}
    given = [name for name, value in {**drawn, **saved}.items() if value is not None]
    if given not in (list(drawn), list(saved)):
        raise ArgumentValueError(
            "show",
            expected="--shape and --spec, or --checkpoint and --tensor",
            got=" and ".join(given) or "neither",
            fix="Examples: shardwise show --help",
        )
    return str(tensor if tensor is not None else drawn["--spec"])


def _entries(layout: Layout, itemsize: int) -> dict[str, object]:
    return {
        "shape": layout.shape,
        "pending": layout.pending,
        "bytes_per_rank": layout.bytes_per_rank(itemsize),
        "entries": [
            {"start": box.start, "stop": box.stop, "rank": rank, "term": term}
            for box, rank, term in layout
        ],
    }
