"""What a plain tensor means beside sharded ones: `plain_inputs`.

A plain tensor is either this rank's own rows of a batch or the same on all ranks, and torch cannot
tell which. Under "rows" the first matrix of a product is taken for own rows, as a data-parallel
program means it, and everything else for the same.

[Note: meant again] A checkpointed function runs again in backward, where something else may be set:
the meaning that a module's `input_plan` sets ends with the module. So the first run notes what was
set whenever it mattered; if that was always the same, the run in backward goes by it. If it was
not, blocks inside of the function set it, and do so again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from shardwise._torch_compat import checkpointed_runs
from shardwise.errors import ArgumentValueError, OpError
from shardwise.settings import Setting
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.distributing import as_local_rows
from shardwise.sharded_tensor.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.settings import Change

__all__ = ["PlainInputs", "are_rows", "check_plain", "plain_inputs", "promoted"]

PlainInputs = Literal["rows", "replicated", "error"]  # what a plain tensor beside sharded ones is
_MEANING: Setting[PlainInputs] = Setting("shardwise_plain_inputs", lambda: "rows")
# By the call of a checkpointed function. [Note: meant again]
_meant: weakref.WeakKeyDictionary[Any, set[PlainInputs]] = weakref.WeakKeyDictionary()


def plain_inputs(meaning: PlainInputs) -> Change[PlainInputs]:
    """Sets what plain tensors mean beside sharded ones; in a `with` statement, for its block.

    "rows" (the default): the first matrix of linear, matmul, mm, bmm, addmm and baddbmm is this
    rank's own rows of a batch, one piece per rank in rank order, and the result is sharded (a 1-d
    input is one row); the indices of embedding and embedding_bag are this rank's own, and the
    result is a plain tensor for them; every other plain tensor, and any plain nn.Parameter, is the
    same on all ranks. "replicated": all are.
    "error": a plain tensor of one dim or more raises; wrap it with `as_local_rows` or
    `as_replicated`.
    """
    if meaning not in get_args(PlainInputs):
        raise ArgumentValueError(
            "plain_inputs", expected=f"one of {', '.join(get_args(PlainInputs))}", got=meaning
        )
    return _MEANING.change(meaning)


def promoted(x: torch.Tensor, found: Sequence[State | torch.Tensor]) -> torch.Tensor:
    """The first matrix of a product, as its meaning says; `found` are all operands."""
    if not are_rows() or x.dim() == 0:
        return x
    group = next(one for one in found if isinstance(one, State))
    made = as_local_rows(x if x.dim() > 1 else x.unsqueeze(0), process_group=group.comm)
    made._state.is_from_rows = made._state.is_special = True
    return made


def are_rows() -> bool:
    """Whether a plain tensor that may be this rank's rows is meant so."""
    return _meaning() == "rows"


def _meaning() -> PlainInputs:
    """What is set, or was when this checkpointed function ran first. [Note: meant again]"""
    meaning = _MEANING.get()
    inside = []
    for run in checkpointed_runs():
        if run.again is not None:
            known = _meant.get(run.call, set())
            meaning = next(iter(known)) if len(known) == 1 else meaning
            break
        inside.append(run)
    for run in inside:
        _meant.setdefault(run.call, set()).add(meaning)
    return meaning


def check_plain(func: Any, found: Sequence[State | torch.Tensor]) -> None:
    """Raises if a plain operand may mean something else than it is taken for."""
    plain = [one for one in found if isinstance(one, torch.Tensor) and one.dim()]
    if not plain:
        return
    state = next(one for one in found if isinstance(one, State))
    meaning = _meaning()
    if meaning == "error":
        raise OpError(
            f"{function_name(func)} of ShardedTensors and a plain tensor",
            rank=state.rank,
            got=f"a plain tensor of shape {tuple(plain[0].shape)} under plain_inputs('error')",
            fix="Say what it is: shardwise.as_local_rows(x) or shardwise.as_replicated(x).",
        )
    rows = [one.layout.shape for one in found if isinstance(one, State) and one.is_from_rows]
    for shape in rows if meaning == "rows" else []:
        for one in plain:
            if one.dim() == len(shape) and one.shape[0] == 1 != shape[0]:
                raise OpError(
                    f"{function_name(func)} of a batch of rows and a plain tensor",
                    rank=state.rank,
                    expected=f"shape {shape}, or fewer dims",
                    got=f"shape {tuple(one.shape)}, which may be one row for all or this rank's",
                    fix="Say which: shardwise.as_replicated(x) or shardwise.as_local_rows(x).",
                )
