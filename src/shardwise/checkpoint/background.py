"""Saves that go on in the background: one at a time in each group, in a thread.

The thread has exchanges of its own with those of the other ranks, in a process group that is made
for them once, so that they cannot mix with what the program does meanwhile. Simulated ranks take
turns in one thread each, so there the work is done at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from shardwise.comm.alone import ALONE
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentValueError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.comm.communicator import Communicator

__all__ = ["AsyncSave", "Background", "IfBusy", "Saved", "background_of", "checked_if_busy"]

_LOGGER = logging.getLogger(__name__)

IfBusy = Literal["wait", "raise"]  # what a save does while another is under way


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save has written."""

    path: Path
    num_tensors: int
    nbytes: int  # of the tensors, by all ranks
    rank_bytes: int  # of them, by this rank


class AsyncSave:
    """A save under way. `wait()` returns once it is the checkpoint, or raises what went wrong."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._saved: Saved | None = None
        self._error: Exception | None = None
        self.was_heard = False  # whether somebody knows of the error

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._is_over.is_set()

    def wait(self) -> Saved:
        """What was written; the same at every call. Raises if it could not be."""
        self._is_over.wait()
        if self._error is not None:
            self.was_heard = True
            raise self._error
        assert self._saved is not None
        return self._saved

    def run(self, work: Callable[[], Saved]) -> None:
        """Does the work. For the thread that does."""
        try:
            self._saved = work()
        except Exception as error:  # which is told to whoever asks next
            _LOGGER.exception("a save in the background failed")
            self._error = error
        finally:
            self._is_over.set()


class Background:
    """The saves of one group on this rank."""

    def __init__(self, members: Communicator) -> None:
        self._members = weakref.ref(members)
        self._own: Communicator | None = None
        self._last: AsyncSave | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def settle(self, if_busy: IfBusy = "wait") -> None:
        """Waits for the save that is under way, or raises; raises what went wrong in it."""
        last = self._last
        if last is None or last.was_heard:
            return
        if not last.done() and if_busy == "raise":
            raise CheckpointError(
                "a save in the background is not over yet",
                fix='Wait for it: handle.wait(), or save(..., if_busy="wait").',
            )
        last.wait()

    def members(self) -> Communicator:
        """The group in which the thread makes its exchanges; all ranks ask for it together."""
        members = self._members()
        assert members is not None
        if self._own is None:
            self._own = members
            if hasattr(members, "process_group"):
                # Only its members call: the rest of the world need not know.
                ranks = list(members.ranks)
                made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
                self._own = communicator(made)
        return self._own

    def memory(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        """Memory for copies, the same at every save, which is faster than new memory.

        To pinned memory a GPU copies several times as fast.
        """
        if len(self._memory) < nbytes or (is_pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go before there is more
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._memory[:nbytes]

    def start(self, work: Callable[[], Saved]) -> AsyncSave:
        """Has the work done."""
        handle = self._last = AsyncSave()
        members = self._members()
        if members is ALONE or hasattr(members, "process_group"):
            # No daemon: the interpreter waits for it before it ends.
            context = copy_context()
            threading.Thread(
                target=context.run, args=(handle.run, work), name="shardwise save"
            ).start()
        else:
            handle.run(work)
        return handle


# Module state, because it follows torch's own: the groups of this process.
_backgrounds: weakref.WeakKeyDictionary[Communicator, Background] = weakref.WeakKeyDictionary()


def background_of(members: Communicator) -> Background:
    """The saves in the background of a group."""
    if members not in _backgrounds:
        _backgrounds[members] = Background(members)
    return _backgrounds[members]


def checked_if_busy(if_busy: object) -> IfBusy:
    """The same, or an error."""
    if if_busy == "wait" or if_busy == "raise":
        return if_busy
    raise ArgumentValueError("if_busy of save", expected="'wait' or 'raise'", got=repr(if_busy))
