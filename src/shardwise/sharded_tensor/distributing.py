"""Sharded tensors from plain ones: scattered from one rank, cut on each, or taken as they are."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from shardwise.arguments import whole_number, whole_numbers
from shardwise.comm.agreement import agree, explain
from shardwise.comm.checks import check_timeout, should_check
from shardwise.comm.differentiable import Exchange, carriers_of, exchange
from shardwise.comm.flights import as_bytes
from shardwise.comm.process_group import communicator
from shardwise.comm.tracing import recorded
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.placement import placement_at
from shardwise.sharded_tensor.factories import state_of_pieces
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.state import check_requires_grad, make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout

__all__ = ["as_local_rows", "as_replicated", "digest", "distribute", "from_callback"]


def distribute(
    tensor: torch.Tensor,
    spec: ShardingSpec,
    *,
    src_rank: int | None = 0,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """A full tensor, cut by `spec`: new leaf shards that require grad if `tensor` does.

    All ranks call it. The data are those of the rank at position `src_rank` of the group, whose
    boxes go straight to their owners; the other ranks' tensors only say size and dtype, and may be
    on the meta device. With `src_rank=None` every rank has the same tensor and cuts its own part:
    nothing is sent, and `shardwise.set_check("debug")` compares the data by hash.
    """
    members = communicator(process_group)
    problem: Exception | None = None
    values: dict[str, object] = {"src_rank": src_rank}
    try:
        _check_full(tensor, members, src_rank)
        if not isinstance(spec, ShardingSpec):
            raise ArgumentTypeError(
                "sharding_spec",
                expected="a ShardingSpec",
                got=type(spec).__name__,
                fix="E.g. shardwise.chunk(0).",
            )
        shape = tuple(tensor.shape)
        layout = spec.layout(shape)
        members.ranks.check_members(layout.ranks, what=f"{type(spec).__name__}'s placements")
        devices = spec.local_devices(shape, members.rank)
        if tensor.requires_grad:
            check_requires_grad(layout, tensor.dtype, members.rank)
        values |= {"size": shape, "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
        values |= {"sharding_spec": layout}
        if src_rank is None and should_check(hot=True):
            values["data"] = digest(tensor)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("distribute", values, group=members, problem=problem, phrases=_SEED_PHRASES)
    with torch.no_grad():
        if src_rank is None:
            source = replicated(shape, tuple(sorted(members.ranks)))
        else:
            source = replicated(shape, (members.ranks.rank_at(src_rank),))
        mine = [tensor.detach()] if members.rank in source.ranks else []
        job = Exchange(source, layout, tuple(t.device for t in mine), devices, members)
        carriers = exchange(job, carriers_of(mine, dtype=tensor.dtype, device=_home(tensor)))
    for carrier in carriers:
        carrier.requires_grad_(tensor.requires_grad)
    shards = carriers if layout.boxes_of(members.rank) else ()
    return wrap(
        make_state(
            layout,
            shards,
            group=members,
            spec=spec,
            dtype=tensor.dtype,
            device=carriers[0].device,
            requires_grad=tensor.requires_grad,
        )
    )


# What callers of the seed look for in the message.
_SEED_PHRASES = {
    "src_rank": "src_rank of one rank does not match with src_rank of another",
    "sharding_spec": "sharding_spec of one rank does not match with sharding_spec of another",
}


def _home(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _check_full(tensor: object, members: Communicator, src_rank: object) -> None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, ShardedTensor):
        raise ArgumentTypeError(
            "tensor to distribute",
            rank=members.rank,
            expected="a plain torch.Tensor",
            got=type(tensor).__name__,
            fix="A ShardedTensor is resharded: shardwise.reshard(st, spec)."
            if isinstance(tensor, ShardedTensor)
            else None,
        )
    if src_rank is not None:
        src_rank = members.ranks.rank_at(whole_number(src_rank, "src_rank"))
    is_source = src_rank is None or src_rank == members.rank
    if is_source and tensor.layout == torch.strided and not tensor.is_contiguous():
        raise ArgumentValueError(
            "input tensor is not a contiguous Tensor",
            rank=members.rank,
            got=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            fix="Pass tensor.contiguous().",
        )
    if tensor.layout != torch.strided:
        raise ArgumentValueError(
            "Only torch.strided layout is currently supported",
            rank=members.rank,
            got=tensor.layout,
        )
    if is_source and tensor.is_meta:
        raise ArgumentValueError(
            "tensor to distribute",
            rank=members.rank,
            expected="data on the source rank",
            got="a meta tensor",
            fix="Shard a meta tensor by shardwise.sharded_tensor.empty(spec_on_meta, size).",
        )


def digest(tensor: torch.Tensor) -> str:
    """Digest of the values, bit for bit."""
    data = as_bytes(tensor.detach().cpu().contiguous()).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def from_callback(
    spec: ShardingSpec,
    size: Sequence[int],
    fn: Callable[[tuple[slice, ...]], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """A sharded tensor whose pieces `fn` makes, so that no rank ever holds the whole.

    `fn` gets the index slices of a box and returns that piece; it is called once for each local
    box, addends of a pending sum included. All ranks call. Pieces are copied to the spec's device,
    and to `dtype` (default: torch's default dtype).

    >>> import shardwise
    >>> table = torch.arange(24.0).view(4, 6)
    >>> def first_row(rank):
    ...     st = shardwise.from_callback(shardwise.chunk(1), (4, 6), lambda index: table[index])
    ...     return st.local_tensor()[0].tolist()
    >>> shardwise.run_local(lambda rank: first_row(rank), 2)
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    members = communicator(process_group)

    def make(box: Box, device: torch.device) -> torch.Tensor:
        piece: Any = fn(box.slices())
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != box.shape:
            got = tuple(piece.shape) if isinstance(piece, torch.Tensor) else type(piece).__name__
            raise ArgumentValueError(
                f"piece {box} from the callback",
                rank=members.rank,
                expected=f"a tensor of shape {box.shape}",
                got=got,
            )
        return piece.detach().to(device=device, dtype=kind, copy=True).contiguous()

    return wrap(
        state_of_pieces(
            spec,
            [size],
            make,
            dtype=kind,
            call="from_callback",
            may_fail=True,
            requires_grad=requires_grad,
            process_group=process_group,
        )
    )


def as_replicated(x: torch.Tensor, *, process_group: ProcessGroup | None = None) -> ShardedTensor:
    """A plain tensor that every rank of the group has, as a replicated one. Copies nothing.

    Gradients flow back to `x`, and are equal on all ranks. Nothing is sent; under
    `shardwise.set_check("debug")` the data are compared by hash.
    """
    members = communicator(process_group)
    _check_plain(x, "as_replicated", members.rank)
    if should_check(hot=True):
        values = {"size": tuple(x.shape), "dtype": x.dtype, "requires_grad": x.requires_grad}
        agree("as_replicated", values | {"data": digest(x)}, group=members, hot=True)
    layout = replicated(tuple(x.shape), tuple(sorted(members.ranks)))
    return wrap(make_state(layout, [x], group=members))


def as_local_rows(
    x: torch.Tensor,
    sizes: Sequence[int] | None = None,
    *,
    process_group: ProcessGroup | Communicator | None = None,
) -> ShardedTensor:
    """Each rank's own rows of a global batch, in rank order, as one tensor. Copies nothing.

    `sizes` are the row counts of all ranks of the group; without them the ranks exchange theirs,
    16 bytes each, and compare the rest of the shape. Gradients flow back to `x`.
    """
    members = communicator(process_group)
    counts = _row_counts(x, members) if sizes is None else _told_counts(x, sizes, members)
    return wrap(make_state(_rows(tuple(x.shape[1:]), counts, members), [x], group=members))


def _check_rows(x: torch.Tensor, members: Communicator) -> None:
    _check_plain(x, "as_local_rows", members.rank)
    if x.dim() == 0:
        raise ArgumentValueError(
            "x of as_local_rows", rank=members.rank, expected="at least one dim", got="a 0-d tensor"
        )


def _told_counts(x: torch.Tensor, sizes: object, members: Communicator) -> tuple[int, ...]:
    """The row counts that the caller says; compared in "debug" only, since nothing is exchanged."""
    problem: Exception | None = None
    counts: tuple[int, ...] = ()
    try:
        _check_rows(x, members)
        counts = _checked_counts(x, sizes, members)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree("as_local_rows", {"sizes": counts}, group=members, hot=True, problem=problem)
    return counts


def _checked_counts(x: torch.Tensor, sizes: object, members: Communicator) -> tuple[int, ...]:
    counts = whole_numbers(sizes, "sizes of as_local_rows")
    if len(counts) != len(members.ranks):
        raise ArgumentValueError(
            "sizes of as_local_rows",
            rank=members.rank,
            expected=f"{len(members.ranks)} counts, one per rank of the group",
            got=list(counts),
        )
    mine = counts[members.ranks.group_rank(members.rank)]
    if mine != x.shape[0]:
        raise ArgumentValueError(
            "x of as_local_rows",
            rank=members.rank,
            expected=f"{mine} rows, as sizes say",
            got=x.shape[0],
        )
    return counts


def _row_counts(x: torch.Tensor, members: Communicator) -> tuple[int, ...]:
    """Everybody's number of rows, once the rows are known to be of one kind."""
    problem: Exception | None = None
    values: dict[str, object] = {}
    sent = bytes(16)
    try:
        _check_rows(x, members)
        values = {"row": tuple(x.shape[1:]), "dtype": x.dtype, "requires_grad": x.requires_grad}
        kind = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        sent = x.shape[0].to_bytes(8) + kind
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    is_alone = len(members.ranks) == 1
    with recorded("exchange row counts", members, len(sent)):
        found = [sent] if is_alone else members.compare(sent, timeout=check_timeout())
    if problem is not None or any(one[8:] != sent[8:] for one in found):
        explain("as_local_rows", values, group=members, problem=problem)
    return tuple(int.from_bytes(one[:8]) for one in found)


def _rows(inner: tuple[int, ...], counts: Sequence[int], members: Communicator) -> Layout:
    placements = [placement_at(rank, "cpu") for rank in members.ranks]
    return ChunkShardingSpec(0, placements, counts).layout((sum(counts), *inner))


def _check_plain(x: object, what: str, rank: int) -> None:
    if not isinstance(x, torch.Tensor) or isinstance(x, ShardedTensor):
        raise ArgumentTypeError(
            f"x of {what}", rank=rank, expected="a plain torch.Tensor", got=type(x).__name__
        )
    if x.layout != torch.strided:
        raise ArgumentValueError(
            f"x of {what}: Only torch.strided layout is currently supported",
            rank=rank,
            got=x.layout,
        )
