"""All ranks in one process: the same code as on real ranks, with every byte counted.

[Note: the baton] Every simulated rank is a thread, but only the one that has the baton runs. A
rank that waits for a message hands the baton on; when a message arrives, its receiver is put in
line again. So a simulation runs in the same order every time, and when nobody is in line although
somebody waits, it is a deadlock and says who waits for whom.
"""

from __future__ import annotations

import threading
import traceback
from collections import defaultdict, deque
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from shardwise.arguments import whole_number
from shardwise.comm.communicator import Communicator, Flight, simulated_rank
from shardwise.comm.flights import as_bytes
from shardwise.comm.marks import NO_EXCHANGE, Words, difference
from shardwise.comm.ranks import GroupRanks
from shardwise.comm.reducing import add_to, rescale
from shardwise.errors import (
    AbsentRanksError,
    AgreementError,
    ArgumentValueError,
    DeviceError,
    RankFailure,
)
from shardwise.sharding_spec.short import simulated_world_size
from shardwise.transfer.program import Scale
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from shardwise.comm.marks import Mark
    from shardwise.comm.rank_plan import RankPlan
    from shardwise.geometry import ReduceOp

__all__ = ["LinkTraffic", "SimulatedCommunicator", "Simulation", "simulate"]

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


@dataclass(slots=True, repr=False)
class LinkTraffic:
    """What crossed every link (src, dst). Collectives count as the messages that they stand for."""

    bytes: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    messages: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, src: int, dst: int, nbytes: int) -> None:
        """Counts one message; what a rank keeps for itself is none."""
        if src != dst:
            self.bytes[src, dst] += nbytes
            self.messages[src, dst] += 1

    @property
    def total_bytes(self) -> int:
        """Bytes on all links."""
        return sum(self.bytes.values())

    def __repr__(self) -> str:
        return f"LinkTraffic({self.total_bytes} bytes on {len(self.bytes)} links)"


@dataclass(frozen=True, slots=True)
class Simulation(Generic[Result]):
    """Every rank's result, in rank order, and what they sent each other."""

    results: list[Result]
    traffic: LinkTraffic


def simulate(
    fn: Callable[[int, *Args], Result],
    world_size: int,
    *args: *Args,
    backend: str = "gloo",
    device: str = "cpu",
) -> Simulation[Result]:
    """Calls `fn(rank, *args)` as every rank of a simulated world, in this process.

    `shardwise.comm.communicator()` inside `fn` is that rank's view of the world, and specs without
    ranks are for all of it; nothing of torch.distributed is used. `backend` chooses the table of
    collectives. Arguments and globals are shared by all ranks. A failure of any rank raises
    `RankFailure` with every story.

    With `device="meta"` it is a rehearsal: tensors on the meta device are sent, too, and counted,
    so that a model of any size shows what it would send.

    >>> from shardwise.comm import communicator
    >>> simulate(lambda rank: communicator().gather_objects(rank * 10), 2).results
    [[0, 10], [0, 10]]
    """
    num_ranks = whole_number(world_size, "world_size", least=1)
    world = _World(num_ranks, _checked_backend(backend), _checked_device(device))
    return Simulation(world.run(fn, args), world.traffic)


def _checked_backend(backend: str) -> str:
    """The name as it is; a misspelt one would be simulated as if it had no collectives."""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    if backend not in known:
        raise ArgumentValueError(
            "backend of simulate",
            expected=f"one that torch.distributed knows: {', '.join(known)}",
            got=repr(backend),
        )
    return backend


def _checked_device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:  # whatever torch calls it
        raise DeviceError(
            "device of simulate",
            expected="a device of torch, such as 'cpu' or 'cuda'",
            got=repr(device),
            fix="'meta' is for a rehearsal without data.",
        ) from error


class _World:
    """Threads, mailboxes and meetings of one simulation. [Note: the baton]"""

    def __init__(self, world_size: int, backend: str, device: torch.device) -> None:
        self.world_size, self.backend, self.device = world_size, backend, device
        self.traffic = LinkTraffic()
        self.group_keys: dict[GroupRanks, int] = {}
        self.num_meetings: dict[tuple[int, int], int] = defaultdict(int)  # by group and rank
        # By link: messages that were sent and have not landed, by number, and the next numbers.
        self.mail: dict[Hashable, dict[int, tuple[torch.Tensor, Mark | None]]] = defaultdict(dict)
        self.num_sent: dict[Hashable, int] = defaultdict(int)
        self.num_expected: dict[Hashable, int] = defaultdict(int)
        self.meetings: dict[Hashable, dict[int, Any]] = defaultdict(dict)
        self._batons = [threading.Semaphore(0) for _ in range(world_size)]
        self._in_line = deque(range(world_size))
        self._waiting: dict[Hashable, tuple[int, str]] = {}  # key -> who waits, and for what
        self._running = -1
        self._unfinished = world_size
        self._over = threading.Semaphore(0)
        self._failures: dict[int, BaseException] = {}
        self._stuck: set[int] = set()  # ranks that are told so when they go on

    def run(self, fn: Callable[..., Result], args: tuple[Any, ...]) -> list[Result]:
        results: dict[int, Result] = {}

        def play(rank: int, context: Context) -> None:
            context.run(play_in_context, rank)

        def play_in_context(rank: int) -> None:
            self._batons[rank].acquire()
            self._running = rank
            simulated_rank.set(SimulatedCommunicator(self, rank, range(self.world_size)))
            simulated_world_size.set(self.world_size)
            try:
                results[rank] = fn(rank, *args)
            except BaseException as error:
                self._failures[rank] = error
            finally:
                self._unfinished -= 1
                self._pass_on()

        threads = [
            # With the caller's settings, such as set_check() in a with block.
            threading.Thread(
                target=play,
                args=(rank, copy_context()),
                name=f"simulated rank {rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.acquire()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failure()
        return [results[rank] for rank in range(self.world_size)]

    def wait(self, key: Hashable, why: str, is_there: Callable[[], bool]) -> None:
        """Lets others run until somebody has called `notify(key)` and `is_there()`."""
        rank = self._running
        while not is_there():
            if rank in self._stuck:
                self._stuck.discard(rank)
                raise _Deadlock(why)
            self._waiting[key] = rank, why
            self._pass_on()
            self._batons[rank].acquire()
            self._running = rank
        self._stuck.discard(rank)

    def notify(self, key: Hashable) -> None:
        """Puts the rank that waits for `key`, if any, in line."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._in_line.append(waiting[0])

    def _pass_on(self) -> None:
        """Gives the baton to the next in line; wakes everybody if all wait for each other."""
        if not self._in_line and self._waiting:
            self._stuck.update(rank for rank, _ in self._waiting.values())
            self._in_line.extend(rank for rank, _ in self._waiting.values())
            self._waiting.clear()
        if self._in_line:
            self._batons[self._in_line.popleft()].release()
        elif not self._unfinished:
            self._over.release()

    def _failure(self) -> RankFailure:
        # Ranks that waited for one that failed say nothing new.
        own = {r: e for r, e in self._failures.items() if not isinstance(e, _Deadlock)}
        stories = {
            rank: f"rank {rank} raised\n" + "".join(traceback.format_exception(error)).rstrip()
            for rank, error in own.items()
        } | {
            rank: f"rank {rank} waits for {error}"
            for rank, error in self._failures.items()
            if rank not in own
        }
        text = [f"simulate: {len(stories)} of {self.world_size} ranks failed", *stories.values()]
        failure = RankFailure("\n\n".join(text), failures=stories)
        failure.__cause__ = next(iter(own.values()), None)
        return failure


class _Deadlock(Exception):
    """What a rank waits for when all ranks wait."""


class SimulatedCommunicator:
    """A `Communicator` of one simulated rank."""

    def __init__(self, world: _World, rank: int, ranks: Sequence[int]) -> None:
        self._world = world
        self.rank = rank
        self.ranks = GroupRanks(tuple(ranks))
        self.backend = world.backend
        self.wire_device = world.device
        self.rank_plans: dict[int, RankPlan] = {}
        self.decisions: dict[tuple[Any, ...], Any] = {}
        self.kinds: dict[tuple[Any, ...], Any] = {}
        self.exchanges: dict[tuple[Any, ...], Any] = {}
        self.cuts: dict[tuple[Any, ...], Any] = {}
        self.num_disagreements = 0
        self._key = world.group_keys.setdefault(self.ranks, len(world.group_keys))

    @property
    def traffic(self) -> LinkTraffic:
        """Of the whole world so far."""
        return self._world.traffic

    def subgroup(self, ranks: Sequence[int]) -> SimulatedCommunicator:
        """The group of these ranks; all of them make it once, and this rank is one of them."""
        group = SimulatedCommunicator(self._world, self.rank, ranks)
        group.ranks.group_rank(self.rank)
        return group

    def flight(self, mark: Mark | None = None) -> Flight:
        return _SimulatedFlight(self._world, self.rank, self.ranks, self._key, mark)

    def apart(self, tag: int) -> Communicator:
        return self

    def early_flight(self, tag: int, digest: bytes) -> None:
        """Nobody waits for digests: one rank runs at a time."""

    # -- collectives --------------------------------------------------------------------------

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        self._count_all(mine.nbytes)
        torch.cat(self._meet("all_gather", mine.clone()), out=output)

    def reduce_scatter(self, output: torch.Tensor, mine: torch.Tensor, op: ReduceOp) -> None:
        self._count_all(output.nbytes)
        size, at = output.numel(), self.ranks.group_rank(self.rank)
        parts = self._meet("reduce_scatter", mine.clone())
        self._reduce(output, [part[at * size : (at + 1) * size] for part in parts], op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        # As a reduce-scatter and an all-gather of even parts.
        count, size, mine = len(self.ranks), tensor.numel(), self.ranks.group_rank(self.rank)
        for k, peer in enumerate(self.ranks):
            for part in (k, mine):
                elements = (part + 1) * size // count - part * size // count
                self._world.traffic.add(self.rank, peer, elements * tensor.element_size())
        self._reduce(tensor, self._meet("all_reduce", tensor.clone()), op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self.rank == source:
            self._count_all(tensor.nbytes)
        tensor.copy_(self._meet("broadcast", tensor.clone())[self.ranks.group_rank(source)])

    def _reduce(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp) -> None:
        output.copy_(parts[0])
        for part in parts[1:]:
            add_to(output, part, op)
        if op == "avg":
            rescale(output, Scale(1, len(parts)))

    def _count_all(self, nbytes: int) -> None:
        for peer in self.ranks:
            self._world.traffic.add(self.rank, peer, nbytes)

    # -- agreement ----------------------------------------------------------------------------

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        try:
            return self._meet("compare", digest)
        except _Deadlock:
            number = self._world.num_meetings[self._key, self.rank] - 1
            here = self._world.meetings[self._key, number]
            absent = [rank for rank in self.ranks if rank not in here]
            raise AbsentRanksError(
                f"{ranks_text(absent)} did not come to an agreement",
                rank=self.rank,
                ranks=absent,
                fix="Let every rank of the group make the call.",
            ) from None

    def tell(self, problem: Exception) -> None:
        """Nobody has to be told: a simulation notices who waits in vain."""

    def gather_objects(self, value: object) -> list[object]:
        return self._meet("gather_objects", value)

    def _meet(self, what: str, value: Any) -> list[Any]:
        """Everybody's value, in order of group rank, once all have come."""
        number = self._world.num_meetings[self._key, self.rank]
        self._world.num_meetings[self._key, self.rank] += 1
        here = self._world.meetings[self._key, number]
        here[self.rank] = what, value
        if len(here) == len(self.ranks):
            for peer in self.ranks:
                self._world.notify((self._key, number, peer))
        key = (self._key, number, self.rank)
        missing = f"the others in {what} of {ranks_text(self.ranks.ranks)}"
        self._world.wait(key, missing, lambda: len(here) == len(self.ranks))
        calls = {rank: here[rank][0] for rank in self.ranks}
        if len(set(calls.values())) > 1:
            raise AssertionError(f"ranks meet in different calls: {calls}")
        found = [here[rank][1] for rank in self.ranks]
        self._world.meetings.pop((self._key, number - 1), None)  # which everybody has left
        return found


class _SimulatedFlight:
    """Messages as copies in a mailbox per link: the n-th receive that is named gets the n-th."""

    def __init__(
        self, world: _World, rank: int, ranks: GroupRanks, key: int, mark: Mark | None
    ) -> None:
        self._world, self._rank, self._ranks, self._key = world, rank, ranks, key
        self._mark = mark  # by which real messages are kept apart
        self._receives: list[tuple[int, int, torch.Tensor]] = []  # peer, number on the link
        self._has_landed: list[bool] = []

    def receive(self, peer: int, buffer: torch.Tensor) -> None:
        self._ranks.group_rank(peer)
        link = (self._key, peer, self._rank)
        self._receives.append((peer, self._world.num_expected[link], buffer))
        self._world.num_expected[link] += 1
        self._has_landed.append(False)

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        self._ranks.group_rank(peer)
        link = (self._key, self._rank, peer)
        message = as_bytes(buffer).clone(), self._mark
        self._world.mail[link][self._world.num_sent[link]] = message
        self._world.num_sent[link] += 1
        self._world.traffic.add(self._rank, peer, buffer.nbytes)
        self._world.notify(link)

    def launch(self) -> None:
        pass

    def land(self, index: int) -> None:
        if self._has_landed[index]:
            return
        peer, number, buffer = self._receives[index]
        link = (self._key, peer, self._rank)
        box = self._world.mail[link]
        self._world.wait(link, f"a message from rank {peer}", lambda: number in box)
        message, mark = box.pop(number)
        self._has_landed[index] = True  # also if it is not what was waited for
        if getattr(mark, "tag", None) != getattr(self._mark, "tag", None):
            raise AgreementError(
                difference(self._rank, _words_of(self._mark), peer, _words_of(mark)),
                rank=self._rank,
                fix="Every rank of the group must make the same calls in the same order.",
            )
        if message.nbytes != buffer.nbytes:
            raise AssertionError(
                f"rank {self._rank} expected {buffer.nbytes} bytes from rank {peer}, "
                f"which sent {message.nbytes}"
            )
        as_bytes(buffer).copy_(message)

    def finish(self) -> None:
        for index in range(len(self._receives)):
            self.land(index)


def _words_of(mark: Mark | None) -> Words:
    return NO_EXCHANGE if mark is None else mark.words
