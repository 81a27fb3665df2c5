"""Exchanges that autograd sees: local tensors of one layout become those of another.

[Note: every rank is in every graph] A rank that holds nothing of a tensor has a *tie* in its place:
a tensor without elements that goes in and out of every exchange. So each rank's graph has a node
for each exchange, and backward, which runs nodes in reverse order of creation, meets the other
ranks at every one of them. What autograd follows on a rank, its shards or its tie, are *carriers*.

[Note: gradients] The gradient of a tensor of layout L has the layout `L.bar`, and each entry holds
the whole gradient of its box. So the way back is a reshard and sums nothing. Where replicas *enter*
work that is split over ranks, each rank's gradient is only its own part: there the way back starts
from addends, one per distinct piece of work, and sums them as it goes. A layout says which: its
entries are those of the result, and entries that do the same work have the same term.

[Note: gradients of gradients] An exchange is a linear map, and so is the way of its gradient; the
derivative of the latter is the exchange itself. What reaches the gradients of addends are then
addends too: each term is the work of its own, and the exchange adds them up. So where the gradient
of a pending tensor becomes one of nothing pending (`merge_terms`), one term stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import has_saving_hooks
from shardwise.comm.executor import execute, start_all
from shardwise.comm.load import Transfer
from shardwise.comm.term_gradients import first_terms, scale_terms, spread_terms, term_groups
from shardwise.comm.tracing import TRACES, current_op, doing
from shardwise.errors import OpError
from shardwise.geometry import Layout
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.comm.agreement import Agreement
    from shardwise.comm.communicator import Communicator
    from shardwise.transfer import TransferPlan

__all__ = [
    "Carriers",
    "Exchange",
    "carriers_of",
    "count_writes",
    "exchange",
    "exchange_of",
    "home_of",
    "make_tie",
    "own_parts",
    "shards_of",
    "start",
    "transfer_of",
]

Carriers = tuple[torch.Tensor, ...]  # at least one
_MOST_KEPT = 512  # exchanges of a group


@dataclass(frozen=True)
class Exchange:
    """From one layout to another, on this rank. Devices are those of the local shards.

    It keeps what follows from that alone, so what is done again and again uses one: `exchange_of`.
    """

    source: Layout
    target: Layout
    source_devices: tuple[torch.device, ...]
    target_devices: tuple[torch.device, ...]
    members: Communicator
    max_bytes: int | None = None
    # Set: what the result enters, pending "sum". There is one result per entry of it, and their
    # gradients are its addends. Its boxes and ranks are those of the target, nothing being pending.
    work: Layout | None = None

    @cached_property
    def moves_nothing(self) -> bool:
        """Whether every rank has what it is to have."""
        return self.source == self.target

    @cached_property
    def changes_nothing(self) -> bool:
        """Whether the result would be the tensor itself, but for the way of its gradient."""
        return self.moves_nothing and self.source_devices == self.target_devices

    @cached_property
    def enters_in_place(self) -> bool:
        """Whether shards enter work where they are, and no rank of the group has none."""
        if self.work is None or not self.changes_nothing:
            return False
        return set(self.source.ranks) == set(self.members.ranks)

    @cached_property
    def back(self) -> Exchange:
        """The way of the gradient. [Note: gradients]"""
        rank = self.members.rank
        devices = first_terms(self.target_devices, self.target, rank)
        if self.work_groups is not None:
            devices = tuple([devices[k] for k in self.work_groups])
        return replace(
            self,
            work=None,
            source=self.target.bar if self.work is None else self.work,
            target=self.source.bar,
            source_devices=devices,
            target_devices=first_terms(self.source_devices, self.source, rank),
        )

    @cached_property
    def work_groups(self) -> tuple[int, ...] | None:
        """For each local entry of the work its position in the target; None if they are the same.

        The target may have an empty box twice, of which the work's own `bar` would have one.
        """
        if self.work is None:
            return None
        boxes, there = (one.boxes_of(self.members.rank) for one in (self.work, self.target))
        if boxes == there:
            return None
        first = {box: k for k, box in reversed(list(enumerate(there)))}
        return tuple([first[box] for box in boxes])

    @cached_property
    def is_differentiable(self) -> bool:
        """Whether there is a way back for gradients; `_check_differentiable` says why not."""
        pending = {self.source.pending, self.target.pending}
        devices = max(len(set(self.source_devices)), len(set(self.target_devices)))
        return pending <= {None, "sum", "avg"} and devices <= 1

    @cached_property
    def has_terms(self) -> bool:
        """Whether gradients of terms of this rank are merged, spread or scaled on the way back."""
        rank, ends = self.members.rank, (self.source, self.target)
        return any(one.pending == "avg" or term_groups(one, rank) is not None for one in ends)

    @cached_property
    def has_shards(self) -> bool:
        """Whether this rank holds some of the source, and no tie."""
        return bool(self.source.boxes_of(self.members.rank))

    def plan(self, itemsize: int) -> TransferPlan:
        """The plan for elements of so many bytes."""
        known = self._plans.get(itemsize)
        if known is None:
            known = self._plans[itemsize] = plan_reshard(self.source, self.target, itemsize)
        return known

    @cached_property
    def _plans(self) -> dict[int, TransferPlan]:
        return {}


def exchange_of(
    source: Layout,
    target: Layout,
    source_devices: tuple[torch.device, ...],
    target_devices: tuple[torch.device, ...],
    members: Communicator,
    *,
    max_bytes: int | None = None,
    work: Layout | None = None,
) -> Exchange:
    """The exchange; of the same arguments the same object, as long as the group keeps it."""
    key = source, target, source_devices, target_devices, max_bytes, work
    known: Exchange | None = members.exchanges.get(key)
    if known is None:
        known = Exchange(source, target, source_devices, target_devices, members, max_bytes, work)
        if len(members.exchanges) >= _MOST_KEPT:
            members.exchanges.clear()
        members.exchanges[key] = known
    return known


def make_tie(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands for a tensor on a rank that holds nothing of it."""
    return torch.empty(0, dtype=dtype, device=device)


def carriers_of(
    shards: Sequence[torch.Tensor], *, dtype: torch.dtype, device: torch.device
) -> Carriers:
    """The shards, or a new tie where there are none."""
    return tuple(shards) or (make_tie(dtype, device),)


def shards_of(carriers: Carriers, layout: Layout, rank: int) -> Carriers:
    """The carriers, less the tie of a rank that holds nothing."""
    return carriers if layout.boxes_of(rank) else ()


def exchange(
    job: Exchange,
    carriers: Carriers,
    *,
    out: Sequence[torch.Tensor] | None = None,
    agreement: Agreement | None = None,
) -> Carriers:
    """The carriers in the target layout. Every rank of the group calls it.

    Differentiable any number of times; for values only are `out`, the tensors to fill, and
    `agreement`, as in `execute`.
    """
    if torch.is_grad_enabled() and any([carrier.requires_grad for carrier in carriers]):
        assert out is None
        assert agreement is None
        if not job.is_differentiable:
            _check_differentiable(job)
        found: Carriers = _Exchange.apply(job, *carriers)  # type: ignore[no-untyped-call]  # torch's
        return found
    if job.work is not None and job.changes_nothing:
        return _one_per_work(job, carriers)
    moved = _moved(job, carriers, out=out, agreement=agreement)
    return moved if job.work is None else _one_per_work(job, moved)


def _one_per_work(job: Exchange, carriers: Carriers) -> Carriers:
    groups = job.work_groups
    return carriers if groups is None else tuple([carriers[k] for k in groups])


def _moved(
    job: Exchange,
    carriers: Carriers,
    *,
    out: Sequence[torch.Tensor] | None = None,
    agreement: Agreement | None = None,
) -> Carriers:
    plan, shards, out, dtype, device, _ = transfer_of(job, carriers, out=out)
    moved = execute(
        plan,
        shards,
        out=out,
        dtype=dtype,
        device=device,
        group=job.members,
        max_bytes=job.max_bytes,
        agreement=agreement,
    )
    count_writes(out or ())
    return carriers_of(moved, dtype=carriers[0].dtype, device=home_of(job, carriers))


def start(
    job: Exchange, carriers: Carriers, *, out: Sequence[torch.Tensor] | None = None
) -> Callable[[], Carriers]:
    """Starts to move values; what it returns waits for them and gives the carriers."""
    transfer = transfer_of(job, carriers, out=out)
    started = start_all([transfer], group=job.members, max_bytes=job.max_bytes)
    count_writes(transfer.out or ())
    home = home_of(job, carriers)
    return lambda: carriers_of(started.wait()[0], dtype=carriers[0].dtype, device=home)


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd of tensors whose memory was written behind its back."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def home_of(job: Exchange, carriers: Carriers) -> torch.device:
    """Where the result is on this rank, or is taken to be if it holds nothing of it."""
    return job.target_devices[0] if job.target_devices else carriers[0].device


def transfer_of(
    job: Exchange,
    carriers: Carriers,
    *,
    out: Sequence[torch.Tensor] | None = None,
    name: str = "tensor",
) -> Transfer:
    """The exchange as `execute_all` takes it; makes the outputs if they are on several devices."""
    dtype = carriers[0].dtype
    plan = job.plan(dtype.itemsize)
    shards = carriers if job.has_shards else ()
    devices = job.target_devices
    if out is None and len(devices) > 1 and len(set(devices)) > 1:
        shapes = plan.shapes_of(job.members.rank).target
        out = [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, device in zip(shapes, devices, strict=True)
        ]
    device: torch.device | None = home_of(job, carriers)
    if out is not None or device == (shards[0].device if shards else job.members.wire_device):
        device = None  # which says the same, and takes the short way
    return Transfer(plan, shards, out, dtype, device, name)


def _check_differentiable(job: Exchange) -> None:
    for layout in (job.source, job.target):
        if layout.pending not in (None, "sum", "avg"):
            raise OpError(
                f"a reshard with gradient of a pending {layout.pending}",
                rank=job.members.rank,
                expected="nothing, or a sum or avg, to be pending",
                fix="Detach the tensor, or reduce it first.",
            )
    if len(set(job.source_devices)) > 1 or len(set(job.target_devices)) > 1:
        # Each device has a backward thread of its own, so the order of exchanges in backward
        # would not be the same on all ranks.
        raise OpError(
            "a reshard with gradient of shards on several devices of one rank",
            rank=job.members.rank,
            expected="one device per rank",
            got=", ".join(sorted(map(str, {*job.source_devices, *job.target_devices}))),
            fix="Move the tensor to one device per rank first, or detach it.",
        )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Exchange, *carriers: torch.Tensor) -> Carriers:
        ctx.job = job
        ctx.op = current_op()  # for the name of what backward sends
        # Read before backward communicates: non-reentrant checkpointing then recomputes at the
        # same node on every rank. Elsewhere what enters in place saves nothing, as a view: several
        # functions may share it, and go backward one after the other.
        ctx.has_saved = not job.enters_in_place or has_saving_hooks()
        if ctx.has_saved:
            ctx.save_for_backward(carriers[0].new_empty(0))
        values = tuple([carrier.detach() for carrier in carriers])
        if job.work is None:
            return _moved(job, values)
        moved = values if job.changes_nothing else _moved(job, values)
        entering = _one_per_work(job, moved)
        if entering is moved:
            return moved
        return tuple([shard.detach() for shard in entering])  # each its own object

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert not ctx.has_saved or len(ctx.saved_tensors) == 1
        send: Callable[..., Carriers] = _Back.apply if torch.is_grad_enabled() else _sent_back
        if not TRACES:
            return None, *send(ctx.job, *grads)
        with doing(f"backward of {ctx.op or 'reshard'}"):
            return None, *send(ctx.job, *grads)


class _Back(torch.autograd.Function):
    """The way of an exchange's gradient. [Note: gradients of gradients]"""

    @staticmethod
    def forward(ctx: Any, job: Exchange, *grads: torch.Tensor) -> Carriers:
        ctx.job = job
        ctx.save_for_backward(grads[0].new_empty(0))  # as in `_Exchange`
        return tuple([grad.detach() for grad in _sent_back(job, *grads)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert len(ctx.saved_tensors) == 1
        return None, *exchange(ctx.job, grads)


def _sent_back(job: Exchange, *grads: torch.Tensor) -> Carriers:
    """The gradients of an exchange's carriers, from those of its result; values only."""
    if not job.has_terms:
        return _sent(job.back, grads)
    rank = job.members.rank
    if job.work is None:
        grads = first_terms(scale_terms(grads, job.target, rank, up=True), job.target, rank)
    sent = spread_terms(_sent(job.back, grads), job.source, rank)
    return scale_terms(sent, job.source, rank, up=False)


def _sent(back: Exchange, grads: Carriers) -> Carriers:
    """Gradients on their way; those that are there, as of a pending sum that went to all, stay."""
    if not back.moves_nothing:
        return exchange(back, grads)
    if back.changes_nothing:
        return grads
    places = zip(grads, back.target_devices, strict=True)
    return tuple([grad.to(device) for grad, device in places])


@lru_cache(maxsize=256)
def own_parts(layout: Layout) -> Layout:
    """The work of a plain tensor's users: every rank's is its own."""
    layout = layout.bar
    return Layout(layout.shape, layout.boxes, layout.owners, terms=layout.owners, pending="sum")
