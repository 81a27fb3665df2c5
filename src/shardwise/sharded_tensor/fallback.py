"""The last resort for torch functions: gather, compute on full tensors, cut the result.

Exact, forward and gradient, for every function and every layout, and as costly as it sounds. So it
says what it did: `implicit_comm`. A result of the shape of an argument is cut like it, and every
rank holds any other.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch_compat import RandomMarks, shares_memory, tree_leaves, tree_map
from shardwise.comm.checks import is_debugging
from shardwise.comm.tracing import TRACES, doing
from shardwise.errors import OpError
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.implicit import announce
from shardwise.sharded_tensor.resharding import (
    check_one_group,
    is_everywhere,
    replicated_layout,
    replicated_state,
    reshard_state,
)
from shardwise.sharded_tensor.running import compare_calls
from shardwise.sharded_tensor.state import Seen, State
from shardwise.sharded_tensor.tensor import ShardedTensor, adopt, register_fallback, wrap
from shardwise.sharded_tensor.usable import check_writable, live_state
from shardwise.transfer import plan_reshard

__all__: list[str] = []

# Random whatever their arguments are, so that nothing has to be gathered to refuse them.
_RANDOM = ("binomial", "poisson", "_standard_gamma")
_WITH_STATISTICS = (
    "batch_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "instance_norm",
)


@register_fallback
def _traced(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[ShardedTensor]
) -> Any:
    with doing(function_name(func)) if TRACES else nullcontext():
        return _gather_and_compute(func, args, kwargs, tensors)


def _gather_and_compute(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[ShardedTensor]
) -> Any:
    """What `func` gives on the full tensors, and does to them. All ranks call it."""
    states = [live_state(tensor) for tensor in tensors]
    check_one_group(function_name(func), states)
    if getattr(func, "__name__", "") in _RANDOM:
        raise _random(func, states[0])
    _announce(func, states)
    if is_debugging():
        compare_calls(func, [*states, *_plain_tensors(args, kwargs)])
    found = {id(tensor): _Full(tensor, _whole(tensor._state)) for tensor in tensors}

    def plain(value: Any) -> Any:
        return found[id(value)].full if isinstance(value, ShardedTensor) else value

    marks = RandomMarks(tree_leaves((args, kwargs)), states[0].device)
    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if marks.have_moved():
        raise _random(func, states[0])
    unseen = _written_unseen(func, args, kwargs)
    for one in found.values():
        if one.is_written or any(one.tensor is value for value in unseen):
            one.write_back(func)
    given = {id(value): value for value in tree_leaves((args, kwargs))}
    return tree_map(lambda value: _kept(value, found, given, states), result)


def _plain_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    leaves = tree_leaves((args, kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor)]


@dataclass(slots=True)
class _Full:
    """A sharded argument and its full tensor, on which the function works."""

    tensor: ShardedTensor
    full: torch.Tensor
    version: int = -1

    def __post_init__(self) -> None:
        self.version = self.full._version

    @property
    def is_copy(self) -> bool:
        """Whether what is written into the full tensor has to be brought to the sharded one."""
        return all(self.full is not shard for shard in self.tensor._state.shards)

    @property
    def seen(self) -> tuple[Seen, ...]:
        """What a view of the full tensor is a lost view of."""
        state = self.tensor._state
        return (Seen.now(state.carriers),) if self.is_copy else state.view_of

    @property
    def is_written(self) -> bool:
        return self.full._version != self.version

    def write_back(self, func: Any) -> None:
        """Makes the sharded tensor what the function has made of the full one."""
        tensor, full = self.tensor, self.full
        check_writable(tensor, func)
        if full.shape == tensor.shape:
            if self.is_copy:
                tensor.copy_(full)
            return
        state = tensor._state  # t_, squeeze_, resize_, ...
        layout = replicated_layout(tuple(full.shape), state)
        adopt(tensor, state.with_carriers([full], layout=layout, spec=None))


def _whole(state: State) -> torch.Tensor:
    """The full tensor; it counts its versions, by which writing into it is noticed."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return _whole(state)
    full = replicated_state(state).shards[0]
    return full.clone() if full.is_inference() else full


def _kept(value: Any, found: dict[int, _Full], given: dict[int, Any], states: list[State]) -> Any:
    """A result as a sharded tensor; an argument that is returned as itself."""
    if not isinstance(value, torch.Tensor) or id(value) in given:
        return value
    for one in found.values():
        if value is one.full:
            return one.tensor
    if value.layout is not torch.strided:
        raise OpError(
            f"a result of {value.layout} of a ShardedTensor: pieces are dense",
            rank=states[0].rank,
            fix="Call it on st.local_shards(), or on st.full_tensor().",
        )
    shown = [one for one in found.values() if shares_memory(value, one.full)]
    view_of = tuple(seen for one in shown for seen in one.seen)  # [Note: lost views] in `state.py`
    shape = tuple(value.shape)
    layout = replicated_layout(shape, states[0])
    everywhere = states[0].with_carriers([value], layout=layout, spec=None, view_of=view_of)
    alike = [state for state in states if state.layout.shape == shape]
    if not alike or view_of:
        return wrap(everywhere)
    like = alike[0]
    spec = like.spec if like.layout.pending is None else None
    return wrap(reshard_state(everywhere, like.layout.bar, spec=spec))


def _written_unseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that torch writes without counting a version."""
    name = getattr(func, "__name__", "")
    if name in _WITH_STATISTICS:  # some have a weight and a bias there, which may require grad
        listed = [*args[1:5], kwargs.get("running_mean"), kwargs.get("running_var")]
        return [one for one in listed if isinstance(one, torch.Tensor) and not one.requires_grad]
    return tree_leaves((args, kwargs)) if name.startswith(("_fused_", "_amp_")) else []


def _random(func: Any, state: State) -> OpError:
    return OpError(
        f"{function_name(func)} of a ShardedTensor: each rank would draw its own numbers",
        rank=state.rank,
        fix="Fill the tensor by torch.nn.init, or take shardwise.sharded_tensor.rand.",
    )


def _announce(func: Any, states: list[State]) -> None:
    moved = [state for state in states if not is_everywhere(state)]
    if moved:
        plans = [
            plan_reshard(s.layout, replicated_layout(s.layout.shape, s), s.dtype.itemsize)
            for s in moved
        ]
        nbytes = sum(plan.total_bytes for plan in plans)
        announce(func, [s.layout for s in moved], nbytes, states[0].rank, gathers=True)
