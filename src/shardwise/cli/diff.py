"""`shardwise diff`: whether two checkpoints have the same values."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import Jobs, Json  # noqa: TC001  # typer reads the annotations
from shardwise.words import dtype_name, plural, shortened

if TYPE_CHECKING:
    import torch

    from shardwise.checkpoint.differing import Diff, TensorDiff

__all__ = ["diff"]

_MOST_SHOWN = 20  # differences of a kind that are printed


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, of any kind.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    jobs: Jobs = 2,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints of any layouts and formats; exit 1 if they differ.

    Names, shapes, dtypes, every bit of every tensor, and plain values.

    \b
    Examples:
      shardwise diff run/step_100 run_dcp
      shardwise diff model_hf for_8 --json
    """
    from shardwise.checkpoint.differing import diff as compared

    found = compared(a, b, jobs=jobs)
    if as_json:
        print(json.dumps(_diff_in_json(found), indent=2))
    else:
        _print_diff(found)
    if not found.is_same:
        raise typer.Exit(1)


def _diff_in_json(found: Diff) -> dict[str, Any]:
    def side(head: tuple[tuple[int, ...], torch.dtype]) -> dict[str, Any]:
        return {"shape": head[0], "dtype": dtype_name(head[1])}

    return {
        "same": found.is_same,
        "same_tensors": found.num_same,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "tensors": [one._asdict() | {"a": side(one.a), "b": side(one.b)} for one in found.tensors],
        "values": [
            {"name": one.name}
            | {side: value for side, value in (("a", one.a), ("b", one.b)) if value is not ...}
            for one in found.values
        ],
    }


def _print_diff(found: Diff) -> None:
    lists = [
        [f"only in A: {name}" for name in found.only_in_a],
        [f"only in B: {name}" for name in found.only_in_b],
        [f"differs: {_in_words(one)}" for one in found.tensors],
        [
            shortened(f"value {one.name}: {_value(one.a)} in A, {_value(one.b)} in B")
            for one in found.values
        ],
    ]
    for lines in lists:
        print(*lines[:_MOST_SHOWN], sep="\n", end="\n" if lines else "")
        if len(lines) > _MOST_SHOWN:
            print(f"  ... and {len(lines) - _MOST_SHOWN} more (--json has all)")
    if found.is_same:
        print(f"the same: {plural(found.num_same, 'tensor')}")
    else:
        print(f"different; {plural(found.num_same, 'tensor')} the same")


def _in_words(one: TensorDiff) -> str:
    (shape, dtype), (other_shape, other_dtype) = one.a, one.b
    if shape != other_shape:
        return f"{one.name}: shape {shape} in A, {other_shape} in B"
    values = f"{one.num_different:,} elements, by at most {one.max_abs:.6g}"
    if dtype == other_dtype:
        return f"{one.name}: {values}"
    return f"{one.name}: {dtype_name(dtype)} in A, {dtype_name(other_dtype)} in B; {values}"


def _value(value: Any) -> str:
    return "absent" if value is ... else json.dumps(value)
