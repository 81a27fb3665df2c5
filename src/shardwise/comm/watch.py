"""Ranks that wait for one that has raised: they are told, and raise too.

[Note: who raised] Calls on hot paths compare nothing, so a rank whose arguments are wrong, or whose
own data is more than a kernel can take, raises alone, and the others wait for its messages. It
leaves a notice in the group's store, which it takes back when it comes to a later exchange. A rank
that waits for longer than `_PATIENCE` looks for notices of others, from a thread that does nothing
else; if there is one, it closes its connections, which ends the wait, and raises with that notice.
Nobody looks while nobody waits: if all ranks make the same mistake, all raise and the group stays
as it was.

A rank that waits so long also writes down what it has sent last, and what it waits for, and looks
whether another that waits too has something else in the same place ([Note: marks] in `marks.py`):
then both wait in vain. What they find is the end of the group, so they write it down, too, for all
others that wait so long: by way of others they may wait for one of the two. Only what a rank has
found itself is believed, since two that have it from each other would never find that it is over.

It closes them once every other rank has raised or waits in vain too, or has not come for as long
again: a message that a rank sends at the moment in which the other end closes is lost in gloo, and
the wait for it does not end.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from shardwise.comm.board import Board
from shardwise.comm.marks import Words, difference
from shardwise.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from shardwise.comm.marks import Mark
    from shardwise.comm.ranks import GroupRanks

__all__ = ["Message", "Watch"]

Message = tuple[int, "dist.Work | None"]  # from or to whom, and None once it was waited for

_PATIENCE = 5.0  # seconds that a rank waits before it looks; far more than an exchange takes
_LOOK = 0.5  # between two looks
_ANSWER = 4 * _LOOK  # in which one who waits, too, has looked
_NOTICE_PATIENCE = 0.5  # for the notice of a rank that has just closed the connections
# Of messages that nobody sends. gloo has connections of their own for every network interface, and
# chooses by the tag: so many in a row reach all connections.
_TAGS = range(0x5A60, 0x5A60 + 16)
_LONGEST = 2000  # characters of a notice
# What a notice is about: the rank's own failure, or that of a connection, as when a process ended.
_FAILED, _LOST = "failed", "lost"
_FAILED_TEXT = "another rank failed, for which this one waited"
_LOST_TEXT = "another rank, for which this one waited, lost a connection"
_FOUND, _HEARD = "found", "heard"  # how a rank knows that it waits in vain
_REMEMBERED = 32  # messages of a rank to another


class _Log:
    """The last messages from one rank to another; both count them."""

    __slots__ = ("_last", "_num_dropped")

    def __init__(self) -> None:
        self._last: list[Mark] = []
        self._num_dropped = 0

    def add(self, mark: Mark) -> None:
        self._last.append(mark)
        if len(self._last) > 2 * _REMEMBERED:
            self._num_dropped += len(self._last) - _REMEMBERED
            del self._last[:-_REMEMBERED]

    def __len__(self) -> int:
        """How many messages there were."""
        return self._num_dropped + len(self._last)

    def last(self) -> tuple[int, list[Mark]]:
        """The number of the first that is known, and the marks of all from there."""
        return self._num_dropped, self._last


class Watch:
    """The waits of this rank in one group, and its notices."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: GroupRanks, rank: int, *, name: str
    ) -> None:
        self._group = weakref.ref(group)
        self._board = Board(group, rank, name=name)
        self._ranks = ranks
        self._rank = rank
        self._num_raised = 0  # how often this rank has told the others
        self.has_notice = False  # whether what it has told still stands
        self._is_broken = False  # whether a connection of this rank is known to be
        self.sent: dict[int, _Log] = defaultdict(_Log)  # messages to each rank
        self.received: dict[int, _Log] = defaultdict(_Log)  # those from each that it waits for
        self._written: dict[int, tuple[int, int]] = {}  # lengths of both, when they were last
        self._is_watched = False
        self._waits_since: float | None = None
        self._is_in_vain = False  # whether the others know that this wait is
        # Who waits holds the group, and nobody stops waiting while the watching thread looks: that
        # thread is never the last to hold a group, or its store, whose end may take minutes.
        self._lock = threading.Lock()

    def tell(self, problem: BaseException) -> None:
        """Leaves a notice for ranks that wait for this one."""
        self._num_raised += 1
        self.has_notice = True
        what = _LOST if self._is_broken else _FAILED
        text = f"{self._num_raised} {what} {type(problem).__name__}: {problem}"
        self._board.write("raised", text[:_LONGEST])

    def comes(self) -> None:
        """This rank takes part in an exchange: what it told before is over."""
        self.has_notice = False
        self._board.write("raised", "")

    def wait(self, messages: Sequence[Message]) -> None:
        """Waits for the messages; raises if another rank has raised instead of sending one."""
        self._waits_since = time.monotonic()
        if not self._is_watched:
            self._is_watched = True
            _watch_over(self)
        try:
            for _, work in messages:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            with self._lock:
                self._waits_since = None
        # It was not: the rank that had raised came later. Of a group that is over others ask yet.
        if self._is_in_vain and not self._is_broken:
            self._is_in_vain = False
            self._board.write("waits", "")

    def explain(self, error: RuntimeError) -> None:
        """A connection broke: raises what another rank has told, if it was because of that."""
        self._is_broken = True
        end = time.monotonic() + _NOTICE_PATIENCE
        while (why := self._found(is_final=False) or self._heard()) is None:
            if time.monotonic() >= end:
                why = self._found()
                break
            time.sleep(_NOTICE_PATIENCE / 20)
        # What this rank lost by itself tells more than that others have lost something, too.
        if why is not None and (self._is_in_vain or not why.startswith(_LOST_TEXT)):
            raise AgreementError(
                why,
                rank=self._rank,
                fix="This process group cannot be used any more: start again. Under "
                'shardwise.set_check("debug") ranks compare arguments first, and it survives '
                "wrong ones.",
            ) from error

    def look(self) -> None:
        """Ends a wait that is in vain. For the watching thread."""
        with self._lock:
            since = self._waits_since
            waited = 0.0 if since is None else time.monotonic() - since
            if waited < _PATIENCE:
                return
            self._write_down()
            found = self._found(is_final=waited >= _PATIENCE + _ANSWER)
            why = found or self._heard()
            if why is not None:
                self._is_in_vain = True
                self._board.write("waits", f"{_FOUND if found else _HEARD} {why[:_LONGEST]}")
                if waited >= 2 * _PATIENCE or self._is_over_for_all():
                    self.close()
            elif self._is_in_vain:  # a notice was taken back
                self._is_in_vain = False
                self._board.write("waits", "")

    def give_up(self, problem: BaseException) -> None:
        """Ends the waits of all for this rank, and says why."""
        self.tell(problem)
        self.close()

    def close(self) -> None:
        """Closes the connections of this rank, gloo's: all waits for it end, and the group does."""
        group = self._group()
        for rank in self._ranks:
            if group is not None and rank != self._rank:
                for tag in _TAGS:
                    with suppress(RuntimeError):  # gloo closes a connection when a wait times out
                        never = group.recv([torch.empty(1)], self._ranks.group_rank(rank), tag)
                        never.wait(timedelta(milliseconds=1))

    def _found(self, *, is_final: bool = True) -> str | None:
        """Why this rank waits in vain, if it does; more may be known later unless `is_final`."""
        notices = self._notices()
        if notices:  # of those who failed first
            return min(notices.values())
        partners = sorted({*self.sent, *self.received})
        texts = self._board.read("messages", partners, reader=self._rank)
        found = (
            self._difference_from(rank, text, is_final=is_final) for rank, text in texts.items()
        )
        return next(filter(None, found), None)

    def _heard(self) -> str | None:
        """Why another rank waits in vain, which has found that itself."""
        others = {**self._board.read("waits", self._ranks.ranks), self._rank: ""}
        told = [text.partition(" ") for text in others.values()]
        return next((why for how, _, why in told if how == _FOUND), None)

    def _write_down(self) -> None:
        """What this rank sends and waits for, for those who wait for it."""
        for rank in {*self.sent, *self.received}:
            logs = self.sent[rank], self.received[rank]
            lengths = len(logs[0]), len(logs[1])
            if self._written.get(rank) != lengths:
                self._written[rank] = lengths
                tags = [(log.last()[0], [mark.tag for mark in log.last()[1]]) for log in logs]
                self._board.write("messages", json.dumps(tags), reader=rank)

    def _difference_from(self, rank: int, text: str, *, is_final: bool) -> str | None:
        """Messages between this rank and another that never meet, since they move other things."""
        their_sent, their_received = json.loads(text)
        pairs = (self.sent[rank], their_received), (self.received[rank], their_sent)
        for log, (their_first, their_tags) in pairs:
            first, marks = log.last()
            for number in range(max(first, their_first), len(log)):
                if number - their_first >= len(their_tags):
                    break
                mark, their_tag = marks[number - first], their_tags[number - their_first]
                if mark.tag != their_tag:
                    self._board.explain(str(mark.tag), json.dumps(mark.words))
                    meaning = self._board.meaning(str(their_tag))
                    if meaning or is_final:  # they explain it when they look and find the same
                        their_words = Words(*json.loads(meaning)) if meaning else None
                        return difference(self._rank, mark.words, rank, their_words)
                    return None
        return None

    def _notices(self) -> dict[int, str]:
        """What others have told that raised more often than this rank, in words."""
        found = {}
        for rank, told in self._board.read("raised", self._ranks.ranks).items():
            count, what, text = told.split(" ", 2)
            # What all ranks have raised together is over for all of them.
            if rank != self._rank and int(count) > self._num_raised:
                start = _FAILED_TEXT if what == _FAILED else _LOST_TEXT
                found[rank] = f"{start}: [rank {rank}] {text}"
        return found

    def _is_over_for_all(self) -> bool:
        """Whether every rank has raised, or knows that it waits in vain."""
        told = self._board.read("waits", self._ranks.ranks)
        return {*told, *self._notices()} >= {*self._ranks}


# Module state: one thread for all groups of this process, which ends with the process.
_waiting: weakref.WeakSet[Watch] = weakref.WeakSet()
_started = False


def _watch_over(watch: Watch) -> None:
    global _started
    _waiting.add(watch)
    if not _started:
        _started = True
        threading.Thread(target=_watch, name="shardwise watch", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(_LOOK)
        # A group may be destroyed, or another be added, at any moment: then it looks next time.
        with suppress(Exception):
            for watch in list(_waiting):
                watch.look()
