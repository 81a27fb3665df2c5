"""`load_full_state_dict`: a state dict that one rank has, given out to all.

[Note: state of optimizers] In a full state dict an optimizer's part is what the same optimizer has
for the plain model on one process: parameters have the numbers that torch gives them, or the names
of a `ShardedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import shares_memory, tree_map
from shardwise.arguments import whole_number
from shardwise.comm.agreement import agree
from shardwise.comm.differentiable import count_writes
from shardwise.comm.executor import execute_all
from shardwise.comm.load import Transfer
from shardwise.errors import ArgumentTypeError, ArgumentValueError, LoadError
from shardwise.modules.filling import check_can_fill, parameters_by_key, places_of, room_for
from shardwise.modules.group import check_group, group_of
from shardwise.modules.state_trees import joined, named_tensors
from shardwise.sharded_optim.incompatible_keys import IncompatibleKeys
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.steps import in_steps
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["load_full_state_dict"]

_LEAST = 1 << 26  # bytes of a step: small tensors go together


@dataclass(frozen=True, slots=True)
class _Outline:
    """What stands for a tensor of the source on other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor that is to get the values of the source's tensor of this name."""

    name: str
    into: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.into.numel() * self.into.dtype.itemsize


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    src_rank: int = 0,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    max_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> IncompatibleKeys:
    """Loads a state dict that one rank has; every rank takes its own part of each tensor.

    All ranks of the model's group call it; the rank at position `src_rank` passes a state dict of
    full tensors, such as `full_state_dict` gives, and what others pass is not looked at. Values go
    straight into the model's tensors, sharded and plain, in their dtypes; `max_bytes` caps the
    staging. With an optimizer it is `{"model": ..., "optimizer": ...}`, and the optimizer's state
    is made anew in the layouts of the parameters.

    Returns missing and unexpected keys, as `Module.load_state_dict`; with `strict` they raise. A
    parameter without state in the optimizer's part, because none was made yet, is returned as
    missing and never raises. Wrong shapes always raise, on all ranks, before anything changes. The
    model's hooks on loading do not run.
    """
    members = group_of(model, process_group)
    own = _own_state(model)
    is_source = _agreed_source(own, state_dict, src_rank, members, optimizer, strict, max_bytes)
    told = members.gather_objects(_outlined(state_dict) if is_source else None)
    outline: Any = told[src_rank]
    model_part = outline if optimizer is None else outline["model"]
    keys = _compared(own, model_part)
    loading = _Loading(members)
    prefix = "" if optimizer is None else "model"
    extra = {}
    for key in [key for key in own if key in model_part]:
        if _is_extra(key):
            extra[key] = loading.with_rooms(model_part[key], joined(prefix, key))
        else:
            loading.fill(joined(prefix, key), own[key])
    if optimizer is not None:
        optimizer_state, more = loading.optimizer_state(optimizer, outline["optimizer"], model)
        keys = IncompatibleKeys(*(a + b for a, b in zip(keys, more, strict=True)))
    _check_keys(model, keys, strict=strict)
    given = dict(named_tensors(state_dict)) if is_source else None
    loading.run(given, members.ranks.rank_at(src_rank), max_bytes, progress)
    for key, value in extra.items():
        path, _, _ = key.rpartition(".")
        model.get_submodule(path).set_extra_state(value)
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_state)
    return keys


def _own_state(model: nn.Module) -> dict[str, Any]:
    """What can be loaded: tensors and extra state, but not what hooks may add to a state dict."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {k: one for k, one in state.items() if isinstance(one, torch.Tensor) or _is_extra(k)}


def _is_extra(key: str) -> bool:
    """Whether a module makes it up when it is asked for its state, and takes it back whole."""
    return key.rpartition(".")[2] == "_extra_state"


def _agreed_source(
    own: Mapping[str, Any],
    state_dict: object,
    src_rank: int,
    members: Communicator,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    max_bytes: int | None,
) -> bool:
    """Whether this rank is the source; all ranks are known to mean the same."""
    problem: Exception | None = None
    values: dict[str, object] = {
        "src_rank": src_rank,
        "strict": strict,
        "max_bytes": max_bytes,
        "optimizer": type(optimizer).__name__,
    }
    is_source = False
    try:
        source = members.ranks.rank_at(whole_number(src_rank, "src_rank"))
        is_source = members.rank == source
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                values[f"shape of {name!r}"] = tuple(tensor.shape)
                values[f"dtype of {name!r}"] = tensor.dtype
                check_can_fill(name, tensor, members.rank)
            if isinstance(tensor, ShardedTensor):
                check_group(name, tensor, members)
                values[f"layout of {name!r}"] = tensor.shard_layout
        if is_source:
            _check_given(state_dict, members.rank, has_optimizer=optimizer is not None)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("load_full_state_dict", values, group=members, problem=problem)
    return is_source


def _check_given(state_dict: object, rank: int, *, has_optimizer: bool) -> None:
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            "state_dict of load_full_state_dict",
            rank=rank,
            expected="a state dict on the source rank",
            got=type(state_dict).__name__,
        )
    if has_optimizer and set(state_dict) != {"model", "optimizer"}:
        raise ArgumentValueError(
            "state_dict of load_full_state_dict with an optimizer",
            rank=rank,
            expected='{"model": ..., "optimizer": ...}',
            got=f"the keys {', '.join(map(repr, list(state_dict)[:5]))}",
            fix="So full_state_dict(model, optimizer) gives it.",
        )
    for name, tensor in named_tensors(state_dict):
        if isinstance(tensor, ShardedTensor) or tensor.is_meta:
            raise ArgumentTypeError(
                f"{name!r} in the state dict of load_full_state_dict",
                rank=rank,
                expected="a plain tensor with data",
                got=type(tensor).__name__ if not tensor.is_meta else "a meta tensor",
                fix="Sharded state dicts are loaded by model.load_state_dict(state_dict).",
            )


def _outlined(state_dict: object) -> Any:
    return tree_map(
        lambda leaf: (
            _Outline(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        ),
        state_dict,
    )


def _compared(own: Mapping[str, Any], saved: Mapping[str, Any]) -> IncompatibleKeys:
    """What is missing and unexpected; raises where shapes differ."""
    for key in [key for key in own if key in saved and not _is_extra(key)]:
        shape = saved[key].shape if isinstance(saved[key], _Outline) else type(saved[key]).__name__
        if shape != tuple(own[key].shape):
            raise LoadError(
                f"size mismatch for {key}",
                expected=f"a tensor of shape {tuple(own[key].shape)}, as in the model",
                got=shape,
                fix="Nothing was loaded.",
            )
    return IncompatibleKeys([k for k in own if k not in saved], [k for k in saved if k not in own])


def _check_keys(model: nn.Module, keys: IncompatibleKeys, *, strict: bool) -> None:
    missing = [key for key in keys.missing_keys if not key.startswith(_STATE)]
    if not strict or not (missing or keys.unexpected_keys):
        return
    parts = []
    if missing:
        parts.append(f"Missing key(s) in state_dict: {', '.join(missing)}")
    if keys.unexpected_keys:
        parts.append(f"Unexpected key(s) in state_dict: {', '.join(keys.unexpected_keys)}")
    raise LoadError(
        f"load_full_state_dict into {type(model).__name__}: {'; '.join(parts)}",
        fix="Nothing was loaded. Pass strict=False to load the rest.",
    )


_STATE = "optimizer.state."  # how names of an optimizer's state begin


class _Loading:
    """What is to be filled from the source's tensors."""

    def __init__(self, members: Communicator) -> None:
        self._members = members
        self._fills: dict[int, _Fill] = {}  # by tensor: of tied names the last one counts

    def fill(self, name: str, into: torch.Tensor) -> None:
        self._fills[id(into)] = _Fill(name, into)

    def with_rooms(self, tree: Any, name: str, parameter: torch.Tensor | None = None) -> Any:
        """The same, with new tensors in place of outlines, for the state of `parameter`."""
        if isinstance(tree, _Outline):
            room = room_for(
                tree.shape, tree.dtype, name.rpartition(".")[2], parameter, self._members
            )
            self.fill(name, room)
            return room
        if isinstance(tree, Mapping):
            return {
                key: self.with_rooms(value, joined(name, key), parameter)
                for key, value in tree.items()
            }
        if type(tree) in (list, tuple):
            return type(tree)(
                self.with_rooms(value, joined(name, number), parameter)
                for number, value in enumerate(tree)
            )
        return tree

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], model: nn.Module
    ) -> tuple[dict[str, Any], IncompatibleKeys]:
        """A state dict for the optimizer, to be filled; what is missing and unexpected in it."""
        parameters = parameters_by_key(optimizer, saved["param_groups"])
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state = {}
        for key, entry in saved["state"].items():
            if key in parameters:
                state[key] = self.with_rooms(entry, f"{_STATE}{key}", parameters[key])
        missing = [
            _STATE + names.get(id(parameter), str(key))
            for key, parameter in parameters.items()
            if key not in saved["state"] and (saved["state"] or optimizer.state.get(parameter))
        ]
        unexpected = [f"{_STATE}{key}" for key in saved["state"] if key not in parameters]
        groups = self.with_rooms(saved["param_groups"], "optimizer.param_groups")
        return {"state": state, "param_groups": groups}, IncompatibleKeys(missing, unexpected)

    def run(
        self,
        given: Mapping[str, torch.Tensor] | None,
        source: int,
        max_bytes: int | None,
        progress: bool | None,
    ) -> None:
        """Fills all of them from what is `given` on rank `source`, a few at a time."""
        fills = list(self._fills.values())
        total = sum(fill.nbytes for fill in fills)
        with torch.no_grad(), progress_bar("loading", total, self._members, show=progress) as done:
            for step in in_steps(fills, least=_LEAST):
                transfers = [
                    _transfer(
                        fill, None if given is None else given[fill.name], source, self._members
                    )
                    for fill in step
                ]
                execute_all(transfers, group=self._members, max_bytes=max_bytes)
                count_writes(out for transfer in transfers for out in transfer.out or ())
                done(sum(fill.nbytes for fill in step))


def _transfer(
    fill: _Fill, value: torch.Tensor | None, source: int, members: Communicator
) -> Transfer:
    """From the full tensor on one rank into the tensor's own memory."""
    into = fill.into
    layout, out = places_of(into, members)
    plan = plan_reshard(replicated(layout.shape, (source,)), layout, into.dtype.itemsize)
    shards = []
    if value is not None:
        sent = value.detach().to(into.dtype)
        shards.append(sent.clone() if any(shares_memory(sent, one) for one in out) else sent)
    return Transfer(plan, shards, out, into.dtype, name=fill.name)
