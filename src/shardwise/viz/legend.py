"""The legend: the ranks with their colours and what they hold."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from shardwise.transfer.units import format_bytes
from shardwise.viz.colors import rank_keys, rank_style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout

__all__ = ["Legend", "LegendRow"]

_MOST_HOLDERS = 32
_MOST_IDLE = 3  # with a row each; more are one line
_MOST_RUNS = 3


class LegendRow(NamedTuple):
    """One rank and what it holds."""

    key: str
    rank: int
    num_boxes: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class Legend:
    """What each rank holds: rows and, for those that have none, words."""

    rows: tuple[LegendRow, ...]
    words: tuple[str, ...]
    itemsize: int | None

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        itemsize: int | None,
        world_size: int | None,
        most: int = _MOST_HOLDERS,
    ) -> Legend:
        """Legend of the layout's ranks, then of those below `world_size` that hold nothing.

        Where there are more than `most`, ranks with elements have their rows before empty ones.
        The cost does not grow with `world_size` nor with the numbers of the ranks.
        """
        ranks = np.array(layout.ranks, dtype=np.int64)
        place = np.searchsorted(ranks, layout.owners)
        boxes = np.bincount(place, minlength=len(ranks))
        elements = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(elements, place, layout.boxes.volumes)
        order = np.argsort(elements == 0, kind="stable")
        shown, hidden = np.sort(order[:most]).tolist(), order[most:]
        keys = rank_keys(layout.ranks)
        rows = [LegendRow(keys[i], *map(int, (ranks[i], boxes[i], elements[i]))) for i in shown]
        words = [_more(len(hidden), int((elements[hidden] == 0).sum()))] if len(hidden) else []

        idle = _idle_runs(layout.ranks, world_size or 0)
        num_idle = sum(run.stop - run.start for run in idle)  # len() stops at 2**63
        if num_idle <= _MOST_IDLE:
            rows += [LegendRow("", rank, 0, 0) for rank in itertools.chain(*idle)]
        else:
            words.append(_hold_nothing(idle, num_idle))
        return cls(tuple(rows), tuple(words), itemsize)

    def table(self, first: int, last: int, *, keyed: bool) -> Table:
        """Rows `[first, last)`; `keyed` adds the characters that stand for ranks."""
        headings = [*["key"] * keyed, *self.headings]
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for heading in headings:
            # A swatch is the whole cell, which only a centred text fills with its colour evenly.
            swatch = heading in ("key", "rank")
            side: Literal["center", "right"] = "center" if swatch else "right"
            # "crop", as rich's ellipsis is no ASCII.
            table.add_column(heading, justify=side, no_wrap=True, overflow="crop")
        for row in self.rows[first:last]:
            rank, *cells = self.cells(row)
            style = rank_style(row.rank)
            key = [Text(row.key, style) if row.key else Text()] if keyed else []
            table.add_row(*key, Text(rank, style), *map(Text, cells))
        return table

    @property
    def headings(self) -> list[str]:
        """Names of `cells`."""
        return ["rank", "boxes", "elements", *["bytes"] * (self.itemsize is not None)]

    def cells(self, row: LegendRow) -> list[str]:
        """What stands in a row."""
        cells = [f"{row.rank}", f"{row.num_boxes:,}", f"{row.num_elements:,}"]
        if not row.num_elements:
            cells[2] = "empty" if row.num_boxes else "holds nothing"
        if self.itemsize is not None:
            cells.append(format_bytes(row.num_elements * self.itemsize))
        return cells


def _idle_runs(holders: Sequence[int], world_size: int) -> list[range]:
    """Runs of ranks below `world_size` that are not among the ascending `holders`."""
    ends = [-1, *(rank for rank in holders if rank < world_size), world_size]
    return [range(low + 1, high) for low, high in itertools.pairwise(ends) if low + 1 < high]


def _more(count: int, num_empty: int) -> str:
    return f"... and {count:,} more ranks" + (f" ({num_empty:,} empty)" if num_empty else "")


def _hold_nothing(runs: list[range], count: int) -> str:
    """`ranks 0-3, 7 hold nothing`, cut short where there are many runs."""
    names = [f"{run[0]}-{run[-1]}" if run[0] < run[-1] else f"{run[0]}" for run in runs]
    if len(names) <= _MOST_RUNS:
        return f"ranks {', '.join(names)} hold nothing"
    return f"{count:,} ranks ({names[0]}, {names[1]}, ..., {names[-1]}) hold nothing"
