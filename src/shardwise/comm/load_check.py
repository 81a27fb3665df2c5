"""What callers pass to `execute`: checked in words, after a quick look found something wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.comm.reducing import check_reducible
from shardwise.errors import ArgumentTypeError, LayoutError
from shardwise.transfer import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.load import Transfer
    from shardwise.transfer.program import LocalShapes

__all__ = [
    "check_apart",
    "check_arguments",
    "check_list",
    "check_out",
    "check_transfer",
    "is_writable",
    "name_of",
    "span",
]


def check_list(transfers: object, rank: int) -> None:
    """Raises unless it is a list; a Transfer, which is a tuple, is none."""
    if not isinstance(transfers, list | tuple) or hasattr(transfers, "plan"):
        raise _no_transfer("transfers", "a list of Transfer", transfers, rank)


def check_transfer(transfers: Sequence[object], number: int, rank: int) -> None:
    """Raises unless this one is a `Transfer` with a plan."""
    transfer = transfers[number]
    plan = getattr(transfer, "plan", None)
    if not isinstance(plan, TransferPlan):
        got = plan if hasattr(transfer, "plan") else transfer
        what = "transfer" if len(transfers) == 1 else f"transfers[{number}]"
        raise _no_transfer(what, "a Transfer with a TransferPlan", got, rank)


def _no_transfer(what: str, expected: str, got: object, rank: int) -> ArgumentTypeError:
    return ArgumentTypeError(
        what,
        rank=rank,
        expected=expected,
        got=type(got).__name__,
        fix="Make the plan with shardwise.plan_reshard(source_layout, target_layout, itemsize); "
        "for several tensors, pass a list of shardwise.comm.Transfer.",
    )


def check_arguments(
    transfer: Transfer, shapes: LocalShapes, members: Communicator, name: str
) -> torch.dtype:
    """The tensor's dtype; raises if what this rank passed does not fit the plan."""
    out, rank = transfer.out, members.rank
    _check_tensors(transfer.shards, shapes.source, members, f"{name} shards")
    if out is not None:
        _check_tensors(out, shapes.target, members, f"{name} out")
        check_out(out, members, f"{name} out")
    return _common_dtype(transfer, rank, name)


def check_out(tensors: Sequence[torch.Tensor], members: Communicator, what: str) -> None:
    """Raises unless values can be received straight into each of these tensors."""
    _check_dense(tensors, members, what)
    for tensor in tensors:
        if tensor.is_conj() or tensor.is_neg():
            raise LayoutError(
                what,
                rank=members.rank,
                expected="tensors whose memory is their values",
                got="a conjugate or negative view",
                fix="Pass a tensor of its own, e.g. torch.empty_like(tensor).",
            )
        if not _lies_apart(tensor):
            raise LayoutError(
                what,
                rank=members.rank,
                expected="tensors whose elements have a place in memory each",
                got=f"one of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
                fix="Pass a tensor of its own, e.g. torch.empty(shape), and expand later.",
            )
        if not is_writable(tensor):
            raise LayoutError(
                what,
                rank=members.rank,
                expected="tensors that may be written here",
                got="an inference tensor, outside of torch.inference_mode()",
                fix="Call it inside torch.inference_mode(), or pass tensors made outside.",
            )


def _check_tensors(
    tensors: object, shapes: tuple[tuple[int, ...], ...], members: Communicator, what: str
) -> None:
    """Raises unless these are dense tensors of the given shapes."""
    rank, got = members.rank, type(tensors).__name__
    listed = tensors if isinstance(tensors, list | tuple) else None
    strangers = [one for one in listed or () if not isinstance(one, torch.Tensor)]
    if listed is None or strangers:
        raise ArgumentTypeError(
            what,
            rank=rank,
            expected="a list of tensors",
            got=f"{got} with a {type(strangers[0]).__name__}" if strangers else got,
            fix="Pass one tensor per box of this rank; an empty list where it has none.",
        )
    if tuple([tensor.shape for tensor in listed]) != shapes:
        raise LayoutError(
            what,
            rank=rank,
            expected=f"shapes {list(shapes)}, one for each box of this rank",
            got=[tuple(tensor.shape) for tensor in listed],
            fix="Pass one tensor per box, in the order of layout.boxes_of(rank).",
        )
    _check_dense(listed, members, what)


def _check_dense(tensors: Sequence[torch.Tensor], members: Communicator, what: str) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise LayoutError(
                what,
                rank=members.rank,
                expected="dense tensors",
                got=f"one of layout {tensor.layout} and dtype {tensor.dtype}",
                fix="Call to_dense() or dequantize() first.",
            )
        if tensor.is_meta and members.wire_device.type != "meta":
            raise LayoutError(
                what,
                rank=members.rank,
                expected="tensors with data",
                got="one on the meta device",
                fix="Materialise it first, e.g. torch.empty_like(tensor, device='cpu').",
            )


def _common_dtype(transfer: Transfer, rank: int, name: str) -> torch.dtype:
    """The dtype of all that was given; raises if there is none, or it does not fit the plan."""
    plan = transfer.plan
    dtypes = {tensor.dtype for tensor in (*transfer.shards, *(transfer.out or ()))}
    if transfer.dtype is not None:
        if not isinstance(transfer.dtype, torch.dtype):
            raise ArgumentTypeError(
                f"{name} dtype", rank=rank, expected="a torch.dtype", got=repr(transfer.dtype)
            )
        dtypes.add(transfer.dtype)
    if len(dtypes) != 1:
        raise ArgumentTypeError(
            f"{name} dtype",
            rank=rank,
            expected="one for all shards and out",
            got=sorted(map(str, dtypes)) or "no shards, no out and no dtype",
            fix="Convert them first; moving does not change the dtype."
            if dtypes
            else "Pass dtype=..., which a rank without shards has to say.",
        )
    (dtype,) = dtypes
    if dtype.itemsize != plan.itemsize:
        raise LayoutError(
            f"{name} dtype",
            rank=rank,
            expected=f"elements of {plan.itemsize} bytes, as the plan says",
            got=f"{dtype} of {dtype.itemsize}",
            fix="Plan with the dtype's itemsize.",
        )
    for op in (plan.source.pending, plan.target.pending):
        if op is not None:
            check_reducible(dtype, op, what=name)
    return dtype


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether torch lets it be written: an inference tensor only in inference mode."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()


def check_apart(transfers: Sequence[Transfer], rank: int) -> None:
    """Raises if an output shares memory with a shard or another output of the same exchange.

    Either would lose data half-way. Looks at the span of memory between first and last element.
    """
    spans = [
        (*span(tensor), is_out, number)
        for number, transfer in enumerate(transfers)
        for is_out, tensors in ((False, transfer.shards), (True, transfer.out or ()))
        for tensor in tensors
        if tensor.numel() and not tensor.is_meta  # all of which are at address 0
    ]
    last: dict[bool, tuple[int, int]] = {}  # shards, outputs: where the furthest of them ends
    for start, stop, is_out, number in sorted(spans):
        for other_is_out, (end, other) in last.items():
            if start < end and (is_out or other_is_out):
                here = f"{name_of(transfers, number)} {'out' if is_out else 'shards'}"
                there = f"{name_of(transfers, other)} {'out' if other_is_out else 'shards'}"
                out, what = (here, there) if is_out else (there, here)
                raise LayoutError(
                    out,
                    rank=rank,
                    expected="memory that nothing else in the exchange uses",
                    got=f"a tensor that shares memory with {what}",
                    fix="Pass new tensors, or leave out= away.",
                )
        last[is_out] = max(last.get(is_out, (0, 0)), (stop, number))


def name_of(transfers: Sequence[Transfer], number: int) -> str:
    """The name of one of the transfers, and its place in the list if it shares the name."""
    name = transfers[number].name
    is_only = sum(getattr(one, "name", None) == name for one in transfers) == 1
    return repr(name) if is_only else f"{name!r} (transfers[{number}])"


def _lies_apart(tensor: torch.Tensor) -> bool:
    """Whether no two elements share a place: every stride goes past all that smaller ones reach.

    Strides that interlock without meeting are refused, too; torch makes none.
    """
    steps = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    reach = 0
    for stride, size in steps:
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of the tensor's elements, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
