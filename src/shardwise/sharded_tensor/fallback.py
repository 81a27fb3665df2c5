"""The last resort for torch functions: gather, compute on full tensors, hold the result everywhere.

Exact, forward and gradient, for every function and every layout, and as costly as it sounds. So it
says what it did: `implicit_comm`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from shardwise._torch_compat import tree_map
from shardwise.errors import ArgumentValueError, OpError
from shardwise.settings import Setting
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.resharding import replicated_layout, replicated_state
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    adopt,
    check_writable,
    register_fallback,
    wrap,
)
from shardwise.transfer import plan_reshard
from shardwise.transfer.units import format_bytes

if TYPE_CHECKING:
    from shardwise.settings import Change
    from shardwise.sharded_tensor.state import State

__all__ = ["ImplicitComm", "ImplicitCommWarning", "implicit_comm"]

ImplicitComm = Literal["allow", "warn", "error"]
_POLICY: Setting[ImplicitComm] = Setting("shardwise_implicit_comm", lambda: "warn")


# Each rank would draw numbers of its own, and replicas would differ.
_RANDOM = (
    "bernoulli bernoulli_ binomial cauchy_ dropout dropout_ dropout1d dropout2d dropout3d "
    "alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ exponential_ geometric_ gumbel_softmax log_normal_ multinomial "
    "native_dropout normal normal_ poisson rand_like randint_like randn_like random_ rrelu rrelu_ "
    "trunc_normal_ uniform_ _standard_gamma"
)


class ImplicitCommWarning(UserWarning):
    """A torch function gathered tensors to do its work."""


def implicit_comm(policy: ImplicitComm) -> Change[ImplicitComm]:
    """Sets what happens when a torch function has to gather its tensors: allow, warn or error.

    "warn" (the default) warns once per function and place in the code. In a `with` statement, for
    its block only.
    """
    if policy not in get_args(ImplicitComm):
        raise ArgumentValueError(
            "implicit_comm", expected=f"one of {', '.join(get_args(ImplicitComm))}", got=policy
        )
    return _POLICY.change(policy)


@register_fallback
def _gather_and_compute(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[ShardedTensor]
) -> Any:
    """What `func` gives on the full tensors. All ranks call it."""
    first = tensors[0]._state
    if getattr(func, "__name__", "") in _RANDOM.split():
        raise OpError(
            f"{function_name(func)} of a ShardedTensor: each rank would draw its own numbers",
            rank=first.rank,
            fix="Fill the tensor by torch.nn.init, or take shardwise.sharded_tensor.rand.",
        )
    _announce(func, [tensor._state for tensor in tensors])
    if isinstance(kwargs.get("out"), ShardedTensor):
        raise OpError(
            f"{function_name(func)} with a sharded out=",
            rank=first.rank,
            fix="Leave out= away and use the result.",
        )
    full: dict[int, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        if id(value) not in full:
            full[id(value)] = replicated_state(value._state).shards[0]
        return full[id(value)]

    changed = _changed(args, kwargs) if _is_in_place(func) else None
    if isinstance(changed, ShardedTensor):
        check_writable(changed, func)
        full[id(changed)] = plain(changed).clone()
    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if isinstance(changed, ShardedTensor):
        value = full[id(changed)]
        if value.shape == changed.shape:
            changed.copy_(value)
        else:  # t_, squeeze_, ...
            layout = replicated_layout(tuple(value.shape), first)
            adopt(changed, changed._state.with_carriers([value], layout=layout, spec=None))
        return changed

    copies = [full[id(tensor)] for tensor in tensors if _is_copy(full[id(tensor)], tensor)]

    def everywhere(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        layout = replicated_layout(tuple(value.shape), first)
        # A view of a gathered copy: what is written into it would not reach the tensor.
        is_view = any(value._is_view() and value._base is _root(copy) for copy in copies)
        return wrap(first.with_carriers([value], layout=layout, spec=None, is_lost_view=is_view))

    return tree_map(everywhere, result)


def _is_copy(full: torch.Tensor, tensor: ShardedTensor) -> bool:
    return all(full is not shard for shard in tensor._state.shards)


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place function changes: its first."""
    named = [kwargs[name] for name in ("self", "input", "tensor") if name in kwargs]
    return next(iter([*args, *named]), None)


def _is_in_place(func: Any) -> bool:
    """`add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name[2:3] == "i" and f"__{name[3:]}" in dir(torch.Tensor))
    return name.endswith("_")


def _announce(func: Any, states: list[State]) -> None:
    policy = _POLICY.get()
    moved = [s for s in states if replicated_layout(s.layout.shape, s) != s.layout]
    if policy == "allow" or not moved:
        return
    plans = [
        plan_reshard(s.layout, replicated_layout(s.layout.shape, s), s.dtype.itemsize)
        for s in moved
    ]
    what = (
        f"{function_name(func)} gathers its tensors ({'; '.join(str(s.layout) for s in moved)}): "
        f"{format_bytes(sum(plan.total_bytes for plan in plans))} between ranks"
    )
    fix = (
        "There is no sharded rule for it yet. Work on st.local_shards(), write one with "
        'custom_sharded_op_impl, or accept it: shardwise.implicit_comm("allow").'
    )
    if policy == "error":
        raise OpError(what, rank=moved[0].rank, fix=fix)
    warnings.warn(f"{what}. {fix}", ImplicitCommWarning, stacklevel=4)
