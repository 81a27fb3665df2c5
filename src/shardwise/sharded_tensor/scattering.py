"""Full tensors of one rank, or of all, cut by specs: many in one exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.arguments import whole_number
from shardwise.comm.differentiable import carriers_of, exchange, exchange_of, home_of, transfer_of
from shardwise.comm.executor import execute_all
from shardwise.errors import ArgumentTypeError
from shardwise.sharded_tensor.plain_tensors import check_contiguous, check_strided, checked_plain
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.sizes_and_specs import home_device
from shardwise.sharded_tensor.state import check_requires_grad, make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec.on_device import on_device
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.agreement import Agreement
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Carriers, Exchange
    from shardwise.comm.load import Transfer
    from shardwise.geometry import Layout

__all__ = [
    "SEED_PHRASES",
    "Full",
    "checked_full",
    "is_source",
    "on_meta",
    "scatter",
    "scatter_one",
    "transfer_to_cut",
]

# What callers of the seed look for in the message when ranks differ.
SEED_PHRASES = {
    "src_rank": "src_rank of one rank does not match with src_rank of another",
    "sharding_spec": "sharding_spec of one rank does not match with sharding_spec of another",
}


@dataclass(frozen=True, slots=True)
class Full:
    """A full tensor, found right, and how it is to be cut."""

    tensor: torch.Tensor
    spec: ShardingSpec
    layout: Layout
    devices: tuple[torch.device, ...]  # of this rank's pieces

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def compared(self) -> dict[str, object]:
        """What all ranks must agree on."""
        return {
            "size": tuple(self.tensor.shape),
            "dtype": self.tensor.dtype,
            "requires_grad": self.tensor.requires_grad,
            "sharding_spec": self.layout,
        }


def is_source(members: Communicator, src_rank: int | None) -> bool:
    """Whether this rank's data count; raises if `src_rank` is no position in the group."""
    if src_rank is None:
        return True
    return members.ranks.rank_at(whole_number(src_rank, "src_rank")) == members.rank


def checked_full(
    given: object,
    spec: object,
    members: Communicator,
    *,
    src_rank: int | None,
    name: str = "input tensor",
) -> Full:
    """The tensor and the spec, unless they do not fit; `name` is the tensor's, in messages."""
    has_data = is_source(members, src_rank)
    tensor = checked_plain(
        given,
        f"{name}, which is to be distributed",
        members.rank,
        fix="A ShardedTensor is resharded: shardwise.reshard(st, spec).",
    )
    check_strided(tensor, members.rank, what=name)
    if has_data:
        check_contiguous(tensor, name, members.rank)
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
    if tensor.requires_grad:
        check_requires_grad(layout, tensor.dtype, members.rank)
    return Full(tensor, spec, layout, spec.local_devices(shape, members.rank))


def scatter(
    fulls: Sequence[Full],
    members: Communicator,
    *,
    src_rank: int | None,
    max_bytes: int | None = None,
) -> list[ShardedTensor]:
    """The tensors, cut: new leaves, all moved in one exchange. All ranks call it, having agreed."""
    jobs = [_job(full, members, src_rank) for full in fulls]
    with torch.no_grad():
        held = [_held(full, job) for full, job in zip(fulls, jobs, strict=True)]
        moved = _moved_together(jobs, held, members, max_bytes)
    return [_made(full, carriers, members) for full, carriers in zip(fulls, moved, strict=True)]


def scatter_one(
    full: Full,
    members: Communicator,
    *,
    src_rank: int | None,
    agreement: Agreement | None,
) -> ShardedTensor:
    """The same of one tensor; `agreement` is yet to be reached."""
    job = _job(full, members, src_rank)
    with torch.no_grad():
        moved = exchange(job, _held(full, job), agreement=agreement)
    return _made(full, moved, members)


def transfer_to_cut(full: Full, members: Communicator, *, src_rank: int | None) -> Transfer:
    """What this rank brings to that exchange."""
    job = _job(full, members, src_rank)
    return transfer_of(job, _held(full, job))


def _moved_together(
    jobs: Sequence[Exchange],
    held: Sequence[Carriers],
    members: Communicator,
    max_bytes: int | None,
) -> list[Carriers]:
    transfers = [transfer_of(job, one) for job, one in zip(jobs, held, strict=True)]
    moved = execute_all(transfers, group=members, max_bytes=max_bytes)
    return [
        carriers_of(shards, dtype=one[0].dtype, device=home_of(job, one))
        for shards, job, one in zip(moved, jobs, held, strict=True)
    ]


def _job(full: Full, members: Communicator, src_rank: int | None) -> Exchange:
    owners = (
        tuple(sorted(members.ranks)) if src_rank is None else (members.ranks.rank_at(src_rank),)
    )
    source = replicated(full.layout.shape, owners)
    here = (full.tensor.device,) if members.rank in owners else ()
    return exchange_of(source, full.layout, here, full.devices, members)


def _held(full: Full, job: Exchange) -> tuple[torch.Tensor, ...]:
    """What this rank brings: on ranks other than the source, nothing of `full`'s data."""
    home = torch.device("cpu") if full.tensor.is_meta else full.tensor.device
    mine = [full.tensor.detach()] if job.source_devices else []
    return carriers_of(mine, dtype=full.tensor.dtype, device=home)


def on_meta(full: Full, members: Communicator) -> ShardedTensor:
    """The tensor, cut, without data; nothing is sent. All ranks call it, having agreed."""
    boxes = full.layout.boxes_of(members.rank)
    shards = [torch.empty(box.shape, dtype=full.tensor.dtype, device="meta") for box in boxes]
    meta = torch.device("meta")
    spec = on_device(full.spec, full.layout.shape, meta)
    carriers = carriers_of(shards, dtype=full.tensor.dtype, device=meta)
    return _made(full, carriers, members, spec=spec)


def _made(
    full: Full, carriers: Carriers, members: Communicator, *, spec: ShardingSpec | None = None
) -> ShardedTensor:
    spec, requires_grad = full.spec if spec is None else spec, full.tensor.requires_grad
    shards = carriers if full.layout.boxes_of(members.rank) else ()
    for shard in shards:
        shard.requires_grad_(requires_grad)
    state = make_state(
        full.layout,
        shards,
        group=members,
        spec=spec,
        dtype=full.tensor.dtype,
        device=None if shards else home_device(spec, full.layout.shape),
        requires_grad=requires_grad,
    )
    return wrap(state)
