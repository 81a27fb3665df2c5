"""The argument `out=` of torch functions: where they write what they would return.

The function computes without it, and what it returns is copied into `out`, whatever layout that
has. Whether torch would take these tensors is asked of torch itself, on tensors without data.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from shardwise._torch_compat import RandomMarks, tree_leaves, tree_map
from shardwise.errors import OpError
from shardwise.ops.outlines import outline
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.usable import check_writable

__all__ = ["compute_into"]


def compute_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns, written into `out`, which is returned. All ranks call it."""
    outs = _sharded_outs(func, kwargs["out"])
    for out in outs:
        check_writable(out, func)
    returns = _ask_torch(func, args, kwargs, outs)
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    with torch.no_grad():
        marks = RandomMarks(tree_leaves((args, rest)), outs[0].device)
        results = func(*args, **rest)
        if marks.have_moved():
            raise OpError(
                f"{function_name(func)} with out= a ShardedTensor: each rank would draw its own "
                "numbers",
                rank=outs[0]._state.rank,
                fix="Fill the tensor by its own methods, as st.uniform_().",
            )
        given = results if isinstance(results, tuple | list) else [results]
        for out, result in zip(outs, given, strict=True):
            _check_kind(func, out, result)
            out.copy_(result)
    if not returns:
        return None
    if isinstance(results, torch.Tensor):
        return kwargs["out"]
    return type(results)(outs)


def _sharded_outs(func: Any, given: Any) -> list[ShardedTensor]:
    """The tensors to write into, all of them sharded."""
    listed = list(given) if isinstance(given, tuple | list) else [given]
    outs = [out for out in listed if isinstance(out, ShardedTensor)]
    if len(outs) != len(listed):
        raise OpError(
            f"{function_name(func)} of ShardedTensors with out=",
            expected="a ShardedTensor",
            got=", ".join(type(out).__name__ for out in listed),
            fix="Write plain.copy_(result.full_tensor()), or pass a ShardedTensor.",
        )
    return outs


def _ask_torch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[ShardedTensor]
) -> bool:
    """Raises what torch raises of these tensors, on every rank: wrong dtypes, gradients.

    Whether the function returns `out`; few do not.
    """

    def shadow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return outline(value).requires_grad_(value.requires_grad and torch.is_grad_enabled())

    shadows = [shadow(out) for out in outs]
    named = {
        name: tree_map(shadow, value)
        for name, value in kwargs.items()
        if name not in ("out", "device")  # the shadows are on no device
    }
    out = shadows[0] if isinstance(kwargs["out"], torch.Tensor) else type(kwargs["out"])(shadows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resizing, which is refused
        try:
            result = func(*tree_map(shadow, args), **named, out=out)
        except NotImplementedError:
            return True  # torch does not know without data; see `_check_kind`
    for one, made in zip(outs, shadows, strict=True):
        _check_shape(func, one, made)
    return result is not None


def _check_shape(func: Any, out: ShardedTensor, result: torch.Tensor) -> None:
    if out.shape != result.shape:
        raise OpError(
            f"{function_name(func)} with out= a ShardedTensor, which is not resized",
            rank=out._state.rank,
            expected=f"one of shape {tuple(result.shape)}",
            got=tuple(out.shape),
        )


def _check_kind(func: Any, out: ShardedTensor, result: torch.Tensor) -> None:
    _check_shape(func, out, result)
    if not torch.can_cast(result.dtype, out.dtype):
        raise OpError(
            f"{function_name(func)} with out=",
            rank=out._state.rank,
            expected=f"one that {result.dtype} can be cast to",
            got=out.dtype,
        )
