"""Sharded tensors from plain ones: scattered from one rank, cut on each, or taken as they are."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from shardwise.arguments import whole_numbers
from shardwise.comm.agreement import agree, agreed_numbers, to_agree_on
from shardwise.comm.checks import should_check
from shardwise.comm.flights import as_bytes
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentValueError
from shardwise.placement import placement_at
from shardwise.sharded_tensor.factories import state_of_pieces
from shardwise.sharded_tensor.known_cuts import cut_again, keep_cut, known_cut
from shardwise.sharded_tensor.plain_tensors import check_strided, checked_plain
from shardwise.sharded_tensor.progress import logged_phase
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.scattering import SEED_PHRASES, checked_full, is_source, scatter_one
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout
    from shardwise.sharding_spec.spec import ShardingSpec

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
    known = known_cut(tensor, spec, src_rank, members)
    if known is not None:
        return cut_again(known, tensor, spec, members)
    problem: Exception | None = None
    values: dict[str, object] = {"src_rank": src_rank}
    try:
        full = checked_full(tensor, spec, members, src_rank=src_rank)
        if tensor.is_meta and is_source(members, src_rank):
            raise ArgumentValueError(
                "tensor to distribute",
                rank=members.rank,
                expected="data on the source rank",
                got="a meta tensor",
                fix="Shard a meta tensor by shardwise.sharded_tensor.empty(spec_on_meta, size).",
            )
        values |= full.compared
        if src_rank is None and should_check(hot=True):
            values["data"] = digest(tensor)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    # The data fly beside what is compared. [Note: early messages] in `comm/agreement.py`
    agreement = to_agree_on(
        "distribute", values, group=members, problem=problem, phrases=SEED_PHRASES
    )
    with logged_phase("distributing", full.nbytes, members):
        made = scatter_one(full, members, src_rank=src_rank, agreement=agreement)
    keep_cut(full, members, src_rank=src_rank)
    return made


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
        if piece.is_meta and device.type != "meta":
            raise ArgumentValueError(
                f"piece {box} from the callback",
                rank=members.rank,
                expected=f"data, for {device}",
                got="a meta tensor",
                fix="Return values; a tensor on the meta device comes of a spec on it.",
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


def as_replicated(
    x: torch.Tensor, *, process_group: ProcessGroup | Communicator | None = None
) -> ShardedTensor:
    """A plain tensor that every rank of the group has, as a replicated one. Copies nothing.

    Gradients flow back to `x`, and are equal on all ranks. Nothing is sent; under
    `shardwise.set_check("debug")` size, dtype and data (by hash) are compared.
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
    mine = 0
    try:
        _check_rows(x, members)
        values = {"row": tuple(x.shape[1:]), "dtype": x.dtype, "requires_grad": x.requires_grad}
        mine = x.shape[0]
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    return agreed_numbers(
        "as_local_rows", values, mine, group=members, doing="exchange row counts", problem=problem
    )


def _rows(inner: tuple[int, ...], counts: Sequence[int], members: Communicator) -> Layout:
    placements = [placement_at(rank, "cpu") for rank in members.ranks]
    return ChunkShardingSpec(0, placements, counts).layout((sum(counts), *inner))


def _check_plain(x: object, what: str, rank: int) -> None:
    check_strided(checked_plain(x, f"x of {what}", rank), rank, what=f"x of {what}")
