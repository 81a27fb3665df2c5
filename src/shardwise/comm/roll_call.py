"""Comparing one digest per rank, with names for the ranks that do not come.

[Note: Who did not come]
An exchange costs nothing but one small all-gather as long as everybody comes. A rank that waits
for longer than `_PATIENCE` writes the number of the exchange to the group's store, one key per
rank, so that the first rank to give up can read there who waits too and who is absent. It writes
this verdict to the store, and every other rank raises with the same one.

On gloo, in groups of a few ranks, everybody sends its digest to everybody, because that takes one
hop where a collective takes several, and wakes threads; there a rank knows by itself who did not
come, and nothing is noted.

Ending the exchange for all: gloo closes the connections of a collective that times out, and
ranks that wait for it or come later see that at once (the group cannot be used again). Other
backends leave a late rank waiting, or even complete its half, so there ranks look for a verdict
before and while they wait.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise._torch_compat import group_store, start_all_gather
from shardwise.errors import AbsentRanksError
from shardwise.words import ranks_text

if TYPE_CHECKING:
    import torch.distributed as dist

    from shardwise._torch_compat import Store
    from shardwise.comm.ranks import GroupRanks

__all__ = ["RollCall", "Told"]

_PATIENCE = 0.1  # seconds; short against any timeout, long against an exchange
_VERDICT_PATIENCE = 0.5  # for the verdict of a rank that has just closed the connections
_POLL = 0.0001
_SHORT = 0.001  # seconds waited for all ranks so far, after which the others get as long as before
_LOOK = 0.1  # between two looks into the store
_FEW = 8  # ranks
_TAG = 0x5A4F  # of messages with digests


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why an exchange was given up, the same on all ranks."""

    absent: tuple[int, ...]
    waited: float
    timed_out: bool


class _Desk(NamedTuple):
    """Memory of an exchange of digests of one length, used again and again.

    A list that holds one tensor is how a group takes a message.
    """

    mine: list[torch.Tensor]
    heard: tuple[tuple[int, list[torch.Tensor]], ...]  # by group rank, of everybody else
    written: memoryview  # the bytes of `mine`
    read: tuple[memoryview, ...]  # everybody's, by group rank; the own ones too

    @classmethod
    def of(cls, length: int, num_ranks: int, own: int) -> _Desk:
        boxes = [torch.empty(length, dtype=torch.uint8, device="cpu") for _ in range(num_ranks)]
        views = tuple(box.numpy().data for box in boxes)
        heard = tuple((at, [box]) for at, box in enumerate(boxes) if at != own)
        return cls([boxes[own]], heard, views[own], views)


class Told(NamedTuple):
    """An exchange under way."""

    group: dist.ProcessGroup
    digest: bytes  # the own one
    desk: _Desk | None  # None: it is a collective, which begins when it is waited for
    works: dict[int, dist.Work]  # of those that can be heard, by group rank
    sends: list[dist.Work]
    gone: RuntimeError | None  # what was found out about a rank that is not there


class RollCall:
    """The numbered exchanges of a group, which every rank begins equally often.

    `closes` says that the backend ends a timed out exchange for all; see Note: Who did not come.
    """

    def __init__(
        self, ranks: GroupRanks, rank: int, *, device: torch.device, name: str, closes: bool
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._device = device
        self._name = name
        self._closes = closes
        self._is_direct = closes and len(ranks) <= _FEW  # whether digests go straight to everybody
        self._desk: _Desk | None = None  # of the last exchange, which is over
        self._limit = 0.0, timedelta()  # seconds, and the same as torch takes them
        self._number = 0
        self._verdict: _Verdict | None = None
        self._kept: object = None

    def compare(self, group: dist.ProcessGroup, digest: bytes, *, timeout: float) -> list[bytes]:
        """Everybody's digest, in order of group rank."""
        return self.hear(self.tell(group, digest), timeout)

    def tell(self, group: dist.ProcessGroup, digest: bytes) -> Told:
        """The first step of two: the digest leaves, if it goes straight to everybody."""
        self._number += 1
        works: dict[int, dist.Work] = {}
        sends: list[dist.Work] = []
        gone: RuntimeError | None = None
        if not self._is_direct or self._verdict is not None:
            return Told(group, digest, None, works, sends, gone)
        desk, self._desk = self._desk, None
        if desk is None or len(desk.written) != len(digest):
            own = self._ranks.group_rank(self._rank)
            desk = _Desk.of(len(digest), len(self._ranks), own)
        desk.written[:] = digest
        mine = desk.mine
        for at, box in desk.heard:
            try:
                works[at] = group.recv(box, at, _TAG)
                sends.append(group.send(mine, at, _TAG))
            except RuntimeError as error:  # the others are to hear of this rank all the same
                gone = error
        return Told(group, digest, desk, works, sends, gone)

    def hear(self, told: Told, timeout: float) -> list[bytes]:
        """The second: everybody's digest, for which it waits up to so many seconds."""
        group, digest, desk, works, sends, gone = told
        if desk is None:
            return self._gather(group, digest, timeout)
        began = time.monotonic()
        seconds, limit = self._limit
        if seconds != timeout:
            limit = _limit(timeout)
            self._limit = timeout, limit
        num_heard = 0
        try:
            for work in works.values():
                work.wait(limit)
                num_heard += 1
                if (waited := time.monotonic() - began) > _SHORT:
                    limit = _limit(timeout - waited)
            for work in sends:
                work.wait(limit)
            if gone is not None:
                raise gone
        except RuntimeError as error:
            waited = time.monotonic() - began
            timed_out = waited >= timeout
            heard = list(works)[:num_heard]
            silent = [at for at, _ in desk.heard if at not in heard]
            come = {at for at in silent[1:] if at in works and _has_come(works[at])}
            absent = tuple(self._ranks.rank_at(at) for at in silent if at not in come)
            self._kept = desk  # which gloo may still write and read
            self._verdict = self._book(group).judge(
                timeout if timed_out else waited, timed_out=timed_out, absent=absent
            )
            raise self._error(self._verdict) from error
        digests = [view.tobytes() for view in desk.read]
        self._desk = desk
        return digests

    def _gather(self, group: dist.ProcessGroup, digest: bytes, timeout: float) -> list[bytes]:
        if self._verdict is not None:
            raise self._error(self._verdict)
        book = self._book(group)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device)
        output = torch.empty(len(digest) * len(self._ranks), dtype=torch.uint8, device=mine.device)
        began = time.monotonic()
        try:
            if self._closes:
                self._wait(start_all_gather(group, output, mine, timeout=timeout), book, timeout)
            else:
                self._raise_if_given_up(book)
                self._poll(start_all_gather(group, output, mine), book, timeout)
        except AbsentRanksError:
            raise
        except RuntimeError as error:
            waited = time.monotonic() - began
            timed_out = waited >= timeout
            self._verdict = book.judge(timeout if timed_out else waited, timed_out=timed_out)
            raise self._error(self._verdict) from error
        flat = output.cpu().numpy().tobytes()
        return [flat[at : at + len(digest)] for at in range(0, len(flat), len(digest))]

    def _book(self, group: dist.ProcessGroup) -> _Book:
        return _Book(group_store(group), f"shardwise/{self._name}", self._number, self._ranks)

    def _wait(self, work: dist.Work, book: _Book, timeout: float) -> None:
        try:
            work.wait(timedelta(seconds=min(_PATIENCE, timeout / 2)))
        except RuntimeError:
            book.note(self._ranks.group_rank(self._rank))
            work.wait()  # raises again if it has failed, else waits for the collective's timeout

    def _poll(self, work: dist.Work, book: _Book, timeout: float) -> None:
        began = time.monotonic()
        is_noted, next_look = False, min(_PATIENCE, timeout / 2)
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited >= timeout:
                raise RuntimeError(f"not completed after {timeout:g} s")
            if waited >= next_look:
                if not is_noted:
                    book.note(self._ranks.group_rank(self._rank))
                    is_noted = True
                self._raise_if_given_up(book)
                next_look = waited + _LOOK
            time.sleep(_POLL)
        work.wait()

    def _raise_if_given_up(self, book: _Book) -> None:
        self._verdict = book.verdict()
        if self._verdict is not None:
            raise self._error(self._verdict)

    def _error(self, verdict: _Verdict) -> AbsentRanksError:
        absent = ranks_text(verdict.absent) if verdict.absent else "some ranks"
        if self._rank in verdict.absent:
            what = f"this rank came too late, after the others had waited {verdict.waited:.3g} s"
            absent = "this rank"
        elif verdict.timed_out:
            what = f"{absent} did not come within {verdict.waited:.3g} s to compare arguments"
        else:
            what = f"a connection broke while ranks compared arguments, {absent} missing"
        return AbsentRanksError(
            what,
            rank=self._rank,
            ranks=verdict.absent,
            fix=f"See what {absent} did instead: every rank of the group must make the same "
            "calls in the same order, under the same shardwise.set_check(). For ranks that are "
            "only slow, raise the limit: shardwise.set_check(mode, timeout=600). This process "
            "group cannot be used any more.",
        )


@dataclass(frozen=True, slots=True)
class _Book:
    """What the store knows of one exchange. A store that fails knows nothing."""

    store: Store
    prefix: str
    number: int
    ranks: GroupRanks

    def note(self, group_rank: int) -> None:
        with suppress(RuntimeError):
            self.store.set(self._key_of(group_rank), str(self.number))

    def verdict(self) -> _Verdict | None:
        with suppress(RuntimeError):
            if self.store.check([self._verdict_key]):
                return _read(self.store.get(self._verdict_key))
        return None

    def judge(
        self, waited: float, *, timed_out: bool, absent: tuple[int, ...] | None = None
    ) -> _Verdict:
        """The verdict of whoever gave up first, which may be this rank.

        `absent` are those whom this rank misses; without it, those who have noted nothing.
        """
        end = time.monotonic() + (0 if timed_out else _VERDICT_PATIENCE)
        while (found := self.verdict()) is None and time.monotonic() < end:
            time.sleep(_POLL)
        if found is not None:
            return found
        own = _Verdict(self._absent() if absent is None else absent, waited, timed_out)
        with suppress(RuntimeError):
            return _read(self.store.compare_set(self._verdict_key, "", json.dumps(asdict(own))))
        return own

    def _absent(self) -> tuple[int, ...]:
        return tuple(rank for at, rank in enumerate(self.ranks) if not self._is_noted(at))

    def _is_noted(self, group_rank: int) -> bool:
        key = self._key_of(group_rank)
        with suppress(RuntimeError):
            # A rank cannot be further: without this one, no exchange is completed.
            return self.store.check([key]) and self.store.get(key) == str(self.number).encode()
        return False

    def _key_of(self, group_rank: int) -> str:
        return f"{self.prefix}/arrived/{group_rank}"

    @property
    def _verdict_key(self) -> str:
        return f"{self.prefix}/given_up/{self.number}"


def _limit(seconds: float) -> timedelta:
    """So long as torch takes it, or longer by less than a millisecond, which torch cuts off.

    A wait that ends too early would be taken for one that a broken connection has ended.
    """
    return timedelta(milliseconds=max(math.ceil(seconds * 1000), 1))


def _has_come(work: dist.Work) -> bool:
    with suppress(RuntimeError):
        work.wait(timedelta(milliseconds=1))
        return True
    return False


def _read(text: bytes) -> _Verdict:
    fields = json.loads(text)
    return _Verdict(tuple(fields["absent"]), fields["waited"], fields["timed_out"])
