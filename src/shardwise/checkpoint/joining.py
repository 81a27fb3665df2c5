"""What ranks load together.

[Note: who loads what] Mostly every rank has the same names and layouts, which one small exchange
tells. Where ranks have different ones, such as the layers of their stage of a pipeline, everybody's
descriptions are exchanged, and all ranks know of all tensors: a plain one is the same on those that
have it, and all owners of a sharded one must have it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.comm.agreement import by_rank
from shardwise.errors import AgreementError
from shardwise.sharded_tensor.resharding import replicated
from shardwise.words import dtype_name, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardwise.checkpoint.mosaics import Mosaic
    from shardwise.geometry import Layout

__all__ = ["Joined", "Told", "Wish", "all_alike", "join"]


class Wish(NamedTuple):
    """A tensor that a rank wants filled."""

    dtype: torch.dtype
    layout: Layout | None  # None: a plain tensor, the same on all ranks that have it
    mosaic: Mosaic

    @property
    def key(self) -> str:
        """The same text for equal ones, in every process."""
        layout = "plain" if self.layout is None else self.layout.fingerprint
        return f"{self.dtype} {layout} {self.mosaic}"

    def __str__(self) -> str:
        layout = f"plain {self.mosaic.shape}" if self.layout is None else str(self.layout)
        sources = ", ".join(dict.fromkeys(window.name for window in self.mosaic.windows))
        return f"{layout} of {dtype_name(self.dtype)} from {sources}"


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank wants, as the others hear it."""

    wishes: dict[str, Wish]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def digest(self) -> bytes:
        """16 bytes, the same on ranks that want the same."""
        wishes = [(name, wish.key) for name, wish in self.wishes.items()]
        text = repr((wishes, self.missing, self.unexpected))
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


class Joined(NamedTuple):
    """What all ranks want: layouts of all tensors, and the names without partner on all."""

    wishes: dict[str, tuple[Wish, Layout]]
    missing: list[str]
    unexpected: list[str]


def all_alike(told: Told, ranks: Sequence[int]) -> Joined:
    """What `ranks` want together if every one of them wants this."""
    members = tuple(sorted(ranks))
    wishes = {name: (wish, _layout(name, wish, members)) for name, wish in told.wishes.items()}
    return Joined(wishes, list(told.missing), list(told.unexpected))


def join(told: Mapping[int, Told]) -> Joined:
    """What ranks want together, by rank; raises where they contradict. [Note: who loads what]"""
    by_name: dict[str, list[tuple[int, Wish]]] = {}
    for rank, one in told.items():
        for name, wish in one.wishes.items():
            by_name.setdefault(name, []).append((rank, wish))
    wishes = {}
    for name, found in by_name.items():
        if len({wish.key for _, wish in found}) > 1:
            shown = by_rank((rank, wish.key, str(wish)) for rank, wish in found)
            raise AgreementError(
                f"load: ranks differ in {name!r} ({shown})",
                fix="Pass the same on every rank of the group.",
            )
        having = tuple(sorted(rank for rank, _ in found))
        wishes[name] = (found[0][1], _layout(name, found[0][1], having))
    unexpected = set.intersection(*(set(one.unexpected) for one in told.values()))
    return Joined(
        wishes,
        list(dict.fromkeys(name for one in told.values() for name in one.missing)),
        [name for name in next(iter(told.values())).unexpected if name in unexpected],
    )


def _layout(name: str, wish: Wish, having: tuple[int, ...]) -> Layout:
    if wish.layout is None:
        return replicated(wish.mosaic.shape, having)
    absent = sorted(set(wish.layout.ranks) - set(having))
    if absent:
        raise AgreementError(
            f"load: {name!r} has shards on {ranks_text(wish.layout.ranks)}",
            expected="all of them to load it",
            got=f"nothing from {ranks_text(absent)}",
            fix="Let every rank of the tensor's group call load() with it, in one group that has "
            "all of them: load(..., process_group=...).",
        )
    return wish.layout
