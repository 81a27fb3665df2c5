"""`shardwise reshard-plan`: what it takes to get a tensor from one spec to another."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import NUM_RANKS, Json, Picture, WorldSize
from shardwise.cli.words import (
    itemsize_of,
    layout_of,
    naming,
    parse_cap,
    parse_shape,
    write_pictures,
)
from shardwise.errors import ArgumentValueError
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from shardwise.transfer import TransferPlan

__all__ = ["reshard_plan"]

_MOST_MOVES = 1 << 24  # about eight gigabytes while they are counted
_MOST_LINES = 16  # of the table by rank


def reshard_plan(
    shape: Annotated[str, typer.Option(help="The tensor's sizes, e.g. 8192,8192.")],
    source: Annotated[
        str, typer.Option("--from", help="How it is cut before, e.g. chunk(0); as in show.")
    ],
    target: Annotated[str, typer.Option("--to", help="How it is to be cut.")],
    world_size: WorldSize = None,
    dtype: Annotated[str, typer.Option(help="For the bytes.")] = "float32",
    max_bytes: Annotated[
        str | None, typer.Option(help="Cap of the staging on every rank, e.g. 64MiB.")
    ] = None,
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to look at: click a rank.", metavar="PATH")
    ] = None,
    png: Picture = None,
    svg: Picture = None,
) -> None:
    """What moves from one spec to another: bytes, peaks, messages, a drawing.

    Nothing is moved and no rank is needed: a plan is made of the two specs alone.
    Without --world-size, specs that name no ranks are for ranks 0-3, others may
    name any.

    \b
    Examples:
      shardwise reshard-plan --shape 8192,8192 --from "chunk(0)" --to "chunk(1)"
      shardwise reshard-plan --shape 8192,8192 --from "chunk(0)" \\
        --to "grid([2, 2])" --max-bytes 8MiB
      shardwise reshard-plan --shape 4096,512 --from "partial()" \\
        --to "chunk(0)" --dtype bfloat16
      shardwise reshard-plan --shape 1024,64 --from "chunk(0)" \\
        --to "on_rank(0)" --world-size 1024 --html plan.html
    """
    itemsize, sizes = itemsize_of(dtype), parse_shape(shape)
    cap = None if max_bytes is None else parse_cap(max_bytes)
    specs = {"--from": source, "--to": target}
    plan = _plan(specs, sizes, world_size=world_size, itemsize=itemsize)
    if cap is not None:
        with naming("--max-bytes", "max_bytes"):
            plan.schedule(cap)  # which the plan keeps; here it is known which option is too small
    if world_size is None:
        _tell_of_other_ranks(plan)
    paths = {".html": html, ".png": png, ".svg": svg}
    write_pictures(plan, paths, title=f"{source} -> {target}", max_bytes=cap)
    if as_json:
        print(json.dumps(_numbers(plan, cap), indent=2))
        return
    from shardwise.viz import print_plan

    print(plan.explain(max_lines=_MOST_LINES, max_bytes=cap))
    print_plan(plan, max_bytes=cap, words=False)


def _tell_of_other_ranks(plan: TransferPlan) -> None:
    """Says that a spec names more ranks than there are for those that name none."""
    if beyond := [rank for rank in plan.ranks if rank >= NUM_RANKS]:
        # Not on stdout, which is for the drawing or for JSON.
        print(
            f"{ranks_text(beyond)}: beyond 0-{NUM_RANKS - 1}, for which specs are that name no "
            "ranks. Pass --world-size to say how many there are.",
            file=sys.stderr,
        )


def _plan(
    specs: dict[str, str], shape: tuple[int, ...], *, world_size: int | None, itemsize: int
) -> TransferPlan:
    """The plan from the first of two specs, by the option that each was given with."""
    from shardwise.transfer import TransferPlan
    from shardwise.transfer.counting import most_moves

    before, after = (
        layout_of(spec, shape, option=option, world_size=world_size)
        for option, spec in specs.items()
    )
    plan = TransferPlan(before, after, itemsize)
    if (most := most_moves(plan, _MOST_MOVES)) > _MOST_MOVES:
        raise ArgumentValueError(
            "moves of the plan",
            expected=f"at most {_MOST_MOVES:,}",
            got=f"{most:,} or more",
            fix="Take fewer ranks, or specs with fewer boxes.",
        )
    return plan


def _numbers(plan: TransferPlan, max_bytes: int | None) -> dict[str, Any]:
    """What a program wants to know; lists are by rank."""
    traffic, schedule = plan.traffic, plan.schedule(max_bytes)
    columns = ("sent", "received", "kept", "num_peers")
    return {
        "shape": plan.source.shape,
        "itemsize": plan.itemsize,
        "total_bytes": plan.total_bytes,
        "lower_bound": plan.lower_bound,
        "kept_bytes": int(traffic.kept.sum()),
        "num_messages": plan.num_messages,
        "max_bytes": max_bytes,
        "num_rounds": len(schedule.rounds),
        "ranks": [
            {
                "rank": rank,
                **{name: int(getattr(traffic, name)[slot]) for name in columns},
                "peak_bytes": plan.peak_bytes(rank, max_bytes),
            }
            for slot, rank in enumerate(plan.ranks)
        ],
    }
