"""Distributing again by the same spec what has the same size: other values, and nothing else.

All that follows from spec, size and source is kept: in a small exchange, looking at arguments takes
longer than sending.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.comm.agreement import Agreement
from shardwise.comm.checks import DEBUGGERS, is_debugging, should_check
from shardwise.comm.executor import execute
from shardwise.comm.logs import logs_phases
from shardwise.sharded_tensor.scattering import SEED_PHRASES, transfer_to_cut
from shardwise.sharded_tensor.state import State, only_layout
from shardwise.sharded_tensor.tensor import wrap
from shardwise.sharding_spec.spec import BuiltinSpec

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout
    from shardwise.sharded_tensor.scattering import Full
    from shardwise.sharded_tensor.tensor import ShardedTensor
    from shardwise.sharding_spec.spec import ShardingSpec
    from shardwise.transfer import TransferPlan

__all__ = ["KnownCut", "cut_again", "keep_cut", "known_cut"]

_MOST_KEPT = 256  # of a group
_PLAIN = torch.Tensor, torch.nn.Parameter


class KnownCut(NamedTuple):
    """What `distribute` found out about a call.

    It does not hold the spec, which may be made anew for every call, and has layouts of its own.
    """

    spec: weakref.ref[ShardingSpec]
    layout: Layout
    plan: TransferPlan
    has_data: bool  # whether this rank brings the tensor
    agreement: Agreement | None  # None in a group of one rank


def known_cut(
    tensor: object, spec: object, src_rank: object, members: Communicator
) -> KnownCut | None:
    """What is known of a call with these arguments; None if it has to be looked at.

    Whatever is special is: other kinds of tensors, what the log or a comparison of data asks for.
    """
    if type(tensor) not in _PLAIN or (type(src_rank) is not int and src_rank is not None):
        return None
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_nested:  # which has no shape
        return None
    known: KnownCut | None = members.cuts.get(_key(tensor, spec, src_rank))
    if (
        known is None
        or known.spec() is not spec  # of which only the id is the same
        or tensor.layout is not torch.strided
        or (known.has_data and not tensor.is_contiguous())
        or logs_phases()
        or (DEBUGGERS and is_debugging())
    ):
        return None
    return known


def _key(tensor: torch.Tensor, spec: object, src_rank: object) -> tuple[object, ...]:
    kind = tensor.dtype, tensor.device, tensor.requires_grad
    return id(spec), tensor.shape, kind, src_rank


def keep_cut(full: Full, members: Communicator, *, src_rank: int | None) -> None:
    """Keeps what is known once a call has succeeded, if nothing in it can change."""
    key, spec = _key(full.tensor, full.spec, src_rank), full.spec
    known: KnownCut | None = members.cuts.get(key)
    if known is not None and known.spec() is spec:
        return
    if not _is_fixed(spec) or not full.layout.boxes_of(members.rank):
        return
    full = replace(full, layout=only_layout(full.layout))
    transfer = transfer_to_cut(full, members, src_rank=src_rank)
    if transfer.out is not None or transfer.device is not None:
        return
    agreement: Agreement | None = None
    if len(members.ranks) > 1:
        values = full.compared | {"src_rank": src_rank}
        agreement = Agreement("distribute", values, members, None, SEED_PHRASES)
    if len(members.cuts) >= _MOST_KEPT:
        members.cuts.clear()
    members.cuts[key] = KnownCut(
        weakref.ref(spec), full.layout, transfer.plan, bool(transfer.shards), agreement
    )


def _is_fixed(spec: ShardingSpec) -> bool:
    """Whether it says the same of a size at any time, as those do that keep it themselves."""
    kind, kept = type(spec), BuiltinSpec
    return kind.layout is kept.layout and kind.local_devices is kept.local_devices


def cut_again(
    known: KnownCut, tensor: torch.Tensor, spec: ShardingSpec, members: Communicator
) -> ShardedTensor:
    """The tensor, cut: new leaves that require grad if it does."""
    _, layout, plan, has_data, agreement = known
    if agreement is not None and not should_check(hot=False):
        agreement = None
    held = (tensor.detach(),) if has_data else ()
    shards = execute(plan, held, dtype=tensor.dtype, group=members, agreement=agreement)
    if tensor.requires_grad:
        for shard in shards:
            shard.requires_grad_()
    group = getattr(members, "process_group", None)
    return wrap(State(layout, tuple(shards), members.rank, members, spec, group))
