"""`convert`: a checkpoint in another layout, dtype or format, without holding it in memory."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from shardwise.arguments import whole_number
from shardwise.checkpoint.blocks import blocks_of, read_mosaic
from shardwise.checkpoint.committing import Aside, Destination
from shardwise.checkpoint.dcp_writing import (
    DcpFile,
    WrittenBox,
    dcp_file_name,
    leaves_of,
    write_dcp_metadata,
)
from shardwise.checkpoint.dtypes import is_count
from shardwise.checkpoint.finishing import commit, commit_index, told_by_system
from shardwise.checkpoint.headers import header_of
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.jobs import in_processes
from shardwise.checkpoint.laying_out import as_plan, layouts_of, whole_in_files
from shardwise.checkpoint.mapping import sources_of, targets_of
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.placing import Wanted, place
from shardwise.checkpoint.reporting import index_of, report_of
from shardwise.checkpoint.structure import with_tensors
from shardwise.checkpoint.writing import FileWriter
from shardwise.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from shardwise.sharded_tensor.progress import bytes_bar

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardwise.checkpoint.mapping import Source
    from shardwise.checkpoint.mosaics import Mosaic
    from shardwise.checkpoint.placing import PlacedPiece, Placing
    from shardwise.geometry import Box
    from shardwise.geometry.box import Ints
    from shardwise.sharding_plan.api import ShardingPlan

__all__ = ["Format", "convert"]

Written = TypeVar("Written")
Format = Literal["safetensors", "dcp"]  # what a checkpoint can be converted to
_MOST_BYTES = 1 << 28
_LARGEST_BLOCK = 1 << 26  # bytes: more at once is no faster
_COPIES = 4  # of a block at once: pages of the file, what is read, what is cast, what is written
_WORTH_A_JOB = 1 << 30  # bytes to write: to start a process takes as long, mostly for torch
_HUGGING_FACE_FILE = 5 * 10**9  # bytes of a file of a folder, as transformers splits it


def convert(
    src: str | os.PathLike[str] | Index,
    dst: str | os.PathLike[str],
    *,
    to: Format = "safetensors",
    world_size: int = 1,
    plan: ShardingPlan | Mapping[str, str] | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_bytes: int = _MOST_BYTES,
    jobs: int = 1,
    strict: bool = True,
    only: str | None = None,
    map: Mapping[str, str | Source | None] | None = None,
    progress: bool | None = None,
) -> Index:
    """Writes a checkpoint anew as `world_size` ranks would save it; on the CPU.

    `plan` says how tensors are cut: specs by names, which may be patterns, or the file of a
    `ShardingPlan`; what it does not name is kept whole. Without a plan tensors are cut into rows;
    for one rank the result is a Hugging Face folder. `dtype` is for tensors of floating point,
    others and an optimizer's counts of steps keep theirs. `only="model"` takes what was saved under
    that key of the state, by names without it, and nothing else. `map` renames and joins tensors as
    that of `load` does, from new names to saved ones: `{"net.*": "model.*"}`, `{"*.qkv":
    fuse("*.q", "*.k", "*.v")}`, and None for those to be left out. What cannot be read of a DCP
    checkpoint, pickled objects, is an error, or left out with `strict=False`. Nothing is at `dst`
    before all of it is.

    Up to `jobs` processes write a file each at a time, as many as there are GiB to write: a process
    takes time to start. About `max_bytes` of data are in the memory of each, however large the
    checkpoint is. The files are the same for any number of jobs.
    """
    call = _Call.checked(to, world_size, dtype, max_bytes, jobs)
    index = src if isinstance(src, Index) else load_index(src)
    if index.unreadable and strict:
        name, why = next(iter(index.unreadable.items()))
        raise CheckpointError(
            f"{len(index.unreadable)} values of {str(index.path)!r}, such as {name!r}",
            got=why,
            fix="Pass strict=False (--skip-unreadable) to leave them out.",
        )
    destination = Destination.at(dst)
    _check_not_itself(index, destination)
    if only is not None:
        map = _only_under(only, index, map)
        index = replace(index, structure={})  # without plain values
    work = _planned(index, call, None if plan is None else as_plan(plan), map)
    destination.check()
    destination.check_nobody_saves()
    aside = Aside(destination, secrets.token_hex(8))
    try:
        aside.make()
        with bytes_bar("convert", work.num_bytes, show=progress) as advance:
            if call.to == "dcp":
                _write_dcp(work, aside, advance)
            else:
                _write_safetensors(work, aside, advance)
    except OSError as error:
        raise told_by_system(error, f"convert to {str(destination.path)!r}") from error
    finally:
        aside.remove()  # also of what it has replaced
    destination.remove_remains()
    return load_index(destination.path)


def _check_not_itself(index: Index, destination: Destination) -> None:
    if destination.path.resolve() == index.path.resolve():
        raise ArgumentValueError(
            "dst of convert",
            expected="another path than that of the checkpoint, which would be gone",
            got=str(destination.path),
        )


def _only_under(key: str, index: Index, rules: object) -> dict[str, str | Source | None]:
    """The map by which the tensors under a key of the state lose the key, and others are left."""
    if rules is not None:
        raise ArgumentValueError("only and map of convert", expected="one of them", got="both")
    under = [name for name in index.tensors if name.startswith(f"{key}.")]
    if not under:
        keys = dict.fromkeys(name.partition(".")[0] for name in index.tensors)
        raise ArgumentValueError(
            "only of convert", expected=f"a key of the state: {', '.join(keys)}", got=repr(key)
        )
    left: dict[str, str | Source | None] = dict.fromkeys(index.tensors)
    return left | {name.removeprefix(f"{key}."): name for name in under}


# -- planning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of `convert`."""

    to: Format
    world_size: int
    dtype: torch.dtype | None
    block_bytes: int
    jobs: int

    @classmethod
    def checked(cls, to: Any, world_size: Any, dtype: Any, max_bytes: Any, jobs: Any) -> _Call:
        if to not in get_args(Format):
            expected = " or ".join(map(repr, get_args(Format)))
            raise ArgumentValueError("to", expected=expected, got=repr(to))
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentTypeError(
                "dtype", expected="a dtype of floating point or None", got=repr(dtype)
            )
        workers = whole_number(jobs, "jobs", least=1)
        limit = whole_number(max_bytes, "max_bytes", least=1)
        block = max(1, min(limit // _COPIES, _LARGEST_BLOCK))
        return cls(to, whole_number(world_size, "world_size", least=1), dtype, block, workers)

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """What a saved dtype becomes."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A tensor that is to be written: what it is made of, and its dtype before it is cast."""

    mosaic: Mosaic
    saved_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mosaic.shape


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What is written where, and from what."""

    index: Index
    call: _Call
    structure: Any
    tensors: dict[str, _Made]
    placing: Placing
    same_as: dict[str, str]  # names of tied tensors, which are written once
    files_are_ranks: bool  # False: the ranks of the placing are but files of rank 0

    @property
    def num_bytes(self) -> int:
        return sum(file.nbytes for file in self.placing.files)

    def by_file(
        self,
        write: Callable[[_Work, Path, int, Callable[[int], None]], Written],
        folder: Path,
        advance: Callable[[int], None],
    ) -> list[Written]:
        """What `write` returns for each file of the placing; the order of work is by size."""
        files = self.placing.files
        jobs = min(self.call.jobs, max(self.num_bytes // _WORTH_A_JOB, 1))
        order = sorted(range(len(files)), key=lambda number: -files[number].nbytes)
        found = in_processes(partial(write, self, folder), order, jobs, advance)
        done = dict(zip(order, found, strict=True))
        return [done[number] for number in range(len(files))]

    def parts_of(
        self, piece: PlacedPiece, advance: Callable[[int], None]
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """A piece in order, block by block, each with memory of its own."""
        made = self.tensors[piece.tensor.name]
        itemsize = max(made.saved_dtype.itemsize, made.dtype.itemsize)
        for box in blocks_of(piece.box, made.shape, itemsize, self.call.block_bytes):
            if not box.volume:
                yield box, torch.empty(box.shape, dtype=made.dtype)
            else:
                yield box, read_mosaic(self.index, made.mosaic, box).to(made.dtype)
                advance(box.volume * made.dtype.itemsize)


def _planned(
    index: Index,
    call: _Call,
    plan: ShardingPlan | None,
    rules: Mapping[str, str | Source | None] | None,
) -> _Work:
    same_as = _ties(index) if rules is None else {}
    tensors = _made(index, call, rules)
    structure = index.structure if rules is None else with_tensors(index.structure, list(tensors))
    written = {name: made for name, made in tensors.items() if name not in same_as}
    is_split = plan is None and call.world_size == 1 and call.to == "safetensors"
    if is_split:
        described = [(name, made.shape, made.dtype) for name, made in written.items()]
        wanted = whole_in_files(described, _HUGGING_FACE_FILE)
    else:
        shapes = {name: made.shape for name, made in tensors.items()}
        layouts = layouts_of(shapes, plan, call.world_size, same_as)
        wanted = [Wanted(name, layouts[name], made.dtype) for name, made in written.items()]
    ranks = {rank for one in wanted for rank in one.layout.ranks}
    placing = place(wanted, sorted(ranks) or [0])
    return _Work(index, call, structure, tensors, placing, same_as, not is_split)


def _made(
    index: Index, call: _Call, rules: Mapping[str, str | Source | None] | None
) -> dict[str, _Made]:
    """The tensors to be written, by name."""
    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    targets = list(shapes) if rules is None else targets_of(shapes, rules)
    found = {}
    for name, source in sources_of(targets, rules).items():
        if source is None:
            continue
        dtypes = {index.tensors[one].dtype for one in source.names}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{name!r} of map",
                expected="sources of one dtype",
                got=", ".join(f"{one} {index.tensors[one].dtype}" for one in source.names),
            )
        (dtype,) = dtypes
        mosaic = source.mosaic(shapes)
        is_kept = is_count(name, mosaic.shape)
        found[name] = _Made(mosaic, dtype, dtype if is_kept else call.cast(dtype))
    return found


def _ties(index: Index) -> dict[str, str]:
    """Names of tensors that lie at the same bytes as an earlier one: name -> that one's."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in index.tensors.items():
        if not math.prod(tensor.shape):
            continue
        strides = None if tensor.strides is None else tensor.strides.tobytes()
        place_of = (tensor.shape, tensor.dtype, tensor.boxes.starts.tobytes(), strides)
        key = (*place_of, tensor.files.tobytes(), tensor.starts.tobytes())
        if key in first:
            found[name] = first[key]
        else:
            first[key] = name
    return found


# -- writing ---------------------------------------------------------------------------------------


def _write_safetensors(work: _Work, aside: Aside, advance: Callable[[int], None]) -> None:
    placing = work.placing
    done = work.by_file(_write_file, aside.path, advance)
    reports: dict[int, Ints] = {}
    for rank in dict.fromkeys(file.rank for file in placing.files):
        mine = [one for file, one in zip(placing.files, done, strict=True) if file.rank == rank]
        sums = [checksum for _, checksums in mine for checksum in checksums]
        reports[rank] = report_of([start for start, _ in mine], sums)
    index = index_of(
        placing,
        reports,
        path=aside.destination.path,
        structure=work.structure,
        same_as=work.same_as,
        world_size=work.call.world_size,
    )
    if not work.files_are_ranks:
        index = replace(index, files=tuple(file._replace(rank=0) for file in index.files))
    commit_index(index, placing, aside)


def _write_file(
    work: _Work, folder: Path, number: int, advance: Callable[[int], None]
) -> tuple[int, list[int]]:
    """Writes one file; where its data begins, and the checksums of its boxes."""
    placing = work.placing
    pieces = tuple(placing.pieces_of(number))
    header = header_of(pieces, is_unsharded=placing.is_unsharded)
    checksums = []
    with FileWriter(folder / placing.file_names[number], header) as writer:
        for piece in pieces:
            checksums.append(writer.write_all(part for _, part in work.parts_of(piece, advance)))
    return len(header), checksums


def _write_dcp(work: _Work, aside: Aside, advance: Callable[[int], None]) -> None:
    placing = work.placing
    paths, values = leaves_of(work.structure)
    done = work.by_file(_write_dcp_file, aside.path, advance)
    written = [one for found in done for one in found]
    if values:
        name = dcp_file_name(0, sum(file.rank == 0 for file in placing.files))
        with DcpFile(aside.path / name) as file:
            for key, value in values.items():
                file.write(key, None, value)
        written += file.written
    for name, other in work.same_as.items():
        written += [one._replace(name=name) for one in written if one.name == other]
    tensors = {name: (made.shape, made.dtype) for name, made in work.tensors.items()}
    write_dcp_metadata(aside.path, tensors, paths, written)
    commit(aside)


def _write_dcp_file(
    work: _Work, folder: Path, number: int, advance: Callable[[int], None]
) -> list[WrittenBox]:
    placed = work.placing.files[number]
    with DcpFile(folder / dcp_file_name(placed.rank, placed.number)) as file:
        for piece in work.placing.pieces_of(number):
            for box, part in work.parts_of(piece, advance):
                file.write(piece.tensor.name, box, part)
    return file.written
