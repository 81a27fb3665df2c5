"""A scene as SVG text, by itself: no script, no style sheet, no font of its own."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from shardwise.viz.scene import INK, QUIET, TAG

if TYPE_CHECKING:
    from shardwise.viz.scene import Polygon, Scene, Words

__all__ = ["svg_of"]

_FONT = "DejaVu Sans, Verdana, Helvetica, sans-serif"
_ON_WHITE = {INK: "#1b1b1b", QUIET: "#5f6670"}
# In a notebook's own colours, dark or light.
_ON_PAGE = {INK: "currentColor", QUIET: "currentColor"}
_HALO = 'stroke="#fff" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'


def svg_of(scene: Scene, *, margin: int = 12, ground: str | None = "#ffffff") -> str:
    """The scene on `ground` or, without one, in the colours of the page around it."""
    inks = _ON_PAGE if ground is None else _ON_WHITE
    width, height = (math.ceil(side + 2 * margin) for side in (scene.width, scene.height))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="{-margin} {-margin} {width} {height}" '
        f'font-family="{_FONT}" style="max-width:100%;height:auto">'
    ]
    if ground is not None:
        at = f'x="{-margin}" y="{-margin}" width="{width}" height="{height}"'
        lines.append(f'<rect {at} fill="{ground}"/>')
    lines += [_polygon(polygon, inks) for polygon in scene.polygons]
    lines += [_words(words, inks) for words in scene.words]
    return "\n".join([*lines, "</svg>\n"])


def _polygon(polygon: Polygon, inks: dict[str, str]) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in polygon.points)
    # A transparent fill, unlike none, is under the pointer.
    fill = "transparent" if polygon.fill is None else polygon.fill
    text = f'<polygon points="{points}" fill="{fill}"'
    if polygon.edge is not None:
        text += f' stroke="{inks.get(polygon.edge, polygon.edge)}"'
    if polygon.dashed:
        text += ' stroke-dasharray="5 3"'
    if polygon.hover is None:
        return text + "/>"
    return f"{text}><title>{escape(polygon.hover)}</title></polygon>"


def _words(words: Words, inks: dict[str, str]) -> str:
    at = f'x="{_number(words.x)}" y="{_number(words.y)}"'
    look = f'font-size="{words.size}" dominant-baseline="central"'
    if words.anchor != "start":
        look += f' text-anchor="{words.anchor}"'
    if words.bold:
        look += ' font-weight="bold"'
    if words.color == QUIET:
        look += ' opacity="0.75"' if inks is _ON_PAGE else ""
    if words.color == TAG:
        look += f" {_HALO}"
    color = inks.get(words.color, _ON_WHITE[INK] if words.color == TAG else words.color)
    # The pointer is for the box below.
    return f'<text {at} {look} fill="{color}" pointer-events="none">{escape(words.text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
