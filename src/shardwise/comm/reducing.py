"""What a pending operation does to tensors: its identity, one more addend, an average's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError

if TYPE_CHECKING:
    from shardwise.geometry import ReduceOp
    from shardwise.transfer.program import Scale

__all__ = ["add_to", "check_reducible", "fill_identity", "reduce_into", "rescale"]

# torch has no arithmetic in these dtypes; one that holds all their values does it, value by value.
_WIDER = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


def check_reducible(dtype: torch.dtype, op: ReduceOp, *, what: str) -> None:
    """Raises if `op` has no meaning for `dtype`."""
    reason = None
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        reason = "a floating-point or complex dtype"
    if op in ("max", "min") and dtype.is_complex:
        reason = "a dtype with an order"
    if op != "product" and dtype == torch.uint64:
        reason = "a dtype that torch can add and compare"
    if op in ("sum", "avg") and dtype == torch.float8_e8m0fnu:
        reason = "a dtype with a zero"
    if reason is not None:
        raise OpError(
            f"{what}, pending {op}", expected=reason, got=dtype, fix="Convert the tensor first."
        )


def add_to(result: torch.Tensor, addend: torch.Tensor, op: ReduceOp) -> None:
    """`result = op(result, addend)`, in place."""
    wider = _WIDER.get(result.dtype)
    if wider is not None:
        wide = result.to(wider)
        add_to(wide, addend.to(wider), op)
        result.copy_(wide)
    elif op in ("sum", "avg"):
        result.add_(addend)
    elif op == "product":
        result.mul_(addend)
    else:
        pick = torch.maximum if op == "max" else torch.minimum
        pick(result, addend, out=result)


def reduce_into(
    result: torch.Tensor, first: torch.Tensor, second: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    """`result = op(first, second)`, which is returned; `first` may be the result itself."""
    if op in ("sum", "avg") and result.dtype not in _WIDER:
        return torch.add(first, second, out=result)  # one pass over memory instead of two
    if first is not result:
        result.copy_(first)
    add_to(result, second, op)
    return result


def fill_identity(result: torch.Tensor, op: ReduceOp) -> None:
    """The value that changes nothing when it is reduced with another."""
    if op in ("sum", "avg"):
        result.zero_()
    elif op == "product":
        result.fill_(1)
    else:
        result.fill_(_extreme(result.dtype, lowest=op == "max"))


def _extreme(dtype: torch.dtype, *, lowest: bool) -> Any:
    if dtype == torch.bool:
        return not lowest
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return limits.min if lowest else limits.max
    if dtype in _WIDER and dtype != torch.float8_e5m2:  # which has infinities
        limit = torch.finfo(dtype)
        return limit.min if lowest else limit.max
    return -torch.inf if lowest else torch.inf


def rescale(result: torch.Tensor, scale: Scale) -> None:
    """`result * times / over`, in place."""
    wider = _WIDER.get(result.dtype)
    if wider is not None:
        result.copy_(result.to(wider) * scale.times / scale.over)
        return
    if scale.times != 1:
        result.mul_(scale.times)
    if scale.over != 1:
        result.div_(scale.over)
