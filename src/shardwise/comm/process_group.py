"""Communicators over torch.distributed: gloo, NCCL and the other c10d backends."""

from __future__ import annotations

import weakref
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from shardwise._torch_compat import all_gather_single, group_store, reduce_scatter_single
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.flights import BatchedFlight, EarlyPostedFlight, PostedFlight
from shardwise.comm.heard import is_heard, note_heard
from shardwise.comm.ranks import GroupRanks, member_group
from shardwise.comm.roll_call import RollCall
from shardwise.comm.watch import Watch
from shardwise.errors import (
    AbsentRanksError,
    AgreementError,
    ArgumentValueError,
    NotInitializedError,
    OpError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.comm.communicator import Communicator, EarlyFlight, Flight
    from shardwise.comm.marks import Mark
    from shardwise.comm.rank_plan import RankPlan
    from shardwise.geometry import ReduceOp

__all__ = ["ProcessGroupCommunicator", "Wire", "communicator"]

Wire = Literal["cpu", "cuda"]  # kinds of device that messages may leave from

_REDUCE_OPS: dict[ReduceOp, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# Module state, because it follows torch's own: the process groups of this process. A communicator
# holds its group weakly, so an entry ends with the group.
_communicators: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[Wire | None, ProcessGroupCommunicator]
] = weakref.WeakKeyDictionary()
_lives: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_last: ProcessGroupCommunicator | None = None  # of the default group: found without any check


def communicator(
    process_group: dist.ProcessGroup | Communicator | None = None, *, wire: Wire | None = None
) -> Communicator:
    """The communicator of a process group, the same one at every call.

    None is the simulated rank that this thread plays, or else the default process group. `wire`
    chooses the device from which a group of several backends sends, such as "cpu:gloo,cuda:nccl";
    the default is CUDA where there is one. A communicator is returned as it is.
    """
    if process_group is None:
        simulated = simulated_rank.get()
        if simulated is not None:
            return simulated
    elif hasattr(process_group, "flight"):
        return process_group  # type: ignore[return-value]  # no ProcessGroup has flights
    global _last
    world = dist.group.WORLD if process_group is None else None
    if world is not None and wire is None and _last is not None and _last._reference() is world:
        return _last
    group = member_group(process_group)
    cached = _communicators.setdefault(group, {})
    if wire not in cached:
        cached[wire] = ProcessGroupCommunicator(group, wire=wire)
    if world is not None and wire is None:
        _last = cached[wire]
    return cached[wire]


class ProcessGroupCommunicator:
    """A `Communicator` over torch.distributed. Made by `communicator`, once per group.

    Does not keep the group alive; torch does, until `destroy_process_group`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, wire: Wire | None = None
    ) -> None:
        group = member_group(process_group)
        self._reference = weakref.ref(group)
        self.rank = dist.get_rank()
        self.ranks = GroupRanks.of(group)
        backends = _backends(group)
        self._wire = _wire(backends, wire)
        # A process that has a GPU chooses it before its first exchange, as NCCL wants it.
        is_cuda = self._wire == "cuda"
        name = f"cuda:{torch.cuda.current_device()}" if is_cuda else self._wire
        self.wire_device = torch.device(name)
        self.backend = backends[self._wire]
        self.rank_plans: dict[int, RankPlan] = {}
        self.decisions: dict[tuple[Any, ...], Any] = {}
        self.kinds: dict[tuple[Any, ...], Any] = {}
        self.exchanges: dict[tuple[Any, ...], Any] = {}
        self.cuts: dict[tuple[Any, ...], Any] = {}
        self.num_disagreements = 0
        self._tag: int | None = None  # of all messages of a copy that is `apart`
        self._has_launched = False
        notes = f"shardwise/{_life(group, self.rank)}/{self._wire}"
        self._watch = Watch(group, self.ranks, self.rank, name=notes)
        # Comparing on the CPU, where that is possible, does not wait for the GPU.
        place = "cpu" if "cpu" in backends else self._wire
        self._roll_call = RollCall(
            self.ranks,
            self.rank,
            device=torch.device(place),
            name=notes,
            give_up=self._watch.give_up if backends[place] == "gloo" else None,
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself; raises once it is destroyed."""
        return self._group

    def flight(self, mark: Mark | None = None) -> Flight:
        group = self._reference() or self._group  # which raises
        if self.backend == "gloo":
            if self._tag is not None:
                return PostedFlight(group, self.ranks, self._watch, self._tag)
            return PostedFlight(group, self.ranks, self._watch, mark=mark)
        return BatchedFlight(group, self._meet)

    def apart(self, tag: int) -> Communicator:
        if self.backend != "gloo":  # only whose messages have tags
            return self
        found = copy(self)
        found._tag = tag
        return found

    def early_flight(self, tag: int, digest: bytes) -> EarlyFlight | None:
        if self.backend != "gloo":
            return None
        group = self._reference() or self._group  # which raises
        return EarlyPostedFlight(group, self.ranks, self._watch, tag, self._roll_call, digest)

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        all_gather_single(output, mine, group=self._group)

    def reduce_scatter(self, output: torch.Tensor, mine: torch.Tensor, op: ReduceOp) -> None:
        reduce_scatter_single(output, mine, op=self._reduce_op(op), group=self._group)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        reduce_op = self._reduce_op(op)
        self._carry_out(partial(dist.all_reduce, tensor, op=reduce_op, group=self._group))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        at = self.ranks.group_rank(source)
        self._carry_out(partial(dist.broadcast, tensor, group=self._group, group_src=at))

    def _carry_out(self, collective: Callable[..., dist.Work | None]) -> None:
        """Waits for a collective of gloo as for messages: it ends if a rank has raised instead."""
        if self.backend != "gloo":
            collective()
            return
        if self._watch.has_notice:
            self._watch.comes()
        try:
            work = collective(async_op=True)
        except RuntimeError as error:
            self._watch.explain(error)
            raise
        self._watch.wait(((self.rank, work),))

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        if len(self.ranks) == 1:
            return [digest]
        found = self._roll_call.compare(self._group, digest, timeout=timeout)
        if self._watch.has_notice:  # all ranks have come here, so that nobody waits because of it
            self._watch.comes()
        return found

    def tell(self, problem: Exception) -> None:
        is_of_others = isinstance(problem, AgreementError | AbsentRanksError)
        if not is_of_others and not is_heard(problem, self.ranks, "a notice"):
            note_heard(problem, self.ranks, "a notice")
            self._watch.tell(problem)

    def gather_objects(self, value: object) -> list[object]:
        gathered: list[object] = [None] * len(self.ranks)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise NotInitializedError(
                f"the process group of this communicator ({len(self.ranks)} ranks) was destroyed",
                rank=self.rank,
                fix="Ask for a new one, shardwise.comm.communicator(), after every "
                "torch.distributed.init_process_group().",
            )
        return group

    def _reduce_op(self, op: ReduceOp) -> dist.ReduceOp.RedOpType:
        if op == "avg" and self.backend == "gloo":
            raise OpError(
                "reduction 'avg' over gloo",
                rank=self.rank,
                expected="one of sum, max, min, product",
                got="avg",
                fix="Sum, then divide by the number of ranks.",
            )
        return _REDUCE_OPS[op]

    def _meet(self) -> None:
        """Connects all ranks, once.

        NCCL connects a group in its first call, for which all ranks must come; a round of
        messages may leave some out.
        """
        if not self._has_launched:
            self._has_launched = True
            self.all_reduce(torch.zeros(1, device=self.wire_device), "sum")


def _life(group: dist.ProcessGroup, rank: int) -> int:
    """How many groups of that name and store this rank has had, with this one.

    A store may outlive a group, as torchrun's does. What was noted there about a group that was
    destroyed is not about the next one, which has the same name.
    """
    if group not in _lives:
        _lives[group] = 0
        with suppress(Exception):  # a store that fails knows nothing
            _lives[group] = group_store(group).add(f"shardwise/lives/{rank}", 1)
    return _lives[group]


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, as in "cpu:gloo,cuda:nccl"."""
    config: Any = dist.get_backend_config(group)
    return dict(part.split(":") for part in config.split(","))


def _wire(backends: dict[str, str], wire: Wire | None) -> str:
    # gloo takes CUDA tensors for some collectives, but not for messages
    able = [device for device, backend in backends.items() if (device, backend) != ("cuda", "gloo")]
    if wire is not None and wire not in able:
        raise ArgumentValueError(
            "wire",
            expected=f"a device that the group's backends send from ({', '.join(able)})",
            got=repr(wire),
            fix='For both: torch.distributed.init_process_group("cpu:gloo,cuda:nccl").',
        )
    if wire is not None:
        return wire
    if "cuda" in able and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in able else able[0]
