"""Commands about checkpoints: look into one, convert it, verify it, compare two."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from enum import StrEnum
from itertools import groupby
from pathlib import Path  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import ArgumentValueError
from shardwise.words import dtype_name, plural, shortened

if TYPE_CHECKING:
    import torch

    from shardwise.checkpoint.differing import Diff, TensorDiff
    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.verifying import Verified
    from shardwise.geometry import Layout

__all__ = ["Target", "add_commands", "convert", "diff", "inspect", "saved_layout", "verify"]

_MOST_VALUES = 20  # plain values that `inspect` prints
_MOST_SHOWN = 20  # differences of a kind that `diff` prints
_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
}

_Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint of shardwise, of Hugging Face or of torch.distributed.checkpoint.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print it for a program.")]
_Jobs = Annotated[
    int, typer.Option(min=1, help="How many files are worked on at once, by threads.")
]


class Target(StrEnum):
    """What `convert` writes."""

    safetensors = "safetensors"
    dcp = "dcp"


def add_commands(app: typer.Typer) -> None:
    """Makes the functions of this file commands of `app`."""
    for command in (inspect, convert, verify, diff):
        app.command()(command)


# -- inspect ---------------------------------------------------------------------------------------


def inspect(
    path: _Checkpoint,
    tensor: Annotated[
        str | None, typer.Option(help="Draw who saved which part of this tensor.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Tell what is in a checkpoint. Reads none of its data.

    \b
    Examples:
      shardwise inspect run/step_100
      shardwise inspect run/step_100 --tensor model.layers.0.mlp.up.weight
      shardwise inspect model.safetensors --json
    """
    from shardwise.checkpoint.opening import load_index

    index = load_index(path)
    if tensor is not None and tensor not in index.tensors:
        raise _no_tensor(tensor, index)
    if as_json:
        names = list(index.tensors) if tensor is None else [tensor]
        print(json.dumps(_index_in_json(index, names), indent=2))
    elif tensor is not None:
        _draw(index, tensor)
    else:
        _print_index(index)


def saved_layout(path: Path, name: str) -> tuple[Layout, int, int]:
    """Who saved which part of a tensor, the bytes of an element, the number of ranks."""
    from shardwise.checkpoint.opening import load_index

    index = load_index(path)
    if name not in index.tensors:
        raise _no_tensor(name, index)
    return index.layout(name), index.tensors[name].dtype.itemsize, index.world_size


def _no_tensor(name: str, index: Index) -> ArgumentValueError:
    from shardwise.sharding_plan.problems import nearest

    return ArgumentValueError(
        "--tensor",
        expected=f"a tensor of {str(index.path)!r}",
        got=repr(name),
        fix=nearest(name, list(index.tensors), ""),
    )


def _index_in_json(index: Index, names: list[str]) -> dict[str, Any]:
    from shardwise.checkpoint.structure import without_tensors

    return {
        "path": str(index.path),
        "kind": index.kind,
        "version": index.version,
        "world_size": index.world_size,
        "bytes": index.nbytes,
        "files": [file._asdict() for file in index.files],
        "tensors": {name: _tensor_in_json(index, name) for name in names},
        "values": dict(without_tensors(index.structure)),
        "unreadable": index.unreadable,
    }


def _tensor_in_json(index: Index, name: str) -> dict[str, Any]:
    tensor = index.tensors[name]
    boxes = [
        {
            "start": piece.box.start,
            "stop": piece.box.stop,
            "rank": index.files[piece.file].rank,
            "file": index.files[piece.file].name,
            "byte": piece.start,
        }
        for piece in tensor.pieces()
    ]
    return {
        "shape": tensor.shape,
        "dtype": dtype_name(tensor.dtype),
        "bytes": tensor.nbytes,
        "boxes": boxes,
    }


def _draw(index: Index, name: str) -> None:
    from shardwise.transfer.units import format_bytes
    from shardwise.viz import print_layout

    tensor = index.tensors[name]
    print_layout(
        index.layout(name),
        title=f"{name}: {dtype_name(tensor.dtype)}, {format_bytes(tensor.nbytes)}",
        itemsize=tensor.dtype.itemsize,
        world_size=index.world_size,
    )


def _print_index(index: Index) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardwise.checkpoint.structure import without_tensors
    from shardwise.transfer.units import format_bytes

    console = Console(highlight=False)
    console.print(Text(f"{index.path}: {_kind(index)}"), soft_wrap=True)
    console.print(
        f"{plural(index.world_size, 'rank')}, {plural(len(index.files), 'file')}, "
        f"{plural(len(index.tensors), 'tensor')}, {format_bytes(index.nbytes)}\n"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("tensor", "shape", "dtype", "bytes", "saved as"):
        is_name = heading in ("tensor", "saved as")
        table.add_column(
            heading,
            overflow="fold",
            no_wrap=not is_name,
            justify="right" if heading == "bytes" else "left",
        )
    for name, tensor in index.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "0-d"
        cells = [name, shape, dtype_name(tensor.dtype), format_bytes(tensor.nbytes)]
        table.add_row(*map(Text, cells), Text(index.layout(name).summary))
    console.print(table)
    _print_ranks(index)
    values = list(without_tensors(index.structure))
    if values:
        print(f"\n{plural(len(values), 'plain value')}:")
    for name, value in values[:_MOST_VALUES]:
        print(shortened(f"  {name} = {json.dumps(value)}"))
    if len(values) > _MOST_VALUES:
        print(f"  ... and {len(values) - _MOST_VALUES} more (--json has all)")
    for name, why in index.unreadable.items():
        print(shortened(f"not read: {name}: {why}"))


def _print_ranks(index: Index) -> None:
    """Bytes of each rank, in one line if they are alike."""
    from shardwise.transfer.units import format_bytes

    held = dict.fromkeys(range(index.world_size), 0)
    for tensor in index.tensors.values():
        for piece in tensor.pieces():
            held[index.files[piece.file].rank] += piece.nbytes
    low, high = min(held.values()), max(held.values())
    if low == high:
        print(f"\n{format_bytes(low)} per rank")
    elif len(held) <= _MOST_VALUES:
        print("\n" + "\n".join(f"rank {rank}: {format_bytes(n)}" for rank, n in held.items()))
    else:
        print(f"\n{format_bytes(low)} to {format_bytes(high)} per rank")


def _kind(index: Index) -> str:
    return {
        "shardwise": f"a checkpoint of shardwise, version {index.version}",
        "safetensors": "safetensors",
        "dcp": "a checkpoint of torch.distributed.checkpoint",
    }[index.kind]


# -- convert ---------------------------------------------------------------------------------------


def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint, of any kind.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[Target, typer.Option(help="What to write.")] = Target.safetensors,
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
    as_json: _Json = False,
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
    from shardwise.transfer.units import format_bytes, parse_bytes

    index = converted(
        src,
        dst,
        to=to.value,
        world_size=world_size,
        plan=plan,
        only=only,
        dtype=_parse_dtype(dtype),
        max_bytes=parse_bytes(max_bytes, "--max-bytes"),
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
    import torch

    if text is None:
        return None
    found = getattr(torch, _SHORT_DTYPES.get(text, text.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentValueError(
            "--dtype", expected="a dtype of floating point such as bf16", got=repr(text)[:60]
        )
    return found


# -- verify ----------------------------------------------------------------------------------------


def verify(path: _Checkpoint, jobs: _Jobs = 4, as_json: _Json = False) -> None:
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
        sys.exit(1)


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


# -- diff ------------------------------------------------------------------------------------------


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, of any kind.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    jobs: _Jobs = 2,
    as_json: _Json = False,
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
        sys.exit(1)


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
