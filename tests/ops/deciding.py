"""What rules decide, without processes: layouts in, a decision out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.geometry import Layout
from shardwise.ops import RULES, Call, Decision, Operand
from shardwise.ops.work import bytes_moved
from shardwise.sharding_spec import parse_spec

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["ITEMSIZE", "RANKS", "decide", "everywhere", "layout", "moved", "pending"]

RANKS = (0, 1, 2, 3)
DTYPE = torch.float32
ITEMSIZE = DTYPE.itemsize


def layout(spec: str, shape: tuple[int, ...]) -> Layout:
    return parse_spec(spec, ranks=RANKS, device="cpu").layout(shape)


def everywhere(shape: tuple[int, ...]) -> Layout:
    return layout("replicate()", shape)


def pending(shape: tuple[int, ...]) -> Layout:
    return layout("partial()", shape)


def decide(
    function: Any,
    *args: Any,
    rank: int = 0,
    dtypes: Sequence[torch.dtype] = (),
    plain: Collection[int] = (),
    needs_grad: bool = False,
) -> Decision:
    """Of a call with tensors of these layouts; `dtypes` and `plain` are of tensors in order."""
    found: list[Operand] = []

    def seen(arg: Any) -> Any:
        if isinstance(arg, list):
            return tuple(map(seen, arg))
        if not isinstance(arg, Layout):
            return arg
        dtype = dtypes[len(found)] if dtypes else DTYPE
        found.append(Operand(arg, dtype, is_plain=len(found) in plain))
        return found[-1]

    given = tuple(map(seen, args))
    call = Call(function, given, {}, tuple(found), RANKS, rank, needs_grad)
    decision = RULES[function].decide(call)
    assert decision is not None
    return decision


def moved(decision: Decision, *held: Layout) -> int:
    """Bytes that operands in these layouts move for a decision."""
    return sum(
        bytes_moved(Operand(one, DTYPE), need)
        for one, need in zip(held, decision.needs, strict=True)
    )
