"""Links between the ranks of one host, for the few bytes that ranks compare.

[Note: links] Sixteen bytes take a backend as long as a small tensor does, most of it for waking the
threads that pass them on. A socket of the host's own kernel wakes the rank that waits, and nobody
else: a small part of the time where ranks share cores (`benchmarks/create.py`). So ranks of one
host compare over links, one between every two of them. Data never go there.

How they find each other: each rank makes up a name and listens under it, in Linux's abstract
namespace, which needs no file and forgets a name with its process. The names travel beside the
first digests that a group compares, by its backend, and whether a rank could connect travels beside
the second ones. If all could, later ones go over links; if not, as with several hosts or
containers, none do.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_RANKS", "HostLinks"]

MOST_RANKS = 16  # each has a link to every other
_NAME_BYTES, _NUMBER_BYTES, _POSITION_BYTES = 16, 8, 2
_NO_NAME = bytes(_NAME_BYTES)  # of a rank that cannot listen
_YES, _NO = b"\1", b"\0"
_LONGEST = 1 << 10  # bytes of a packet


class HostLinks:
    """The links of the rank at `position` of a group to all others.

    First, twice: what `to_say` gives is sent to all by other means, and `said` gets what all have
    said. Then, if they `are_up`: `tell` and `hear`, in turns.
    """

    def __init__(self, position: int, num_ranks: int) -> None:
        self.are_up = False  # on all ranks, which know it
        self._position = position
        self._num_ranks = num_ranks
        self._to_say: bytes | None = None
        self._listener: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}  # by position
        self._broken: set[int] = set()  # positions of ranks that are gone
        # A socket that is not closed when it dies is warned of.
        self._sockets: list[socket.socket] = []
        self.close = weakref.finalize(self, _close_all, self._sockets)

    def to_say(self) -> bytes:
        """What all ranks are to be told next, as long on each; nothing once that is over."""
        if self._to_say is None:
            self._to_say = self._listen()
        return self._to_say

    def said(self, by_all: Sequence[bytes]) -> None:
        """What all ranks told, by position."""
        if len(by_all[self._position]) == _NAME_BYTES:
            self._to_say = _YES if self._connect(by_all) else _NO
            return
        self._to_say = b""
        if all(one == _YES for one in by_all):
            self._accept()
            self.are_up = True
        else:
            self.close()

    def tell(self, number: int, digest: bytes) -> None:
        """Sends everybody this rank's digest in exchange `number`. Does not wait."""
        packet = number.to_bytes(_NUMBER_BYTES) + digest
        assert len(packet) <= _LONGEST
        for at, link in self._links.items():
            try:
                link.send(packet)
            except OSError:
                self._broken.add(at)

    def hear(self, number: int, timeout: float) -> dict[int, bytes]:
        """The digests of the others in that exchange, by position, of those who have come.

        Waits until all have, or one is known to be gone, or `timeout` seconds are over.
        """
        end = time.monotonic() + timeout
        found: dict[int, bytes] = {}
        for at, link in self._links.items():
            digest = None if at in self._broken else self._hear_one(at, link, number, end)
            if digest is None:
                end = 0.0  # of the others, whoever is here by now has come
            else:
                found[at] = digest
        return found

    def _hear_one(self, at: int, link: socket.socket, number: int, end: float) -> bytes | None:
        start = number.to_bytes(_NUMBER_BYTES)
        with suppress(TimeoutError, BlockingIOError):
            packet = b"?"
            while packet:
                link.settimeout(max(end - time.monotonic(), 0.0))
                try:
                    packet = link.recv(_LONGEST)
                except ConnectionError:
                    break
                if packet.startswith(start):
                    return packet[_NUMBER_BYTES:]
                # Else it is of an exchange that this rank has left, as by an interrupt.
            self._broken.add(at)
        return None

    def _listen(self) -> bytes:
        """The name under which the others find this rank."""
        if sys.platform == "linux":
            name = secrets.token_bytes(_NAME_BYTES)
            with suppress(OSError):
                self._listener = self._socket()
                self._listener.bind(_address(name))
                self._listener.listen(MOST_RANKS)
                return name
        return _NO_NAME

    def _connect(self, names: Sequence[bytes]) -> bool:
        """Links to all ranks of a lower position; whether all could be reached."""
        if _NO_NAME in names:
            return False
        try:
            for at, name in enumerate(names[: self._position]):
                link = self._links[at] = self._socket()
                link.connect(_address(name))
                link.send(self._position.to_bytes(_POSITION_BYTES))
        except OSError:  # that rank is on another host, or in another network namespace
            return False
        return True

    def _accept(self) -> None:
        """Links to all ranks of a higher position, all of which have connected."""
        assert self._listener is not None
        for _ in range(self._position + 1, self._num_ranks):
            link, _ = self._listener.accept()
            self._sockets.append(link)
            self._links[int.from_bytes(link.recv(_POSITION_BYTES))] = link
        self._listener.close()

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(made)
        return made


def _address(name: bytes) -> bytes:
    return b"\0shardwise/" + name.hex().encode()


def _close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()
