"""Traffic: what a plan's moves add up to, by rank and by pair of ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardwise.geometry.box import Ints
    from shardwise.transfer.moves import Moves

__all__ = ["Traffic"]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Bytes by rank and by pair of ranks, counted in one pass over the moves.

    What a rank holds of a reduction is added up before it counts, as on the wire.
    """

    ranks: Ints  # (n,), ascending
    sent: Ints  # (n,)
    received: Ints  # (n,)
    kept: Ints  # (n,): what a rank gets from itself
    num_peers: Ints  # (n,): ranks that it sends to or receives from
    pair_src: Ints  # (m,): pairs of ranks between which something goes, by sender and receiver
    pair_dst: Ints  # (m,)
    pair_bytes: Ints  # (m,)

    @classmethod
    def of(cls, moves: Moves, ranks: tuple[int, ...], itemsize: int) -> Traffic:
        """Traffic among `ranks`, which are all that the moves name."""
        listed = np.array(ranks, np.int64)
        size = len(listed)
        src, dst = np.searchsorted(listed, moves.src), np.searchsorted(listed, moves.dst)
        nbytes = moves.volumes * itemsize
        stays = moves.is_head & (src == dst)
        key, by_pair = _sums_by_key((src * size + dst)[moves.is_wire], nbytes[moves.is_wire])
        first, second = np.divmod(key, max(size, 1))
        both = np.sort(np.concatenate([key, second * size + first]))
        both = both[np.diff(both, prepend=-1) > 0]  # np.unique hashes, which is slower
        return cls(
            ranks=listed,
            sent=_sums(first, by_pair, size),
            received=_sums(second, by_pair, size),
            kept=_sums(src[stays], nbytes[stays], size),
            num_peers=np.bincount(both // max(size, 1), minlength=size).astype(np.int64),
            pair_src=listed[first],
            pair_dst=listed[second],
            pair_bytes=by_pair,
        )

    def bytes_sent(self, rank: int) -> int:
        """By `rank`, to all others."""
        return self._at(self.sent, rank)

    def bytes_received(self, rank: int) -> int:
        """By `rank`, from all others."""
        return self._at(self.received, rank)

    def _at(self, column: Ints, rank: int) -> int:
        slot = int(np.searchsorted(self.ranks, rank))
        return int(column[slot]) if slot < len(self.ranks) and self.ranks[slot] == rank else 0

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return int(sum(getattr(self, field.name).nbytes for field in fields(self)))


def _sums(slot: Ints, values: Ints, size: int) -> Ints:
    """Sums of `values` by slot, (size,); exact, where np.bincount's weights are floats."""
    found = np.zeros(size, np.int64)
    np.add.at(found, slot, values)
    return found


def _sums_by_key(keys: Ints, values: Ints) -> tuple[Ints, Ints]:
    """The distinct keys, ascending, and the sum of the values of each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[first], np.add.reduceat(values[order], first) if len(first) else values[:0]
