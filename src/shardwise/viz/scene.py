"""A scene: coloured polygons and words at pixels, which SVG and matplotlib paint alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "FONT_SIZE",
    "INK",
    "QUIET",
    "TAG",
    "Point",
    "Polygon",
    "Scene",
    "Words",
    "flow",
    "rectangle",
    "stack",
    "width_of",
]

FONT_SIZE = 12  # pixels, of labels
# Colours that the painter chooses to fit its ground; TAG is ink with a light halo, for stripes.
INK, QUIET, TAG = "ink", "quiet", "tag"
_CHARACTER = 0.62  # width of one, as a share of the font's size; a little more than it has
_LINE = 1.5  # height of a line, as a share of the font's size

# Pixels to the right and down.
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled or outlined area."""

    points: tuple[Point, ...]
    fill: str | None = None
    edge: str | None = None
    dashed: bool = False
    hover: str | None = None  # what a viewer that can shows under the pointer

    def moved(self, right: float, down: float) -> Polygon:
        """The same elsewhere."""
        points = tuple((x + right, y + down) for x, y in self.points)
        return Polygon(points, self.fill, self.edge, self.dashed, self.hover)


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text; `y` is its middle."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = INK
    bold: bool = False
    size: int = FONT_SIZE

    @property
    def width(self) -> float:
        """Room that it takes, about."""
        return width_of(self.text, self.size)

    def moved(self, right: float, down: float) -> Words:
        """The same elsewhere."""
        place = (self.x + right, self.y + down)
        return Words(*place, self.text, self.anchor, self.color, self.bold, self.size)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is painted, first to last, in a frame of `width` x `height` pixels."""

    width: float
    height: float
    polygons: tuple[Polygon, ...] = field(default=())
    words: tuple[Words, ...] = field(default=())

    def moved(self, right: float, down: float) -> Scene:
        """The same, in a frame that is larger at the left and on top."""
        return Scene(
            self.width + right,
            self.height + down,
            tuple(polygon.moved(right, down) for polygon in self.polygons),
            tuple(words.moved(right, down) for words in self.words),
        )

    @classmethod
    def line(
        cls, text: str, *, color: str = INK, bold: bool = False, size: int = FONT_SIZE
    ) -> Scene:
        """One line of text."""
        words = Words(0, size * _LINE / 2, text, color=color, bold=bold, size=size)
        return cls(words.width, size * _LINE, (), (words,))

    @classmethod
    def over_each_other(cls, scenes: Iterable[Scene]) -> Scene:
        """All of them in one frame, from the same corner."""
        parts = list(scenes)
        return cls(
            max((part.width for part in parts), default=0),
            max((part.height for part in parts), default=0),
            tuple(polygon for part in parts for polygon in part.polygons),
            tuple(words for part in parts for words in part.words),
        )


def rectangle(left: float, top: float, right: float, bottom: float) -> tuple[Point, ...]:
    """Corners of a rectangle."""
    return (left, top), (right, top), (right, bottom), (left, bottom)


def width_of(text: str, size: int = FONT_SIZE) -> float:
    """Room that a line of text takes, about."""
    return len(text) * size * _CHARACTER


def stack(scenes: Iterable[Scene], *, gap: float = 0) -> Scene:
    """Scenes below each other."""
    placed, down = [], 0.0
    for scene in scenes:
        placed.append(scene.moved(0, down))
        down += scene.height + gap
    return Scene.over_each_other(placed)


def flow(scenes: Sequence[Scene], *, room: float, gap: float) -> Scene:
    """Scenes in rows, as many in each as fit in `room`."""
    placed: list[Scene] = []
    right = down = deepest = 0.0
    for scene in scenes:
        if right and right + scene.width > room:
            right, down = 0.0, deepest + gap
        placed.append(scene.moved(right, down))
        right += scene.width + gap
        deepest = max(deepest, down + scene.height)
    return Scene.over_each_other(placed)
