"""What all drawings share: their width, their colours on every kind of console, rows of parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardwise.arguments import whole_number
from shardwise.viz.checking import check_title
from shardwise.viz.colors import sixteen_color_style

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType, RenderResult

__all__ = ["GAP", "LEAST_WIDTH", "Drawing", "in_row"]

LEAST_WIDTH = 40  # columns of text
GAP = 3  # cells between neighbours


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Drawing(ABC):
    """A rich renderable, drawn for the console it is printed to; plain text in a pipe."""

    title: str | None
    width: int | None  # None: the console's
    color: bool

    def __post_init__(self) -> None:
        check_title(self.title)
        if self.width is not None:
            object.__setattr__(self, "width", whole_number(self.width, "width", least=LEAST_WIDTH))

    @abstractmethod
    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """What stands below the title, top to bottom."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = self._segments(console, options)
        if not self.color or console.color_system is None:
            yield from _without_trailing_blanks(segments)
        elif console.color_system in ("standard", "windows"):
            yield from (
                s._replace(style=s.style and sixteen_color_style(s.style)) for s in segments
            )
        else:
            yield from segments

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lines = Segment.split_lines(self._segments(console, options))
        width = max(map(Segment.get_line_length, lines))
        return Measurement(width, width)

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        room = max(LEAST_WIDTH, min(options.max_width, self.width or options.max_width))
        options = options.update(width=room)
        head = []
        if self.title is not None:
            head.append(Text(_encodable(self.title, console.encoding), "bold"))
        return console.render(Group(*head, *self._parts(console, options)), options)


def in_row(parts: Sequence[RenderableType]) -> Table:
    """The parts beside each other."""
    row = Table.grid(padding=(0, GAP, 0, 0))
    for _ in parts:
        row.add_column(no_wrap=True, overflow="crop")
    row.add_row(*parts)
    return row


def _encodable(text: str, encoding: str) -> str:
    """`text` with escapes for the characters that a console of this encoding cannot print."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _without_trailing_blanks(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The lines as plain text."""
    for line in Segment.split_lines(segments):
        yield Segment("".join(segment.text for segment in line).rstrip())
        yield Segment.line()
