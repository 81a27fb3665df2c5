"""`shardwise inspect`: what is in a checkpoint, without its data."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import Checkpoint, Json  # noqa: TC001  # typer reads the annotations
from shardwise.errors import ArgumentValueError
from shardwise.words import dtype_name, plural, shortened

if TYPE_CHECKING:
    from shardwise.checkpoint.index import Index
    from shardwise.geometry import Layout

__all__ = ["inspect", "saved_layout"]

_MOST_VALUES = 20  # plain values that are printed


def inspect(
    path: Checkpoint,
    tensor: Annotated[
        str | None, typer.Option(help="Draw who saved which part of this tensor.")
    ] = None,
    as_json: Json = False,
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
    if tensor is not None:
        _check_has(index, tensor)
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
    _check_has(index, name)
    return index.layout(name), index.tensors[name].dtype.itemsize, index.world_size


def _check_has(index: Index, name: str) -> None:
    if name not in index.tensors:
        from shardwise.sharding_plan.problems import nearest

        raise ArgumentValueError(
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
