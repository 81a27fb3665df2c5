"""Colours of ranks, the same in every picture, and the characters that stand for them in one."""

from __future__ import annotations

import colorsys
import string
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NUM_KEYS",
    "rank_color",
    "rank_hex",
    "rank_ink",
    "rank_keys",
    "rank_style",
    "sixteen_color_style",
]

# Okabe and Ito's seven and a wine red: far apart for every kind of colour vision (a test measures
# it), and readable beside each other on dark and on light grounds.
_FIRST = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#f0e442",
    "#cc79a7",
    "#882255",
)
# The terminal's own colour for each of these where it has 16: rich's nearest are mostly grey.
_FIRST_OF_SIXTEEN = (4, 3, 2, 1, 6, 11, 13, 5)
_GOLDEN_RATIO = 0.618033988749895
_KEYS = string.digits + string.ascii_letters
NUM_KEYS = len(_KEYS)  # how many ranks have a key of their own


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
    return Style(color=rank_ink(rank), bgcolor=rank_color(rank), bold=True)


def rank_hex(rank: int) -> str:
    """Colour of a rank as `#rrggbb`."""
    return rank_color(rank).get_truecolor().hex


def rank_ink(rank: int) -> str:
    """Colour of text on a rank's colour, `#000000` or `#ffffff`."""
    return "#000000" if _is_light(rank_color(rank)) else "#ffffff"


@lru_cache(maxsize=64)
def sixteen_color_style(style: Style) -> Style:
    """`style` for a terminal of 16 colours, in which the first ranks stay apart."""
    first = [rank_color(rank) for rank in range(len(_FIRST))]
    if style.bgcolor not in first:
        return style
    ground = Color.from_ansi(_FIRST_OF_SIXTEEN[first.index(style.bgcolor)])
    ink = Color.from_ansi(0 if _is_light(ground) else 15)
    return Style(color=ink.name, bgcolor=ground.name, bold=style.bold)


def rank_keys(ranks: Sequence[int]) -> list[str]:
    """A character for each of a layout's ranks; they repeat after `NUM_KEYS`.

    Rank 7 is `7` and rank 10 is `a`, unless a rank is too large for that: then they are numbered.
    """
    numbers = ranks if max(ranks, default=0) < NUM_KEYS else range(len(ranks))
    return [_KEYS[number % NUM_KEYS] for number in numbers]


def _is_light(color: Color) -> bool:
    """Whether black has more contrast with it than white."""
    return _luminance(color) > 0.179  # where WCAG's contrast is the same for both


def _luminance(color: Color) -> float:
    """Relative luminance of WCAG 2, 0 for black and 1 for white."""
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in color.get_truecolor())
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
