"""Texts that ranks of a group leave each other in its store, for when something goes wrong.

[Note: news] A rank that waits looks for such texts twice a second, and thousands of ranks may wait.
So who writes a text that is for all counts it, in one place, and who looks reads that number; all
texts only if it is another than before. As long as nothing goes wrong it is zero.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from shardwise._torch_compat import group_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist

    from shardwise._torch_compat import Store
    from shardwise.comm.ranks import GroupRanks

__all__ = ["Board"]

T = TypeVar("T")


class Board:
    """Texts under one name in the store of a group, which it does not keep alive.

    A store that is gone, with its group or with the rank that had it, has no texts.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: GroupRanks, rank: int, *, name: str
    ) -> None:
        self.group = weakref.ref(group)
        self._ranks, self._rank, self._name = ranks, rank, name
        self._written: dict[str, str] = {}
        self._num_read = 0  # the number of texts for all, when they were last read
        self._texts: dict[str, dict[int, str]] = {}  # those, by what they are about

    def write(self, what: str, text: str, *, reader: int | None = None) -> None:
        """This rank's text, for one rank or for all; it takes the place of the one before."""
        key = self._key(what, self._rank, reader)

        def write(store: Store) -> None:
            store.set(key, text)
            self._written[key] = text
            if reader is None:
                store.add(f"{self._name}/news", 1)

        if text != self._written.get(key, ""):
            self._with_store(write, None)

    def read(self, what: str, rank: int) -> str:
        """The text of `rank` that is for this one; empty if there is none."""
        return self._with_store(lambda store: self._get(store, what, rank, self._rank), "")

    def read_all(self, what: str) -> Mapping[int, str]:
        """Rank -> its text that is for all, of the ranks that have written one. [Note: news]"""

        def read(store: Store) -> Mapping[int, str]:
            number = store.add(f"{self._name}/news", 0)  # before the texts, so that none is missed
            if number != self._num_read:
                self._num_read = number
                self._texts.clear()
            if number and what not in self._texts:
                texts = {rank: self._get(store, what, rank, None) for rank in self._ranks}
                self._texts[what] = {rank: text for rank, text in texts.items() if text}
            return self._texts.get(what, {})

        return self._with_store(read, {})

    def _get(self, store: Store, what: str, rank: int, reader: int | None) -> str:
        key = self._key(what, rank, reader)
        return store.get(key).decode(errors="replace") if store.check([key]) else ""

    def _key(self, what: str, rank: int, reader: int | None) -> str:
        return f"{self._name}/{what}/{rank}" + ("" if reader is None else f" for {reader}")

    def _with_store(self, use: Callable[[Store], T], absent: T) -> T:
        group = self.group()
        with suppress(RuntimeError, LookupError, ValueError):  # the store, or the group, is gone
            if group is not None:
                return use(group_store(group))
        return absent
