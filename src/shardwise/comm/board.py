"""Texts that ranks which wait leave each other in the store of their group.

[Note: news] A rank that waits looks for such texts twice a second, and thousands of ranks may wait.
So who writes a text counts it, in one place for all readers of it, and who looks reads that number,
and the texts only if it is another than before.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from shardwise._torch_compat import group_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch.distributed as dist

    from shardwise._torch_compat import Store

__all__ = ["Board"]

T = TypeVar("T")
_Texts = dict[int, str]  # rank -> what it has written


class Board:
    """Texts under one name in the store of a group, which it does not keep alive.

    A store that is gone, with its group or with the rank that had it, has no texts.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, *, name: str) -> None:
        self._group = weakref.ref(group)
        self._rank, self._name = rank, name
        self._last: dict[str, str | None] = {}  # what stands under a key; None: perhaps
        # By what they are about: news and ranks as they were when they were last read, the texts.
        self._read: dict[str, tuple[int, Collection[int], _Texts]] = {}
        self._lock = threading.Lock()  # a rank looks in one thread, and is told in another

    def write(self, what: str, text: str, *, reader: int | None = None) -> None:
        """This rank's text, for one rank or for all; it takes the place of the one before."""
        key = self._key(what, self._rank, reader)

        def put(store: Store) -> None:
            self._last[key] = None
            store.set(key, text)
            store.add(self._news(reader), 1)
            self._last[key] = text

        with self._lock:
            if text != self._last.get(key, ""):
                self._with_store(put, None)

    def read(
        self, what: str, ranks: Collection[int], *, reader: int | None = None
    ) -> Mapping[int, str]:
        """Rank -> its text that is for `reader`, or for all; of those that have written one."""

        def get(store: Store) -> _Texts:
            news = self._news(reader)  # before the texts, so that none is missed
            number = int(store.get(news)) if store.check([news]) else 0
            known_number, known_ranks, texts = self._read.get(what, (0, ranks, {}))
            if (number, ranks) != (known_number, known_ranks):
                found = {rank: _get(store, self._key(what, rank, reader)) for rank in ranks}
                texts = {rank: text for rank, text in found.items() if text}
                self._read[what] = number, ranks, texts
            return texts

        with self._lock:
            return self._with_store(get, {})

    def explain(self, word: str, text: str) -> None:
        """What a word means that ranks use in texts, the same whichever rank says so."""
        self._with_store(lambda store: store.set(f"{self._name}/meaning/{word}", text), None)

    def meaning(self, word: str) -> str:
        """What a rank has explained; empty if none has."""
        return self._with_store(lambda store: _get(store, f"{self._name}/meaning/{word}"), "")

    def _key(self, what: str, rank: int, reader: int | None) -> str:
        return f"{self._name}/{what}/{rank}" + ("" if reader is None else f" for {reader}")

    def _news(self, reader: int | None) -> str:
        return f"{self._name}/news" + ("" if reader is None else f" for {reader}")

    def _with_store(self, use: Callable[[Store], T], absent: T) -> T:
        group = self._group()
        with suppress(RuntimeError, LookupError, ValueError):  # the store, or the group, is gone
            if group is not None:
                return use(group_store(group))
        return absent


def _get(store: Store, key: str) -> str:
    return store.get(key).decode(errors="replace") if store.check([key]) else ""
