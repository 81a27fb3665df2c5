"""`load`: a checkpoint into tensors of any layout, reading only what they need.

[Note: loading] Every rank reads the index and finds the same. What all must mean alike is compared
in one exchange before anything changes. Then each rank reads its part straight into its own memory
([Note: sharing]), and what several ranks hold is passed on, in steps. Ranks meet after each
reading, so that one that cannot read is heard by all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.arguments import items, whole_number
from shardwise.checkpoint.fetching import Target, fetch, meet, verify_pieces
from shardwise.checkpoint.matching import check_keys, match
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.safetensors_folder import index_of_files
from shardwise.checkpoint.saved_state import SavedState
from shardwise.checkpoint.targets import find_targets
from shardwise.comm.agreement import agreed_numbers
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from shardwise.modules.filling import check_can_fill, places_of
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.mapping import Map
    from shardwise.checkpoint.matching import LoadedKeys, Matched
    from shardwise.checkpoint.targets import Targets
    from shardwise.comm.communicator import Communicator

__all__ = ["load", "load_safetensors"]

_MOST_DEPTH = 200  # of nested containers


def load(
    state: object,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    max_bytes: int | None = None,
    verify: bool = False,
    map: Map | None = None,
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> LoadedKeys:
    """Loads a checkpoint into a state, in place, whatever the layouts were and are.

    All ranks of the group call it. `state` is a module, an optimizer, or nested dicts and lists of
    them, of tensors (sharded, DTensor, plain: the same on all ranks) and of plain values, which are
    replaced. State that an optimizer has not made yet is made, in the layouts of its parameters.

    Returns what was missing, unexpected and converted; with `strict` the first two raise. `map` is
    a dict from names in the state, perhaps with `*`, to saved names or to what `fuse`, `part` and
    `transpose` make of them, or a function. Values are converted to the dtypes of the state;
    `dtype` rounds floating-point values on the way, as if they had been saved so. `verify`
    compares the checksums of all that is read, before it is used. `max_bytes` caps the staging.
    What can be known beforehand raises on all ranks before anything changes.
    """
    return _load(
        state,
        lambda: load_index(path),
        _Wishes(strict, max_bytes, verify, map, dtype),
        process_group,
        progress,
    )


def load_safetensors(
    state: object,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    map: Map | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    max_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> LoadedKeys:
    """Loads a model's safetensors files straight into shards; each rank reads only its slices.

    `files` is a Hugging Face folder, one file or a list of files; everything else as in `load`.
    """
    return _load(
        state,
        lambda: _index_of_files(files),
        _Wishes(strict, max_bytes, False, map, dtype),
        process_group,
        progress,
    )


def _index_of_files(files: Any) -> Index:
    if isinstance(files, str | os.PathLike):
        return load_index(files)
    paths = [Path(one) for one in items(files, "files of load_safetensors", of="paths")]
    if not paths:
        raise ArgumentValueError("files of load_safetensors", expected="paths", got="none")
    return index_of_files(paths)


class _Wishes(NamedTuple):
    """What the caller wants of a load."""

    strict: bool
    max_bytes: int | None
    verify: bool
    map: Map | None
    dtype: torch.dtype | None

    def check(self) -> None:
        """Raises about arguments that can mean nothing."""
        if self.max_bytes is not None:
            whole_number(self.max_bytes, "max_bytes", least=1)
        given: Any = self.dtype
        if given is not None and not getattr(given, "is_floating_point", False):
            raise ArgumentTypeError("dtype of load", expected="a floating dtype", got=self.dtype)


def _load(
    state: object,
    open_index: Callable[[], Index],
    wishes: _Wishes,
    process_group: ProcessGroup | None,
    progress: bool | None,
) -> LoadedKeys:
    members = _group_of(state, process_group)
    job = _agreed_job(state, open_index, wishes, members)
    with Reader(job.index) as reader, torch.no_grad():
        if wishes.verify:
            verify_pieces(reader, [target.mosaic for target in job.targets], members)
        fetch(job.targets, reader, members, max_bytes=wishes.max_bytes, progress=progress)
    with meet("load", members, is_partly_loaded=True):
        job.state.set_values()
    return job.matched.keys


def _group_of(state: object, process_group: ProcessGroup | None) -> Communicator:
    """The group that is given, or that of the first sharded tensor, or the default one."""
    if process_group is None:
        for tensor in _tensors_in(state, 0):
            if isinstance(tensor, ShardedTensor):
                return tensor._state.comm
    return communicator(process_group)


def _tensors_in(state: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors of a state, those of modules and of optimizers' parameters among them."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, torch.nn.Module):
        yield from state.parameters()
        yield from state.buffers()
    elif isinstance(state, torch.optim.Optimizer):
        for group in state.param_groups:
            yield from group["params"]
    elif isinstance(state, Mapping | list | tuple) and depth < _MOST_DEPTH:
        for item in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(item, depth + 1)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be loaded; the same on all ranks, but for the memory."""

    index: Index
    state: Targets
    matched: Matched
    targets: list[Target]


def _agreed_job(
    state: object, open_index: Callable[[], Index], wishes: _Wishes, members: Communicator
) -> _Job:
    """All ranks are known to mean the same, or all raise."""
    problem: Exception | None = None
    values: dict[str, object] = {name: getattr(wishes, name) for name in wishes._fields}
    values["map"] = None if wishes.map is None else "given"
    job: _Job | None = None
    last: list[int] = []
    try:
        wishes.check()
        job = _job(state, open_index(), wishes, members)
        last = _last_of_tied(job.targets)
        values["checkpoint"] = job.index.fingerprint
        values["keys"] = tuple(map(tuple, job.matched.keys))
        for target in job.targets:
            values[f"layout of {target.name!r}"] = target.layout
            values[f"dtype of {target.name!r}"] = target.dtype
            if wishes.map is not None:
                values[f"source of {target.name!r}"] = repr(target.mosaic.windows)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    has_ties = any(number != at for at, number in enumerate(last))
    told = agreed_numbers("load", values, int(has_ties), group=members, problem=problem)
    assert job is not None
    if any(told):
        job = replace(job, targets=_without_tied(job.targets, last, members))
    return job


def _job(state: object, index: Index, wishes: _Wishes, members: Communicator) -> _Job:
    saved = SavedState(index)
    found = find_targets(state, saved, members)
    matched = match(found, saved, wishes.map)
    if wishes.strict:
        check_keys(matched, index)
    if wishes.verify:
        _check_has_checksums(index)
    targets = []
    for name, mosaic in matched.mosaics.items():
        tensor = found.tensors[name]
        check_can_fill(name, tensor, members)
        layout, shards = places_of(tensor, members)
        via = None if name in found.counts else wishes.dtype
        local = tuple(shard.detach() for shard in shards)
        targets.append(Target(name, layout, local, tensor.dtype, mosaic, via))
    return _Job(index, found, matched, targets)


def _check_has_checksums(index: Index) -> None:
    if any(tensor.checksums is None for tensor in index.tensors.values()):
        raise CheckpointError(
            f"verify=True for {str(index.path)!r}",
            expected="a checkpoint with checksums",
            got=f"one of kind {index.kind!r}, which has none",
            fix="Pass verify=False.",
        )


def _last_of_tied(targets: Sequence[Target]) -> list[int]:
    """For each target the last one that has the same memory on this rank: that one counts."""
    last: dict[object, int] = {}
    for number, target in enumerate(targets):
        last[target.memory or number] = number
    return [last[target.memory or number] for number, target in enumerate(targets)]


def _without_tied(
    targets: Sequence[Target], last: Sequence[int], members: Communicator
) -> list[Target]:
    """Of targets that share memory the last; ranks that hold nothing of them hear of it."""
    if len(members.ranks) > 1:
        numbers = torch.tensor(last, device=members.wire_device)
        members.all_reduce(numbers, "max")
        last = numbers.tolist()
    return [target for number, target in enumerate(targets) if last[number] == number]
