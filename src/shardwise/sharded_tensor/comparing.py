"""Whether tensors are equal, for tensors of any two layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.agreement import agreed_numbers
from shardwise.errors import ArgumentValueError, OpError
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import check_one_group, cut_state, reshard_state
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.sharded_tensor.state import State

__all__ = ["all_ranks"]

_Tensor: Any = torch.Tensor


def all_ranks(here: bool, state: State, problem: Exception | None = None) -> bool:
    """Whether it holds on every rank of the group; all of them ask.

    A rank that could not find out says so by its `problem`, and all raise. The ranks that do not
    come are named after the timeout of `set_check`.
    """
    found = agreed_numbers(
        "comparing on all ranks",
        {},
        int(here),
        group=state.comm,
        doing="compare results",
        problem=problem,
    )
    return all(found)


def _hold(tests: Iterable[bool], state: State) -> bool:
    """Whether all tests hold, here and on every rank; what one rank raises, all do."""
    here, problem = False, None
    try:
        here = all(tests)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    return all_ranks(here, state, problem)


def _together(a: torch.Tensor, b: torch.Tensor) -> tuple[State, State]:
    """Both in one layout with nothing pending: that of one of them, if it has one."""
    states = [t._state for t in (a, b) if isinstance(t, ShardedTensor)]
    check_one_group("comparing", states)
    settled = [state.layout for state in states if state.layout.pending is None]
    layout = settled[0] if settled else states[0].layout.bar
    found = [
        reshard_state(t._state, layout)
        if isinstance(t, ShardedTensor)
        else cut_state(t, states[0], layout=layout)
        for t in (a, b)
    ]
    return found[0], found[1]


def _compare(
    a: torch.Tensor, b: torch.Tensor, test: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    with torch.no_grad():
        first, second = _together(a, b)
        pairs = zip(first.shards, second.shards, strict=True)
        return _hold((test(x, y) for x, y in pairs), first)


@handles(torch.equal, _Tensor.equal)
def _equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    if input.shape != other.shape:  # perhaps on this rank only
        return all_ranks(False, _first(input, other))
    return _compare(input, other, torch.equal)


@handles(torch.allclose, _Tensor.allclose)
def _allclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    state = _first(input, other)
    try:
        _check_alike(input, other, state.rank)
    except Exception as problem:
        state.comm.tell(problem)  # to ranks that bring both into one layout
        all_ranks(False, state, problem)
    return _compare(
        input,
        other,
        lambda x, y: torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan),
    )


def _first(a: torch.Tensor, b: torch.Tensor) -> State:
    return next(t._state for t in (a, b) if isinstance(t, ShardedTensor))


def _check_alike(a: torch.Tensor, b: torch.Tensor, rank: int) -> None:
    """Raises of tensors that `allclose` does not compare."""
    if a.shape != b.shape:
        raise ArgumentValueError(
            "allclose of two tensors",
            rank=rank,
            expected="one shape",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
        )
    if a.dtype != b.dtype:
        raise OpError(
            "allclose of two tensors",
            rank=rank,
            expected="one dtype",
            got=f"{a.dtype} and {b.dtype}",
            fix="Convert one of them: st.to(other.dtype).",
        )
