"""`load`: a checkpoint into tensors of any layout, reading only what they need.

[Note: loading] Every rank reads the index and finds the same. What all must mean alike is compared
in one exchange before anything changes. Then each rank reads its part straight into its own memory
([Note: sharing]), and what several ranks hold is passed on, in steps. Ranks meet after each
reading, so that one that cannot read is heard by all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.arguments import items, whole_number
from shardwise.checkpoint.background import background_of
from shardwise.checkpoint.dtypes import is_count
from shardwise.checkpoint.fetching import TensorToFill, fetch, meet, memory_of, verify_pieces
from shardwise.checkpoint.group import group_of_tensors
from shardwise.checkpoint.joining import Told, Wish, all_alike, join
from shardwise.checkpoint.leaves import sharded_leaf
from shardwise.checkpoint.matching import LoadedKeys, check_keys, match
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.safetensors_folder import index_of_files
from shardwise.checkpoint.saved_state import SavedState
from shardwise.checkpoint.structure import MOST_DEPTH
from shardwise.checkpoint.targets import find_targets
from shardwise.checkpoint.threads import num_threads
from shardwise.comm.agreement import agreed_bytes
from shardwise.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from shardwise.modules.filling import check_can_fill
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.joining import Joined
    from shardwise.checkpoint.mapping import Map
    from shardwise.checkpoint.matching import Matched
    from shardwise.checkpoint.targets import Targets
    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout

__all__ = ["load", "load_safetensors"]


def load(
    state: object,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    max_bytes: int | None = None,
    verify: bool = False,
    map: Map | None = None,
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | Communicator | None = None,
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
        _Options(strict, max_bytes, verify, map, dtype),
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
    process_group: ProcessGroup | Communicator | None = None,
    progress: bool | None = None,
) -> LoadedKeys:
    """Loads a model's safetensors files straight into shards; each rank reads only its slices.

    `files` is a Hugging Face folder, one file or a list of files; everything else as in `load`.
    """
    return _load(
        state,
        lambda: _index_of_files(files),
        _Options(strict, max_bytes, False, map, dtype),
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


class _Options(NamedTuple):
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
    options: _Options,
    process_group: ProcessGroup | Communicator | None,
    progress: bool | None,
) -> LoadedKeys:
    members = group_of_tensors(_tensors_in(state, 0), process_group)
    job = _agreed_job(state, open_index, options, members)
    cap = options.max_bytes
    most = None if cap is None else cap // num_threads(members)
    with Reader(job.index, most=most) as reader, torch.no_grad():
        if options.verify:
            verify_pieces(reader, [target.mosaic for target in job.targets], members)
        fetch(job.targets, reader, members, max_bytes=options.max_bytes, progress=progress)
    with meet("load", members, is_partly_loaded=True):
        job.state.set_values()
    return job.keys


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
    elif isinstance(state, Mapping | list | tuple) and depth <= MOST_DEPTH:
        for item in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(item, depth + 1)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be loaded; the targets are the same on all ranks, but for the memory."""

    index: Index
    state: Targets
    targets: list[TensorToFill]
    keys: LoadedKeys


class _Own(NamedTuple):
    """What one rank has found of what it is to load."""

    saved: SavedState
    state: Targets
    matched: Matched
    tensors: dict[str, torch.Tensor]  # no DTensors
    told: Told

    @property
    def has_ties(self) -> bool:
        """Whether two of the tensors are the same memory."""
        known = [memory for one in self.tensors.values() if (memory := memory_of(_shards(one)))]
        return len(set(known)) < len(known)


def _agreed_job(
    state: object, open_index: Callable[[], Index], options: _Options, members: Communicator
) -> _Job:
    """All ranks are known to mean the same, or all raise."""
    problem: Exception | None = None
    values: dict[str, object] = {name: getattr(options, name) for name in options._fields}
    values["map"] = None if options.map is None else "given"
    own: _Own | None = None
    try:
        options.check()
        background_of(members).settle()  # what went wrong in a save, and what it saves
        own = _own(state, SavedState(open_index()), options, members)
        values["checkpoint"] = own.saved.index.fingerprint
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    mine = bytes(17) if own is None else own.told.digest + bytes([own.has_ties])
    where = {} if own is None else {"checkpoint": f"here it is {str(own.saved.index.path)!r}"}
    found = agreed_bytes("load", values, mine, group=members, problem=problem, phrases=where)
    assert own is not None
    joined = _joined(own.told, [one[:-1] for one in found], members)
    if options.strict:
        check_keys(joined.missing, joined.unexpected, own.matched.wanted, own.saved.index)
    keys = LoadedKeys(own.matched.keys.missing, joined.unexpected, own.matched.keys.converted)
    targets = [
        _to_fill(name, wish, layout, own, options.dtype)
        for name, (wish, layout) in joined.wishes.items()
    ]
    if any(one[-1] for one in found):
        targets = _without_tied(targets, members)
    return _Job(own.saved.index, own.state, targets, keys)


def _own(state: object, saved: SavedState, options: _Options, members: Communicator) -> _Own:
    """Raises about all that is wrong on this rank."""
    if options.verify:
        _check_has_checksums(saved.index)
    found = find_targets(state, saved, members)
    matched = match(found, saved, options.map)
    tensors, wanted = {}, {}
    for name, mosaic in matched.mosaics.items():
        tensor = sharded_leaf(found.tensors[name], members)
        check_can_fill(name, tensor, members.rank)
        layout = None
        if isinstance(tensor, ShardedTensor):
            layout = live_state(tensor).layout
            members.ranks.check_members(layout.ranks, what=f"the layout of {name!r}")
        tensors[name] = tensor
        wanted[name] = Wish(tensor.dtype, layout, mosaic)
    missing, unexpected, _ = matched.keys
    return _Own(saved, found, matched, tensors, Told(wanted, tuple(missing), tuple(unexpected)))


def _joined(told: Told, digests: Sequence[bytes], members: Communicator) -> Joined:
    if len(set(digests)) == 1:
        return all_alike(told, tuple(members.ranks))
    stories = zip(members.ranks, members.gather_objects(told), strict=True)
    return join({rank: one for rank, one in stories if isinstance(one, Told)})


def _to_fill(
    name: str, wish: Wish, layout: Layout, own: _Own, dtype: torch.dtype | None
) -> TensorToFill:
    """With the memory of this rank; none, if others want the tensor and this one does not."""
    shards = _shards(own.tensors[name]) if name in own.tensors else ()
    via = None if is_count(name, layout.shape) else dtype
    return TensorToFill(name, layout, shards, wish.dtype, wish.mosaic, via)


def _shards(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's memory of a tensor, without autograd."""
    held = tensor._state.shards if isinstance(tensor, ShardedTensor) else (tensor,)
    return tuple(shard.detach() for shard in held)


def _check_has_checksums(index: Index) -> None:
    if any(tensor.checksums is None for tensor in index.tensors.values()):
        raise CheckpointError(
            f"verify=True for {str(index.path)!r}",
            expected="a checkpoint with checksums",
            got=f"one of kind {index.kind!r}, which has none",
            fix="Pass verify=False.",
        )


def _without_tied(targets: Sequence[TensorToFill], members: Communicator) -> list[TensorToFill]:
    """Of targets that share memory the last; ranks that hold nothing of them hear of it."""
    places: dict[object, int] = {}
    known = [memory_of(target.shards) or number for number, target in enumerate(targets)]
    for number, memory in enumerate(known):
        places[memory] = number
    last = [places[memory] for memory in known]
    if len(members.ranks) > 1:
        numbers = torch.tensor(last, device=members.wire_device)
        members.all_reduce(numbers, "max")
        last = numbers.tolist()
    return [target for number, target in enumerate(targets) if last[number] == number]
