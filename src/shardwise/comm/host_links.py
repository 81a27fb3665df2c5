"""Links between the ranks of one host, for the few bytes that ranks compare.

[Note: links] Sixteen bytes take a backend as long as a small tensor does, most of it for waking the
threads that pass them on. A socket of the host's own kernel wakes the rank that waits, and nobody
else: a small part of the time where ranks share cores (`benchmarks/create.py`). So ranks of one
host compare over links, one between every two of them. Data never go there.

How they find each other: each rank makes up a secret and listens under its digest, in Linux's
abstract namespace, which needs no file and forgets a name with its process. What ranks have to say
about links travels beside the first digests that a group compares, by its backend: their secrets,
then whether they could connect, then whether they could accept. If all could, later digests go
over links; if not, as with several hosts or containers, none do. Others on the host see the names
and not the secrets, and are not let in.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import select
import socket
import sys
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_RANKS", "WORD_BYTES", "HostLinks"]

MOST_RANKS = 16  # each has a link to every other
_SECRET_BYTES, _NUMBER_BYTES, _POSITION_BYTES = 16, 8, 2
_CONNECT, _ACCEPT, _GO, _OVER = range(4)  # what the next word is followed by
WORD_BYTES = 1 + _SECRET_BYTES  # a step, and what is said in it
_YES, _NO = bytes([1] * _SECRET_BYTES), bytes(_SECRET_BYTES)  # no secret is all zero
_LONGEST = 1 << 10  # bytes of a packet
_LONGEST_WAIT = 86_400_000  # milliseconds that the kernel is asked to wait at a time


class HostLinks:
    """The links of the rank at `position` of a group to all others.

    First, as long as there is a `word`: it is sent to all by other means, and `said` gets those of
    all. Then, if they `are_up`: `tell` and `hear`, in turns.
    """

    def __init__(self, position: int, num_ranks: int) -> None:
        self.are_up = False  # on all ranks, which know it
        self._position = position
        self._num_ranks = num_ranks
        self._step = _CONNECT
        self._begun = -1  # the last step of which this rank did what follows, or began to
        self._secret = _NO
        self._answer = _NO
        self._listener: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}  # by position
        self.gone: set[int] = set()  # positions of ranks that ended, or gave up
        # A socket that is not closed when it dies is warned of.
        self._sockets: list[socket.socket] = []
        self.close = weakref.finalize(self, _close_all, self._sockets, os.getpid())

    def word(self) -> bytes:
        """What all ranks are to be told next; nothing once all is said."""
        if self._step == _OVER:
            return b""
        if self._step == _CONNECT and self._listener is None:
            self._answer = self._secret = self._listen()
        return bytes([self._step]) + self._answer

    def said(self, words: Sequence[bytes]) -> None:
        """What all ranks told, by position; once more, if it was interrupted."""
        step, answers = self._step, [word[1:] for word in words]
        if _NO in answers or any(word[0] != step for word in words):
            self._step = _OVER  # on all ranks, for all time
            self.close()
        elif step == _GO:
            self.are_up = True
            self._step = _OVER
            assert self._listener is not None
            self._listener.close()
        else:
            is_new, self._begun = self._begun != step, step
            follow = self._connect if step == _CONNECT else self._accept
            self._answer = _YES if is_new and follow(answers) else _NO
            self._step = step + 1

    def tell(self, number: int, digest: bytes) -> None:
        """Sends everybody this rank's digest in exchange `number`. Does not wait."""
        packet = number.to_bytes(_NUMBER_BYTES) + digest
        assert len(packet) <= _LONGEST
        for at, link in self._links.items():
            try:
                link.send(packet)
            except OSError:  # one that is full, too: its rank has not listened for long
                self.gone.add(at)

    def hear(self, number: int, timeout: float) -> dict[int, bytes]:
        """The digests of the others in that exchange, by position, of those who have come.

        Waits at most `timeout` seconds; once a rank is known to be gone, for no other.
        """
        end = time.monotonic() + timeout
        start = number.to_bytes(_NUMBER_BYTES)
        found: dict[int, bytes] = {}
        wait, awaited = select.poll(), {}  # of all at once, so that the end of any is seen
        for at, link in self._links.items():
            if at not in self.gone:
                awaited[link.fileno()] = at
                wait.register(link, select.POLLIN)
        while awaited:
            left = 0 if self.gone else math.ceil((end - time.monotonic()) * 1000)
            ready = wait.poll(min(max(left, 0), _LONGEST_WAIT))
            if not ready and left <= _LONGEST_WAIT:
                break
            for descriptor, _ in ready:
                at = awaited[descriptor]
                packet = _received(self._links[at])
                if not packet:
                    self.gone.add(at)
                elif packet.startswith(start):
                    found[at] = packet[_NUMBER_BYTES:]
                else:  # of an exchange that this rank has left, as by an interrupt
                    continue
                del awaited[descriptor]
                wait.unregister(descriptor)
        return found

    def _listen(self) -> bytes:
        """The secret under which the others find this rank."""
        if sys.platform == "linux":
            secret = secrets.token_bytes(_SECRET_BYTES)
            with suppress(OSError):
                self._listener = self._socket()
                self._listener.bind(_address(secret))
                self._listener.listen(2 * MOST_RANKS)
                return secret
        return _NO

    def _connect(self, secrets_of_all: Sequence[bytes]) -> bool:
        """Links to all ranks of a lower position; whether all could be reached."""
        try:
            for at, secret in enumerate(secrets_of_all[: self._position]):
                link = self._socket()
                link.connect(_address(secret))
                link.send(secret + self._position.to_bytes(_POSITION_BYTES))
                self._links[at] = link
        except OSError:  # that rank is on another host, or in another network namespace
            return False
        return True

    def _accept(self, _: object) -> bool:
        """Links to all ranks of a higher position, all of which have connected by now."""
        assert self._listener is not None
        awaited = {
            self._secret + at.to_bytes(_POSITION_BYTES): at
            for at in range(self._position + 1, self._num_ranks)
        }
        try:
            while awaited:
                link, _ = self._listener.accept()
                self._sockets.append(link)
                link.setblocking(False)
                at = awaited.pop(_received(link), None)
                if at is None:  # a stranger
                    link.close()
                else:
                    self._links[at] = link
        except OSError:  # no connection that waits, or no descriptor for it
            return False
        return True

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(made)
        made.setblocking(False)
        return made


def _address(secret: bytes) -> bytes:
    name = hashlib.blake2b(secret, digest_size=_SECRET_BYTES, person=b"shardwise links")
    return b"\0shardwise/" + name.hexdigest().encode()


def _received(link: socket.socket) -> bytes:
    """What is there."""
    try:
        return link.recv(_LONGEST)
    except OSError:
        return b""


def _close_all(sockets: list[socket.socket], owner: int) -> None:
    is_owner = os.getpid() == owner  # and no fork of it, as the workers of a data loader are
    for one in sockets:
        if is_owner:  # a fork has the sockets, too: closed here alone, they stay connected
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        one.close()
