"""Comparing one digest per rank, with names for the ranks that do not come.

[Note: Who did not come]
An exchange costs nothing but one small all-gather as long as everybody comes. A rank that waits
for longer than `_PATIENCE` writes the number of the exchange to the group's store, one key per
rank, so that the first rank to give up can read there who waits too and who is absent. It writes
this verdict to the store, and every other rank raises with the same one.

Ranks of one host compare over links, where a rank knows by itself who did not come, and nothing is
noted. [Note: links] in `host_links.py`

Ending the exchange for all: gloo closes the connections of a collective that times out, and
ranks that wait for it or come later see that at once (the group cannot be used again). Other
backends leave a late rank waiting, or even complete its half, so there ranks look for a verdict
before and while they wait. Links are closed, and gloo's connections with them: a rank that did not
come may be waiting for data of those that did. A notice tells it why. [Note: who raised] in
`watch.py`
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise._torch_compat import group_store, start_all_gather
from shardwise.comm.host_links import MOST_RANKS, WORD_BYTES, HostLinks
from shardwise.errors import AbsentRanksError
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from shardwise._torch_compat import Store
    from shardwise.comm.ranks import GroupRanks

__all__ = ["RollCall", "Told"]

_PATIENCE = 0.1  # seconds; short against any timeout, long against an exchange
_VERDICT_PATIENCE = 0.5  # for the verdict of a rank that has just closed the connections
_POLL = 0.0001
_LOOK = 0.1  # between two looks into the store
_PACKET_BYTES = 128  # which the longest digest fits into, and a word of links before it
_DIGEST_AT = 1 + WORD_BYTES


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why an exchange was given up, the same on all ranks."""

    absent: tuple[int, ...]
    waited: float
    timed_out: bool


class Told(NamedTuple):
    """An exchange under way."""

    group: dist.ProcessGroup
    digest: bytes  # the own one
    has_left: bool  # over links; else it leaves when the others are heard


class _Gather(NamedTuple):
    """One by the backend, under way."""

    work: dist.Work
    packets: torch.Tensor  # of all ranks
    book: _Book
    timeout: float


class RollCall:
    """The numbered exchanges of a group, which every rank begins equally often.

    `give_up` tells ranks that wait for something else why, and ends their waits, where the backend
    can; see Note: Who did not come.
    """

    def __init__(
        self,
        ranks: GroupRanks,
        rank: int,
        *,
        device: torch.device,
        name: str,
        give_up: Callable[[AbsentRanksError], None] | None = None,
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._position = ranks.group_rank(rank)
        self._device = device
        self._name = name
        self._give_up = give_up
        self._number = 0
        self._verdict: _Verdict | None = None
        self._under_way: _Gather | None = None
        self._links: HostLinks | None = None
        if 1 < len(ranks) <= MOST_RANKS:
            self._links = HostLinks(self._position, len(ranks))

    def compare(self, group: dist.ProcessGroup, digest: bytes, *, timeout: float) -> list[bytes]:
        """Everybody's digest, in order of group rank."""
        return self.hear(self.tell(group, digest), timeout)

    def tell(self, group: dist.ProcessGroup, digest: bytes) -> Told:
        """The first step of two: the digest leaves, if it goes over links."""
        if self._under_way is not None and self._verdict is None:
            self._gathered()  # it was interrupted, and said of links what the others heard
        self._number += 1
        links = self._links
        if links is None or not links.are_up or self._verdict is not None:
            return Told(group, digest, has_left=False)
        links.tell(self._number, digest)
        return Told(group, digest, has_left=True)

    def hear(self, told: Told, timeout: float) -> list[bytes]:
        """The second: everybody's digest, for which it waits up to so many seconds."""
        group, digest, has_left = told
        if self._verdict is not None:
            raise self._error(self._verdict)
        if has_left:
            return self._hear_links(group, digest, timeout)
        self._under_way = self._gather(group, digest, timeout)
        return self._gathered()

    def _hear_links(self, group: dist.ProcessGroup, digest: bytes, timeout: float) -> list[bytes]:
        assert self._links is not None
        began = time.monotonic()
        heard = self._links.hear(self._number, timeout) | {self._position: digest}
        positions = range(len(self._ranks))
        if len(heard) == len(positions):
            return [heard[at] for at in positions]
        self._links.close()  # first, so that who comes now is too late
        missing = {at for at in positions if at not in heard}
        if time.monotonic() - began < timeout:  # then the others are only later than this rank
            missing &= self._links.gone
        absent = tuple(map(self._ranks.rank_at, sorted(missing)))
        raise self._given_up(self._book(group), began, timeout, absent)

    def _gather(self, group: dist.ProcessGroup, digest: bytes, timeout: float) -> _Gather:
        book = self._book(group)
        word = b"" if self._links is None else self._links.word()
        # Of one length, whatever different calls compare.
        packet = bytes([len(digest)]) + word.ljust(WORD_BYTES, b"\0") + digest
        packet = packet.ljust(_PACKET_BYTES, b"\0")
        assert len(packet) == _PACKET_BYTES
        mine = torch.frombuffer(bytearray(packet), dtype=torch.uint8).to(self._device)
        packets = mine.new_empty(_PACKET_BYTES * len(self._ranks))
        if self._give_up is None:
            self._raise_if_given_up(book)
        began = time.monotonic()
        try:
            limit = None if self._give_up is None else timeout
            work = start_all_gather(group, packets, mine, timeout=limit)
        except RuntimeError as error:
            raise self._given_up(book, began, timeout) from error
        return _Gather(work, packets, book, timeout)

    def _gathered(self) -> list[bytes]:
        """Everybody's digest in the gather under way."""
        assert self._under_way is not None
        work, packets, book, timeout = self._under_way
        began = time.monotonic()
        try:
            if self._give_up is not None:
                self._wait(work, book, timeout)
            else:
                self._poll(work, book, timeout)
        except AbsentRanksError:
            raise
        except RuntimeError as error:
            raise self._given_up(book, began, timeout) from error
        flat = packets.cpu().numpy().tobytes()
        found = [flat[at : at + _PACKET_BYTES] for at in range(0, len(flat), _PACKET_BYTES)]
        if self._links is not None and self._links.word():
            self._links.said([one[1:_DIGEST_AT] for one in found])
        self._under_way = None
        return [one[_DIGEST_AT : _DIGEST_AT + one[0]] for one in found]

    def _book(self, group: dist.ProcessGroup) -> _Book:
        return _Book(group_store(group), self._name, self._number, self._ranks)

    def _wait(self, work: dist.Work, book: _Book, timeout: float) -> None:
        try:
            work.wait(timedelta(seconds=min(_PATIENCE, timeout / 2)))
        except RuntimeError:
            book.note(self._position)
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
                    book.note(self._position)
                    is_noted = True
                self._raise_if_given_up(book)
                next_look = waited + _LOOK
            time.sleep(_POLL)
        work.wait()

    def _given_up(
        self, book: _Book, began: float, timeout: float, absent: tuple[int, ...] | None = None
    ) -> AbsentRanksError:
        """What is to be raised by a rank that has waited since `began`."""
        waited = time.monotonic() - began
        timed_out = waited >= timeout
        waited = timeout if timed_out else waited
        self._verdict = book.judge(waited, timed_out=timed_out, absent=absent)
        error = self._error(self._verdict)
        if self._give_up is not None:
            self._give_up(error)
        return error

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


def _read(text: bytes) -> _Verdict:
    fields = json.loads(text)
    return _Verdict(tuple(fields["absent"]), fields["waited"], fields["timed_out"])
