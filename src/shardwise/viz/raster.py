"""A scene painted by matplotlib, for formats that are more than text. The extra `viz` has it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from shardwise.errors import MissingPackageError
from shardwise.viz.scene import INK, QUIET, TAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.viz.scene import Polygon, Scene, Words

__all__ = ["raster_of"]

_INKS = {INK: "#1b1b1b", QUIET: "#5f6670", TAG: "#1b1b1b"}
_SIDES = {"start": "left", "middle": "center", "end": "right"}
_PIXELS_PER_INCH = 96  # of a scene
_POINTS_PER_PIXEL = 72 / _PIXELS_PER_INCH
_MARGIN = 12  # pixels of the scene
_SCALE = 2


def raster_of(scene: Scene, file_format: str) -> bytes:
    """The scene as PNG or PDF; a PNG has two pixels for each of the scene's, along each side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"a picture as {file_format.upper()}",
            expected="matplotlib",
            got="none installed",
            fix="pip install 'shardwise[viz]', or write SVG or HTML, which need nothing more.",
        ) from error
    width, height = scene.width + 2 * _MARGIN, scene.height + 2 * _MARGIN
    # No pyplot: it would choose a window system and keep the figure.
    figure = Figure(figsize=(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-_MARGIN, width - _MARGIN), ylim=(height - _MARGIN, -_MARGIN))
    _add_polygons(axes, scene.polygons)
    for words in scene.words:
        _add_words(axes, words)
    file = io.BytesIO()
    figure.savefig(file, format=file_format, dpi=_SCALE * _PIXELS_PER_INCH)
    return file.getvalue()


def _add_polygons(axes: Any, polygons: Sequence[Polygon]) -> None:
    from matplotlib.collections import PolyCollection

    drawn = PolyCollection(
        [polygon.points for polygon in polygons],
        facecolors=[polygon.fill or "none" for polygon in polygons],
        edgecolors=[_edge(polygon) for polygon in polygons],
        linewidths=[0.3 if polygon.edge is None else 0.8 for polygon in polygons],
        linestyles=["dashed" if polygon.dashed else "solid" for polygon in polygons],
    )
    axes.add_collection(drawn, autolim=False)


def _add_words(axes: Any, words: Words) -> None:
    from matplotlib.patheffects import withStroke

    is_tag = words.color == TAG  # which stands on the lines of a picture
    axes.text(
        words.x,
        words.y,
        words.text,
        ha=_SIDES[words.anchor],
        va="center_baseline",
        color=_INKS.get(words.color, words.color),
        fontsize=words.size * _POINTS_PER_PIXEL,
        fontweight="bold" if words.bold else "normal",
        fontfamily="DejaVu Sans",
        parse_math=False,
        path_effects=[withStroke(linewidth=3, foreground="white")] if is_tag else None,
    )


def _edge(polygon: Polygon) -> str:
    """Its own or, to hide the seams that rounding leaves, that of its fill."""
    edge = polygon.edge or polygon.fill or "none"
    return _INKS.get(edge, edge)
