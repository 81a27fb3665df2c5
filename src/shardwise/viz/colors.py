"""Colours and one-character keys of ranks: the same for a rank in every picture."""

from __future__ import annotations

import colorsys
import string
from functools import lru_cache

from rich.color import Color
from rich.style import Style

__all__ = ["NUM_KEYS", "rank_color", "rank_key", "rank_style"]

# Tableau's ten: far apart, and readable beside each other on dark and on light terminals.
_FIRST = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#9c755f",
    "#ff9da7",
    "#bab0ac",
)
_GOLDEN_RATIO = 0.618033988749895
_KEYS = string.digits + string.ascii_letters
NUM_KEYS = len(_KEYS)


@lru_cache(maxsize=4096)
def rank_color(rank: int) -> Color:
    """Colour of a rank; later ranks step round the hues by the golden ratio, never repeating."""
    if rank < len(_FIRST):
        return Color.parse(_FIRST[rank])
    step = rank - len(_FIRST)
    lightness = (0.45, 0.62, 0.78)[step % 3]
    red, green, blue = colorsys.hls_to_rgb(step * _GOLDEN_RATIO % 1, lightness, 0.6)
    return Color.from_rgb(255 * red, 255 * green, 255 * blue)


@lru_cache(maxsize=4096)
def rank_style(rank: int) -> Style:
    """Bold text on the rank's colour, black or white, whichever has more contrast."""
    color = rank_color(rank)
    ink = "#000000" if _luminance(color) > 0.179 else "#ffffff"  # 0.179: equal WCAG contrast
    return Style(color=ink, bgcolor=color, bold=True)


def rank_key(rank: int) -> str:
    """The character that stands for a rank where a number has no room; repeats after `NUM_KEYS`."""
    return _KEYS[rank % NUM_KEYS]


def _luminance(color: Color) -> float:
    """Relative luminance of WCAG 2, 0 for black and 1 for white."""
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in color.get_truecolor())
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
