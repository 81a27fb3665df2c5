"""A plan as a scene: the layouts before and after, the matrix of who sends how much to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.transfer.units import format_bytes
from shardwise.viz.colors import rank_hex
from shardwise.viz.layout_scene import GAP, PixelRoom, planes_scene
from shardwise.viz.matrix import Matrix, shade_of
from shardwise.viz.notes import empty_shards, matrix_notes, plan_notes
from shardwise.viz.planes import Regions
from shardwise.viz.scene import (
    INK,
    QUIET,
    Polygon,
    Scene,
    Words,
    flow,
    rectangle,
    stack,
    width_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.transfer import TransferPlan

__all__ = ["plan_scene"]

_LINE = 22  # height of a cell with a number
_SMALL = 10  # font
_LEAST_CELL = 7


def plan_scene(
    plan: TransferPlan,
    room: PixelRoom,
    *,
    title: str | None = None,
    max_bytes: int | None = None,
    max_ranks: int = 64,
    with_words: bool = True,
) -> Scene:
    """The whole picture of a plan, below its title and (if `with_words`) both layouts' reprs."""
    parts = [] if title is None else [Scene.line(title, bold=True, size=15)]
    if with_words:
        color = QUIET if title is not None else INK
        ends = [f"from {plan.source}", f"to {plan.target}"]
        parts.append(stack([Scene.line(words, color=color) for words in ends]))
    parts += _layouts(plan, room)
    below = []
    if plan.total_bytes:
        matrix = Matrix.of(plan.traffic, max_rows=max_ranks, max_columns=max_ranks)
        parts.append(_matrix_scene(matrix, room.width))
        below = [Scene.line(words, color=QUIET) for words in matrix_notes(plan, matrix)]
    below += map(Scene.line, plan_notes(plan, max_bytes))
    return stack([*parts, stack(below)], gap=8)


def _layouts(plan: TransferPlan, room: PixelRoom) -> Iterator[Scene]:
    """Both layouts, beside each other if they fit, and notes about them."""
    columns, notes = [], dict[str, Scene]()
    for name, layout in (("before", plan.source), ("after", plan.target)):
        regions = Regions.of(layout)
        if len(regions):
            planes, said = planes_scene(regions, room, itemsize=plan.itemsize)
            columns.append(stack([Scene.line(name, bold=True), planes], gap=4))
            notes |= {words.text: Scene.line(words.text, color=QUIET) for words in said.words}
    if columns:
        yield flow(columns, room=room.width, gap=2 * GAP)
    words = [*notes.values(), *(Scene.line(note, color=QUIET) for note in empty_shards(plan))]
    if words:
        yield stack(words)


def _matrix_scene(matrix: Matrix, room: float) -> Scene:
    """Cells shaded by their share of the largest; with numbers, if these have room."""
    margins = (matrix.sent, matrix.received)
    sent, received = ([format_bytes(n) for n in sums.tolist()] for sums in margins)
    numbers = [[format_bytes(nbytes) for nbytes in row] for row in matrix.cells.tolist()]
    rows, columns = matrix.row_names, matrix.column_names
    left = width_of(max(("from \\ to", "received", *rows), key=len)) + 12
    right = width_of(max(("sent", *sent), key=len)) + 12
    every = [*(f"={n}" for row in numbers for n in row), *received, *columns]
    wide = max(width_of(text, _SMALL) for text in every) + 8
    with_numbers = left + wide * len(columns) + right <= room
    cell = (wide, float(_LINE))
    if not with_numbers:
        side = max(_LEAST_CELL, (room - left - right) // max(len(columns), len(rows)))
        cell = (min(side, _LINE), min(side, _LINE))
    grid = _Cells(matrix, left, cell)
    polygons = [*grid.polygons(rows, columns)]
    words = [*grid.names(rows, columns, with_numbers)]
    if with_numbers:
        words += grid.numbers(numbers, received)
    if cell[1] > _SMALL:
        edge = left + cell[0] * len(columns) + right - 6
        shown = range(0, len(sent), grid.rows_apart)
        words += [Words(edge, grid.middle(at), sent[at], "end") for at in shown]
        words.append(Words(edge, _LINE / 2 - 3, "sent", "end", QUIET))
    height = _LINE + cell[1] * len(rows) + (_LINE if with_numbers else 4)
    return Scene(left + cell[0] * len(columns) + right, height, tuple(polygons), tuple(words))


class _Cells:
    """Where the cells of a matrix are, and what stands in them."""

    def __init__(self, matrix: Matrix, left: float, cell: tuple[float, float]) -> None:
        self.matrix, self.left, self.cell = matrix, left, cell

    @property
    def rows_apart(self) -> int:
        """How many rows apart words can stand."""
        return max(1, int(-(-14 // self.cell[1])))

    def middle(self, row: int) -> float:
        return _LINE + (row + 0.5) * self.cell[1]

    def center(self, column: int) -> float:
        return self.left + (column + 0.5) * self.cell[0]

    def polygons(self, rows: list[str], columns: list[str]) -> Iterator[Polygon]:
        """Cells in which something moves or stays, and the colours of single ranks."""
        wide, tall = self.cell
        most = max(int(self.matrix.moved.max(initial=0)), 1)
        for row, column in np.argwhere(self.matrix.cells > 0).tolist():
            nbytes = int(self.matrix.cells[row, column])
            left, top = self.left + column * wide, _LINE + row * tall
            own = bool(self.matrix.is_own[row, column])
            verb = "stays on" if own else f"goes to {columns[column]} from"
            yield Polygon(
                rectangle(left + 0.5, top + 0.5, left + wide - 0.5, top + tall - 0.5),
                fill=None if own else shade_of(nbytes / most),
                edge=QUIET if own else None,
                dashed=own,
                hover=f"{format_bytes(nbytes)} {verb} {rows[row]}",
            )
        if self.matrix.block_size == 1:
            yield from self._swatches(rows, columns)

    def _swatches(self, rows: list[str], columns: list[str]) -> Iterator[Polygon]:
        wide, tall = self.cell
        for row, name in enumerate(rows):
            top = _LINE + row * tall
            box = rectangle(self.left - 6, top + 1, self.left - 2, top + tall - 1)
            yield Polygon(box, fill=rank_hex(int(name)), hover=f"rank {name}")
        for column, name in enumerate(columns):
            left = self.left + column * wide
            box = rectangle(left + 1, _LINE - 6, left + wide - 1, _LINE - 2)
            yield Polygon(box, fill=rank_hex(int(name)), hover=f"rank {name}")

    def names(self, rows: list[str], columns: list[str], is_wide: bool) -> Iterator[Words]:
        """Names of the blocks: all, or as many as have room."""
        yield Words(self.left - 10, _LINE / 2 - 3, "from \\ to", "end", QUIET)
        widest = max(map(width_of, columns)) + 6
        every = 1 if is_wide else max(1, int(-(-widest // self.cell[0])))
        for column in range(0, len(columns), every):
            yield Words(self.center(column), _LINE / 2 - 3, columns[column], "middle", bold=True)
        for row in range(0, len(rows), self.rows_apart):
            yield Words(self.left - 10, self.middle(row), rows[row], "end", bold=True)

    def numbers(self, numbers: list[list[str]], received: list[str]) -> Iterator[Words]:
        for row, column in np.argwhere(self.matrix.cells > 0).tolist():
            own = bool(self.matrix.is_own[row, column])
            text = f"={numbers[row][column]}" if own else numbers[row][column]
            place = (self.center(column), self.middle(row))
            yield Words(*place, text, "middle", QUIET if own else "#ffffff", size=_SMALL)
        below = self.middle(len(numbers) - 1) + self.cell[1] / 2 + _LINE / 2
        yield Words(self.left - 10, below, "received", "end", QUIET)
        for column, text in enumerate(received):
            yield Words(self.center(column), below, text, "middle", size=_SMALL)
