"""Rounds of messages over torch.distributed: posted one by one, or batched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardwise.comm.marks import Mark
    from shardwise.comm.ranks import GroupRanks
    from shardwise.comm.roll_call import RollCall, Told
    from shardwise.comm.watch import Message, Watch

__all__ = ["TAG", "BatchedFlight", "EarlyPostedFlight", "PostedFlight", "as_bytes"]

TAG = 0x5A4D  # any but 0, the tag of a user's own messages


class PostedFlight:
    """Messages that start when they are named, for gloo.

    The watch knows what is moved, if there is a mark. [Note: marks] in `marks.py` The group's own
    `send` and `recv` are called because `dist.isend` takes twice the time.
    """

    __slots__ = ("_group", "_group_rank", "_mark", "_messages", "_tag", "_watch")

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: GroupRanks,
        watch: Watch,
        tag: int = TAG,
        mark: Mark | None = None,
    ) -> None:
        if watch.has_notice:
            watch.comes()
        self._watch = watch
        self._group = group
        self._group_rank = ranks.group_rank_of
        self._mark = mark
        self._tag = tag if mark is None else mark.tag
        # Receives, then sends, each of which holds its buffer. Of gloo, a second wait for the same
        # message would never end: None once waited for.
        self._messages: list[Message] = []

    def receive(self, peer: int, buffer: torch.Tensor) -> None:
        if self._mark is not None:
            self._watch.received[peer].add(self._mark)
        try:
            work = self._group.recv([buffer], self._group_rank[peer], self._tag)
        except RuntimeError as error:
            self._watch.explain(error)
            raise
        self._messages.append((peer, work))

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        if self._mark is not None:
            self._watch.sent[peer].add(self._mark)
        try:
            work = self._group.send([buffer], self._group_rank[peer], self._tag)
        except RuntimeError as error:
            self._watch.explain(error)
            raise
        self._messages.append((peer, work))

    def launch(self) -> None:
        """Nothing: everything is under way."""

    def land(self, index: int) -> None:
        message = self._messages[index]
        if message[1] is not None:
            self._messages[index] = message[0], None
            try:
                self._watch.wait((message,))
            except BaseException:
                self._messages.clear()  # nothing is waited for any more
                raise

    def finish(self) -> None:
        messages, self._messages = self._messages, []
        self._watch.wait(messages)


class EarlyPostedFlight(PostedFlight):
    """The same beside a digest that ranks compare."""

    __slots__ = ("_digest", "_roll_call", "_told")

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: GroupRanks,
        watch: Watch,
        tag: int,
        roll_call: RollCall,
        digest: bytes,
    ) -> None:
        super().__init__(group, ranks, watch, tag)
        self._roll_call = roll_call
        self._digest = digest
        self._told: Told | None = None

    def tell(self) -> None:
        self._told = self._roll_call.tell(self._group, self._digest)

    def compared(self, *, timeout: float) -> list[bytes]:
        assert self._told is not None
        return self._roll_call.hear(self._told, timeout)

    def leave(self, peers: Collection[int]) -> None:
        """Waits for all messages but those of these peers, which never come."""
        self._messages = [message for message in self._messages if message[0] not in peers]
        self.finish()


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat one that shares its memory."""
    # One element may have any stride, an expanded one 0, and be contiguous all the same.
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)


class BatchedFlight:
    """Messages that start together, for NCCL and backends of which nothing is known.

    They go as bytes, because a backend may not know every dtype.

    `meet` is called before, on all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, meet: Callable[[], None]) -> None:
        self._group = group
        self._meet = meet
        self._messages: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def receive(self, peer: int, buffer: torch.Tensor) -> None:
        self._messages.append(dist.P2POp(dist.irecv, as_bytes(buffer), peer, self._group))

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        self._messages.append(dist.P2POp(dist.isend, as_bytes(buffer), peer, self._group))

    def launch(self) -> None:
        self._meet()
        if self._messages:
            self._works = dist.batch_isend_irecv(self._messages)

    def land(self, index: int) -> None:
        # A backend may answer a batch with one work for all of it, as NCCL does, whose `wait`
        # only makes the current stream wait.
        while self._works:
            self._works.pop().wait()

    def finish(self) -> None:
        self.land(0)
        self._messages.clear()
