"""The legend: every rank with its colour and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from shardwise.viz.colors import rank_key, rank_style

if TYPE_CHECKING:
    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints

__all__ = ["Legend"]

_MOST_RANKS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Legend:
    """What each rank holds, as columns of numbers."""

    ranks: Ints  # (n,)
    boxes: Ints  # (n,)
    elements: Ints  # (n,)
    itemsize: int | None

    @classmethod
    def of(cls, layout: Layout, *, itemsize: int | None, world_size: int | None) -> Legend:
        """Legend of the layout's ranks and of all below `world_size`."""
        ranks = np.union1d(layout.ranks, np.arange(world_size or 0)).astype(np.int64)
        row = np.searchsorted(ranks, layout.owners)
        boxes = np.bincount(row, minlength=len(ranks))
        elements = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(elements, row, layout.boxes.volumes)
        return cls(ranks, boxes, elements, itemsize)

    @property
    def num_shown(self) -> int:
        return min(len(self.ranks), _MOST_RANKS)

    def table(self, first: int, last: int, *, keyed: bool) -> Table:
        """Rows `[first, last)`; `keyed` adds the characters that stand for ranks."""
        headings = [*["key"] * keyed, "rank", "boxes", "elements"]
        headings += ["bytes"] if self.itemsize is not None else []
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for heading in headings:
            # A swatch is the whole cell, which only a centred text fills with its colour evenly.
            swatch = heading in ("key", "rank")
            side: Literal["center", "right"] = "center" if swatch else "right"
            # "crop", as rich's ellipsis is no ASCII.
            table.add_column(heading, justify=side, no_wrap=True, overflow="crop")
        for row in range(first, last):
            table.add_row(*self._cells(row, keyed))
        return table

    def _cells(self, row: int, keyed: bool) -> list[Text]:
        rank, boxes, elements = (
            int(column[row]) for column in (self.ranks, self.boxes, self.elements)
        )
        cells = [f"{boxes:,}", f"{elements:,}"]
        if not elements:
            cells[1] = "empty" if boxes else "holds nothing"
        if self.itemsize is not None:
            cells.append(_bytes(elements * self.itemsize))
        key = [Text(rank_key(rank), rank_style(rank))] if keyed else []
        return [*key, Text(f"{rank}", rank_style(rank)), *map(Text, cells)]

    @property
    def rest(self) -> str | None:
        """A line about the ranks that are not shown."""
        hidden = slice(self.num_shown, None)
        count = len(self.ranks[hidden])
        if not count:
            return None
        empty = int(((self.elements[hidden] == 0) & (self.boxes[hidden] > 0)).sum())
        absent = int((self.boxes[hidden] == 0).sum())
        remarks = [f"{empty:,} empty"] * bool(empty)
        remarks += [f"{absent:,} holding nothing"] * bool(absent)
        return f"... and {count:,} more ranks" + (f" ({', '.join(remarks)})" if remarks else "")


def _bytes(count: int) -> str:
    """`512 B`, `1.5 KiB`, `4.0 GiB`."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:,.1f} {unit}"
