"""Plans drawn in the terminal: the layouts before and after, and who sends how much to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from shardwise.arguments import whole_number
from shardwise.errors import ArgumentTypeError
from shardwise.transfer import TransferPlan
from shardwise.viz.checking import number_or_none
from shardwise.viz.drawing import GAP, Drawing, in_row
from shardwise.viz.matrix import Matrix, MatrixText, write_matrix
from shardwise.viz.notes import empty_shards, matrix_notes, picture_notes, plan_notes
from shardwise.viz.picture import CellRoom, Picture, draw_plane
from shardwise.viz.planes import Plane, Regions, iter_planes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import ConsoleOptions, RenderableType

__all__ = ["PlanDrawing", "draw_plan", "print_plan"]

_MOST_BOXES = 64  # of a layout that is drawn
_HEIGHT = 8  # lines of such a picture, to aim at


def draw_plan(
    plan: TransferPlan,
    *,
    title: str | None = None,
    width: int | None = None,
    color: bool = True,
    layouts: bool = True,
    max_ranks: int = 16,
    max_bytes: int | None = None,
    words: bool = True,
) -> PlanDrawing:
    """A picture of `plan` that rich can print: a matrix of the bytes from each rank to each rank.

    Cells are shaded by their share of the largest; what stays on a rank is marked `=`. More than
    `max_ranks` ranks, or more than fit, are put together in blocks. Small layouts of up to two dims
    stand above, unless `layouts` is False, and of others why they do not. `max_bytes` is the cap
    for the number of rounds; without `words` neither they nor the layouts are named.

    >>> from shardwise.geometry import Box, Layout
    >>> one, other = (Layout((4,), [Box((0,), (4,))], [rank]) for rank in (0, 1))
    >>> draw_plan(TransferPlan(one, other, itemsize=4)).plan.total_bytes
    16
    """
    if not isinstance(plan, TransferPlan):
        raise ArgumentTypeError(
            "plan",
            expected="a TransferPlan",
            got=type(plan).__name__,
            fix="Call plan_reshard(source, target, itemsize) first.",
        )
    return PlanDrawing(
        plan=plan,
        title=title,
        width=width,
        color=color,
        layouts=layouts,
        max_ranks=whole_number(max_ranks, "max_ranks", least=1),
        max_bytes=number_or_none(max_bytes, "max_bytes"),
        words=words,
    )


def print_plan(
    plan: TransferPlan,
    *,
    console: Console | None = None,
    title: str | None = None,
    width: int | None = None,
    color: bool = True,
    layouts: bool = True,
    max_ranks: int = 16,
    max_bytes: int | None = None,
    words: bool = True,
) -> None:
    """Prints `draw_plan` to `console`, by default standard output (plain text in a pipe)."""
    drawing = draw_plan(
        plan,
        title=title,
        width=width,
        color=color,
        layouts=layouts,
        max_ranks=max_ranks,
        max_bytes=max_bytes,
        words=words,
    )
    (console or Console(width=width)).print(drawing)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanDrawing(Drawing):
    """A plan as a rich renderable, drawn for the console it is printed to."""

    plan: TransferPlan
    layouts: bool
    max_ranks: int
    max_bytes: int | None
    words: bool

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        plan = self.plan
        if self.words:
            head = Table.grid(padding=(0, 1, 0, 0))
            for word, layout in (("from", plan.source), ("to", plan.target)):
                head.add_row(word, f"{layout}", style="dim" if self.title is not None else "")
            yield head
        if self.layouts:
            yield from _layout_parts(plan, options)
        if plan.total_bytes:
            yield from self._matrix_parts(options)
        if not self.words:
            return
        yield Text()
        yield from map(Text, plan_notes(plan, self.max_bytes))

    def _matrix_parts(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        matrix, text = self._matrix(options)
        yield Text()
        for line in text.lines:
            line.no_wrap, line.overflow = True, "crop"
            yield line
        notes = [] if text.unit is None else [f"in {text.unit}"]
        notes += matrix_notes(self.plan, matrix)
        if notes:
            yield Text("; ".join(notes), "italic")

    def _matrix(self, options: ConsoleOptions) -> tuple[Matrix, MatrixText]:
        """The matrix of the smallest blocks that fit, written with as much comfort as fits."""
        max_columns = self.max_ranks
        while True:
            matrix = Matrix.of(self.plan.traffic, max_rows=self.max_ranks, max_columns=max_columns)
            for text in write_matrix(matrix, ascii_only=options.ascii_only):
                if text.width <= options.max_width:
                    return matrix, text
            if len(matrix.columns) == 1:
                return matrix, text
            max_columns = len(matrix.columns) - 1


def _layout_parts(plan: TransferPlan, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Both layouts if they can be drawn in full, or why not; then ranks without elements."""
    if 0 in plan.source.shape:
        return  # which is said with the totals
    yield Text()
    regions = [Regions.of(layout) for layout in (plan.source, plan.target)]
    if plan.source.ndim > 2:
        yield _not_drawn(f"{plan.source.ndim} dims")
    elif (most := max(map(len, regions))) > _MOST_BOXES:
        yield _not_drawn(f"{most:,} boxes")
    else:
        yield from _pictures(regions, options)
    yield from (Text(note, "italic") for note in empty_shards(plan))


def _not_drawn(reason: str) -> Text:
    return Text(f"layouts not drawn: {reason} (save_picture or --svg shows them)", "italic")


def _pictures(regions: list[Regions], options: ConsoleOptions) -> Iterator[RenderableType]:
    """Both layouts beside each other or one above the other, and what the signs in them mean."""
    planes = [next(iter_planes(r)) for r in regions]
    pictures = _beside(planes, options) or _stacked(planes, options)
    if pictures is None:
        yield _not_drawn("no room for labels")
        return
    titled = [
        Group(Text(name, "bold"), picture)
        for name, picture in zip(("before", "after"), pictures, strict=True)
    ]
    is_row = sum(picture.width for picture in pictures) + GAP <= options.max_width
    yield from [in_row(titled)] if is_row else titled
    notes = dict.fromkeys(
        note
        for region, picture in zip(regions, pictures, strict=True)
        for note in picture_notes(region, keyed=False, labels=picture.labels)
    )
    yield from (Text(note, "italic") for note in notes)


def _beside(planes: list[Plane], options: ConsoleOptions) -> list[Picture] | None:
    """Two pictures of half the width, or of what one of them leaves to the other."""
    width = options.max_width - GAP
    halves = [_picture(plane, width // 2, options) for plane in planes]
    for at, half in enumerate(halves):
        if half is None:
            continue
        other = halves[1 - at] or _picture(planes[1 - at], width - half.width, options)
        if other is not None:
            return [half, other] if at == 0 else [other, half]
    return None


def _stacked(planes: list[Plane], options: ConsoleOptions) -> list[Picture] | None:
    """Two pictures of the full width, if they are strips: tall ones would fill the screen."""
    pictures = [_picture(p, options.max_width, options) for p in planes if p.ndim == 1]
    found = [picture for picture in pictures if picture is not None]
    return found if len(found) == len(planes) else None


def _picture(plane: Plane, width: int, options: ConsoleOptions) -> Picture | None:
    """A picture in which every box has its label, or None if that does not fit."""
    room = CellRoom(width, keyed_width=width, height=_HEIGHT, most_lines=32)
    picture = draw_plane(plane, room, ascii_only=options.ascii_only)
    is_complete = not picture.keyed and picture.caption is None and picture.width <= width
    return picture if is_complete else None
