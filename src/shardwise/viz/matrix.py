"""The matrix of a plan: how much goes from whom to whom, rank by rank or block by block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from rich.style import Style
from rich.text import Text

from shardwise.transfer.units import format_bytes
from shardwise.viz.colors import rank_style
from shardwise.words import run_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.geometry.box import Ints
    from shardwise.transfer.traffic import Traffic

__all__ = ["Matrix", "MatrixText", "shade_of", "write_matrix"]

# From grey to blue at one lightness, so that white reads on it on dark and on light terminals.
_GROUNDS = ("#66707a", "#587392", "#4874ab", "#3673c8", "#1f6feb")
_QUIET = Style(dim=True)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CORNER = "from\\to"
_SUM_OF_ROW, _SUM_OF_COLUMN = "sent", "received"


@dataclass(frozen=True, eq=False)
class Matrix:
    """Bytes from blocks of ranks to blocks of ranks; where a block meets itself, what stays in it.

    Blocks that send nothing have no row, and those that get nothing no column.
    """

    ranks: Ints  # ascending: all that take part
    block_size: int
    rows: Ints  # numbers of blocks
    columns: Ints
    cells: Ints  # (rows, columns)
    sent: Ints  # (rows,): by all ranks of a block, to others of it, too
    received: Ints  # (columns,): by all ranks of a block, from others of it, too

    @classmethod
    def of(cls, traffic: Traffic, *, max_rows: int, max_columns: int) -> Matrix:
        """Matrix of single ranks if they fit, else of the smallest blocks that do."""
        senders = (traffic.sent > 0) | (traffic.kept > 0)
        receivers = (traffic.received > 0) | (traffic.kept > 0)
        takes_part = senders | receivers
        place = np.cumsum(takes_part) - 1  # among those that take part
        size = 1
        while True:
            rows, columns = (np.unique(place[busy] // size) for busy in (senders, receivers))
            if len(rows) <= max_rows and len(columns) <= max_columns:
                break
            size *= 2
        ends = [
            np.searchsorted(traffic.ranks, pair) for pair in (traffic.pair_src, traffic.pair_dst)
        ]
        own = np.flatnonzero(traffic.kept)
        row = np.searchsorted(rows, np.concatenate([place[ends[0]], place[own]]) // size)
        column = np.searchsorted(columns, np.concatenate([place[ends[1]], place[own]]) // size)
        cells = np.zeros((len(rows), len(columns)), np.int64)
        np.add.at(cells, (row, column), np.concatenate([traffic.pair_bytes, traffic.kept[own]]))
        sums = [np.zeros(len(blocks), np.int64) for blocks in (rows, columns)]
        for found, end, blocks in zip(sums, ends, (rows, columns), strict=True):
            np.add.at(found, np.searchsorted(blocks, place[end] // size), traffic.pair_bytes)
        return cls(traffic.ranks[takes_part], size, rows, columns, cells, *sums)

    @cached_property
    def is_own(self) -> np.ndarray:
        """Which cells are of a block and itself, (rows, columns)."""
        own: np.ndarray = self.rows[:, None] == self.columns
        return own

    @cached_property
    def moved(self) -> Ints:
        """The cells, with nothing where a block meets itself."""
        return np.where(self.is_own, 0, self.cells)

    @property
    def row_names(self) -> list[str]:
        """`3` of a rank, `0-7` of a block: for each of `rows`."""
        return [run_text(self.ranks_of(block).tolist()) for block in self.rows.tolist()]

    @property
    def column_names(self) -> list[str]:
        """The same for each of `columns`."""
        return [run_text(self.ranks_of(block).tolist()) for block in self.columns.tolist()]

    def ranks_of(self, block: int) -> Ints:
        """Ranks of a block of rows or columns."""
        return self.ranks[block * self.block_size : (block + 1) * self.block_size]


@dataclass(frozen=True, slots=True)
class MatrixText:
    """The lines of a matrix, as wide as each other, and the unit if all numbers have the same."""

    lines: tuple[Text, ...]
    unit: str | None

    @property
    def width(self) -> int:
        """Columns of text."""
        return self.lines[0].cell_len


def write_matrix(matrix: Matrix, *, ascii_only: bool) -> Iterator[MatrixText]:
    """The matrix as text, with the most comfort first: units at numbers, then room around them."""
    most = max(int(part.max(initial=0)) for part in (matrix.cells, matrix.sent, matrix.received))
    for unit, padding in ((None, 2), (_unit_of(most), 2), (_unit_of(most), 1)):
        yield _Writer(matrix, unit, padding, ascii_only).write()


@dataclass(frozen=True, slots=True)
class _Writer:
    """One way to write a matrix: names at the left and on top, sums at the right and below."""

    matrix: Matrix
    unit: str | None  # None: each number has its own
    padding: int  # cells around a number: one before it, the others after it
    ascii_only: bool

    def write(self) -> MatrixText:
        matrix = self.matrix
        sent, received = self._numbers(matrix.sent), self._numbers(matrix.received)
        numbers = [self._numbers(row) for row in matrix.cells]
        firsts = [int(matrix.ranks_of(block)[0]) for block in matrix.columns.tolist()]
        every = (*(number for row in numbers for number in row), *received, *map(str, firsts))
        wide = max(map(len, every))
        names = matrix.row_names
        left = max(map(len, (*names, _CORNER, _SUM_OF_COLUMN))) + 1
        right = max(map(len, (*sent, _SUM_OF_ROW)))
        bar, dash, cross = ("|", "-", "+") if self.ascii_only else ("│", "─", "┼")

        head = Text().append(f"{_CORNER} ".rjust(left), _QUIET)
        for rank in firsts:
            head.append(f"{rank}".center(wide + self.padding), self._name_style(rank))
        head.append(f" {bar} {_SUM_OF_ROW.rjust(right)}", _QUIET)
        lines = [head]
        for row, name in enumerate(names):
            first = int(matrix.ranks_of(int(matrix.rows[row]))[0])
            line = Text().append(f"{name} ".rjust(left), self._name_style(first))
            for column, number in enumerate(numbers[row]):
                line.append(*self._cell(row, column, number, wide))
            lines.append(line.append(f" {bar} ", _QUIET).append(sent[row].rjust(right)))
        rule = dash * (head.cell_len - right - 2)
        lines.append(Text(rule + cross + dash * (right + 1), _QUIET))
        foot = Text().append(f"{_SUM_OF_COLUMN} ".rjust(left), _QUIET)
        for number in received:
            foot.append(self._padded(number, wide))
        lines.append(foot.append(f" {bar}", _QUIET))
        return MatrixText(tuple(lines), self.unit)

    def _cell(self, row: int, column: int, number: str, wide: int) -> tuple[str, Style]:
        """A number, shaded by its share of the largest; what stays is marked and not shaded."""
        nbytes = int(self.matrix.cells[row, column])
        if not nbytes:
            return self._padded(number, wide), _QUIET
        if self.matrix.is_own[row, column]:
            return self._padded(f"={number}", wide), _QUIET
        ground = shade_of(nbytes / int(self.matrix.moved.max()))
        return self._padded(number, wide), Style(color="#ffffff", bgcolor=ground)

    def _padded(self, number: str, wide: int) -> str:
        return number.rjust(wide + 1) + " " * (self.padding - 1)

    def _name_style(self, rank: int) -> Style:
        return rank_style(rank) if self.matrix.block_size == 1 else Style(bold=True)

    def _numbers(self, sizes: Ints) -> list[str]:
        return [self._number(nbytes) for nbytes in sizes.tolist()]

    def _number(self, nbytes: int) -> str:
        if not nbytes:
            return "." if self.ascii_only else "·"
        return format_bytes(nbytes) if self.unit is None else _short(nbytes, self.unit)


def shade_of(share: float) -> str:
    """The ground of a cell, by its share of the largest."""
    return _GROUNDS[int(share * (len(_GROUNDS) - 1) + 0.5)]


def _unit_of(most: int) -> str:
    """The unit in which `most` has three digits at most."""
    for power, unit in enumerate(_UNITS):
        if most < 999.5 * 1024**power:
            return unit
    return _UNITS[-1]


def _short(nbytes: int, unit: str) -> str:
    """A number in three characters: `512`, `1.5`, `.07`, or `~0` for less."""
    size = nbytes / 1024 ** _UNITS.index(unit)
    if unit == "B" or size >= 9.95:
        return f"{size:.0f}"
    if size >= 0.995:
        return f"{size:.1f}"
    return f"{size:.2f}"[1:] if size >= 0.005 else "~0"
