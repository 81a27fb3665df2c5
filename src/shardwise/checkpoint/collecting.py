"""What a rank brings to a save, and what all ranks bring together.

[Note: who brings what] Mostly every rank has the same names, layouts and values, which one small
exchange tells. Where ranks have different ones, such as the layers of their stage of a pipeline or
tensors of a group that others are not in, everybody's descriptions are exchanged and merged: what
several ranks bring must be the same on them, and all owners of a sharded tensor must bring it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from shardwise._torch_compat import storage_key
from shardwise.checkpoint.dtypes import code_of
from shardwise.checkpoint.leaves import sharded_leaf
from shardwise.checkpoint.placing import Wanted
from shardwise.checkpoint.writing import Staging
from shardwise.comm.agreement import by_rank
from shardwise.comm.checks import is_debugging
from shardwise.errors import AgreementError, CheckpointError
from shardwise.geometry import Layout
from shardwise.modules.state_trees import joined
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import live_state
from shardwise.words import dtype_name, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.checkpoint.structure import Flat
    from shardwise.comm.communicator import Communicator
    from shardwise.sharded_tensor.state import State

__all__ = ["Brought", "Described", "Merged", "all_alike", "bring", "merge", "reduced"]


class Described(NamedTuple):
    """What ranks must agree on about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout | None  # None: a plain tensor, the same on all ranks that bring it
    ranks: tuple[int, ...] | None = None  # of its group, all of which reduce what is pending
    checksum: str = ""  # of a plain tensor, where everything is compared

    def __str__(self) -> str:
        what = f"plain {self.shape}" if self.layout is None else str(self.layout)
        values = f", values {self.checksum}" if self.checksum else ""
        return f"{what} of {dtype_name(self.dtype)}{values}"

    @property
    def key(self) -> str:
        """The same text for equal ones, in every process."""
        layout = "plain" if self.layout is None else self.layout.fingerprint
        return f"{self.dtype} {self.shape} {layout} {self.ranks} {self.checksum}"


@dataclass(frozen=True, slots=True)
class Brought:
    """A rank's state: its structure, and what it has of each tensor."""

    structure: Any
    tensors: Mapping[str, Described] = field(default_factory=dict)
    sharded: Mapping[str, ShardedTensor] = field(default_factory=dict)
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)
    same_as: Mapping[str, str] = field(default_factory=dict)  # name -> one with the same memory

    @property
    def digest(self) -> bytes:
        """16 bytes, the same on ranks that bring the same."""
        told = {name: tensor.key for name, tensor in self.tensors.items()}
        return _digest([told, self.structure], 16)

    @property
    def tied_digest(self) -> bytes:
        """8 bytes, the same on ranks that have the same ties."""
        return _digest(dict(self.same_as), 8)


@dataclass(frozen=True, slots=True)
class Merged:
    """What all ranks bring together."""

    structure: Any
    wanted: tuple[Wanted, ...]
    same_as: Mapping[str, str] = field(default_factory=dict)  # these are not among `wanted`


def _digest(value: object, size: int) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def bring(flat: Flat, members: Communicator) -> Brought:
    """What this rank has; raises about what cannot be saved."""
    sharded: dict[str, ShardedTensor] = {}
    plain: dict[str, torch.Tensor] = {}
    tensors = {}
    for name, given in flat.tensors.items():
        code_of(given.dtype, name)
        _check_strided(name, given)
        tensor = sharded_leaf(given, members)
        if isinstance(tensor, ShardedTensor):
            tensors[name] = _described(live_state(tensor))
            sharded[name] = tensor
        else:
            checksum = _checksum(tensor) if is_debugging() else ""
            tensors[name] = Described(tensor.dtype, tuple(tensor.shape), None, checksum=checksum)
            plain[name] = tensor.detach()
    held = {name: sharded[name]._state.carriers for name in sharded}
    held |= {name: (tensor,) for name, tensor in plain.items()}
    return Brought(flat.structure, tensors, sharded, plain, _tied(tensors, held))


def _checksum(tensor: torch.Tensor) -> str:
    checksum = xxhash.xxh3_64()
    for part in Staging().parts(tensor):
        checksum.update(part)
    return checksum.hexdigest()


def _check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{name!r} of the state",
            expected="a tensor with elements in memory",
            got="one on the meta device" if tensor.is_meta else f"a tensor of {tensor.layout}",
            fix="Give it values first, e.g. shardwise.materialize(model)."
            if tensor.is_meta
            else "Save tensor.to_dense().",
        )


def _described(state: State) -> Described:
    members = state.comm  # raises about a tensor of no group
    ranks = None if state.layout.pending is None else tuple(members.ranks)
    return Described(state.dtype, state.layout.shape, state.layout, ranks)


def _tied(
    tensors: Mapping[str, Described], held: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, str]:
    """Names of tensors that are the memory of an earlier one, and that one's name."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in tensors.items():
        if 0 in tensor.shape:
            continue
        memory = [(storage_key(t), t.storage_offset(), t.shape, t.stride()) for t in held[name]]
        key = (tensor.key, tuple(memory))
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def all_alike(brought: Brought, ranks: Sequence[int], *, are_tied: bool) -> Merged:
    """What `ranks` bring together if every one of them brings this, and has the same ties."""
    same_as = brought.same_as if are_tied else {}
    tensors = {name: one for name, one in brought.tensors.items() if name not in same_as}
    bringers = tuple(sorted(ranks))
    wanted = tuple(_wanted(name, one, bringers) for name, one in tensors.items())
    return Merged(brought.structure, wanted, same_as)


def merge(brought: Sequence[tuple[int, Brought]]) -> Merged:
    """What ranks bring together, of (rank, what it brings); raises where they contradict.

    [Note: who brings what]
    """
    by_name: dict[str, list[tuple[int, Described]]] = {}
    for rank, one in brought:
        for name, tensor in one.tensors.items():
            by_name.setdefault(name, []).append((rank, tensor))
    wanted = []
    for name, found in by_name.items():
        if len({tensor.key for _, tensor in found}) > 1:
            raise _differing(name, [(rank, tensor.key, str(tensor)) for rank, tensor in found])
        bringers = tuple(sorted(rank for rank, _ in found))
        wanted.append(_wanted(name, found[0][1], bringers))
    structure = _merged([(rank, one.structure) for rank, one in brought], "")
    return Merged(structure, tuple(wanted))


def _wanted(name: str, tensor: Described, bringers: tuple[int, ...]) -> Wanted:
    if tensor.layout is None:
        return Wanted(name, replicated(tensor.shape, bringers), tensor.dtype)
    needed = tensor.layout.ranks if tensor.ranks is None else tensor.ranks
    absent = sorted(set(needed) - set(bringers))
    if absent:
        raise AgreementError(
            f"save: {name!r} has shards on {ranks_text(needed)}",
            expected="all of them to bring it",
            got=f"nothing from {ranks_text(absent)}",
            fix="Let every rank of the tensor's group call save() with it, in one group that has "
            "all of them: save(..., process_group=...).",
        )
    return Wanted(name, reduced(tensor.layout), tensor.dtype)


@lru_cache(maxsize=256)
def reduced(layout: Layout) -> Layout:
    """Where what is pending is reduced to: each box on one of its ranks, in turns."""
    if layout.pending is None:
        return layout
    bar = layout.bar
    counts = np.diff(bar.box_rows)
    rows = bar.box_rows[:-1] + np.arange(len(counts)) % counts
    return Layout(bar.shape, bar.boxes[rows], bar.owners[rows])


def _merged(found: Sequence[tuple[int, Any]], name: str) -> Any:
    """One structure of those that ranks have at `name`."""
    first = found[0][1]
    if all(one == first for _, one in found):
        return first
    # Of a dict by strings and one by other keys, one is empty, or they have no key in common.
    filled = [(rank, one) for rank, one in found if one != {}]
    kinds = {_kind(one) for _, one in filled}
    if kinds == {"dict"}:
        return _merged_dicts([(rank, one.items()) for rank, one in filled], name)
    if kinds == {"$dict"}:
        pairs = [(rank, [(json.dumps(k), v) for k, v in one["$dict"]]) for rank, one in filled]
        merged = _merged_dicts(pairs, name)
        return {"$dict": [[json.loads(key), value] for key, value in merged.items()]}
    lengths = {len(_items(one)) for _, one in filled if _kind(one) in ("list", "$tuple")}
    if len(kinds) == len(lengths) == 1 and len(filled) == len(found):
        lists = [(rank, _items(one)) for rank, one in found]
        listed = [
            _merged([(rank, items[at]) for rank, items in lists], joined(name, at))
            for at in range(len(lists[0][1]))
        ]
        return listed if kinds == {"list"} else {"$tuple": listed}
    texts = [(rank, json.dumps(one)) for rank, one in found]
    raise _differing(name, [(rank, text, text) for rank, text in texts])


def _kind(structure: Any) -> str:
    """ "dict" and "list" can be merged, and so can "$dict" and "$tuple"."""
    if isinstance(structure, dict):
        first = next(iter(structure), "")
        return first if first.startswith("$") else "dict"
    return type(structure).__name__


def _items(structure: Any) -> list[Any]:
    items: list[Any] = structure if isinstance(structure, list) else structure["$tuple"]
    return items


def _merged_dicts(
    found: Sequence[tuple[int, Iterable[tuple[str, Any]]]], name: str
) -> dict[str, Any]:
    by_key: dict[str, list[tuple[int, Any]]] = {}
    for rank, pairs in found:
        for key, value in pairs:
            by_key.setdefault(key, []).append((rank, value))
    return {key: _merged(values, joined(name, key)) for key, values in by_key.items()}


def _differing(name: str, found: Sequence[tuple[int, str, str]]) -> AgreementError:
    return AgreementError(
        f"save: ranks differ in {name!r} ({by_rank(found)})",
        fix="Save the same value under one key on all ranks, or each rank's under a key of its "
        "own, such as its rank.",
    )
