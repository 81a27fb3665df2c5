"""The functions that take lists of tensors: one table, from each to what it does at a position.

`torch._foreach_add_(targets, others, alpha=2)` is `target.add_(other, alpha=2)` at every position.
Where all tensors of a position lie alike, the local pieces of all positions go through one call of
the list function itself; the others go through the function of one position, which has a rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.ops.names import functions_named

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOREACH", "FUSED", "NAMED", "Foreach"]

_ELEMENTWISE = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
    sigmoid sign sin sinh sqrt sub tan tanh trunc
"""
# Under these names there is one kind only: copy_ and zero_ in place, clone not.
_COPYING = "clone copy_ zero_"
# Optimizers in one call, which change their parameters and all of their state.
_FUSED = "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_"
# Arguments that have the same name in the function of one position.
NAMED = frozenset({"alpha", "memory_format", "non_blocking"})


class Foreach(NamedTuple):
    """A function of lists that works position by position."""

    # Takes what the list function takes, of one position; by name only what is in `NAMED`.
    single: Callable[..., Any]
    is_in_place: bool  # whether it changes the tensors of its first list
    is_elementwise: bool = True  # whether pieces that lie alike can be computed by themselves


def _single(name: str) -> Callable[..., Any]:
    """What a list function does at one position."""
    base = name.removesuffix("_")
    if base in ("maximum", "minimum"):
        return _extreme(name)
    if name == "pow":
        return torch.pow  # whose first argument may be a number
    of_tensor: Callable[..., Any] = getattr(torch.Tensor, name)
    return _with_factor(of_tensor) if base in ("addcmul", "addcdiv") else of_tensor


def _extreme(name: str) -> Callable[..., Any]:
    """`maximum` and `minimum`, which take numbers in lists only."""
    of_tensors: Any = getattr(torch, name.removesuffix("_"))
    of_number: Any = getattr(torch.Tensor, "clamp_min" if "max" in name else "clamp_max")

    def run(tensor: torch.Tensor, other: Any) -> torch.Tensor:
        found = (of_tensors if isinstance(other, torch.Tensor) else of_number)(tensor, other)
        return tensor.copy_(found) if name.endswith("_") else found

    return run


def _with_factor(of_tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`addcmul` and `addcdiv`, whose factor may not be told from other numbers by its place."""
    return lambda tensor, first, second, value=1: of_tensor(tensor, first, second, value=value)


def _table() -> dict[Any, Foreach]:
    names = [*_ELEMENTWISE.split(), *(f"{name}_" for name in _ELEMENTWISE.split())]
    found = {name: Foreach(_single(name), name.endswith("_")) for name in names}
    found |= {
        name: Foreach(getattr(torch.Tensor, name), name.endswith("_")) for name in _COPYING.split()
    }
    found["mm"] = Foreach(torch.mm, is_in_place=False, is_elementwise=False)
    return {
        function: one
        for name, one in found.items()
        for function in functions_named([f"_foreach_{name}"])
    }


FOREACH: dict[Any, Foreach] = _table()  # torch's functions of lists -> how they are carried out
FUSED: list[Any] = functions_named(_FUSED.split())  # steps of fused optimizers
