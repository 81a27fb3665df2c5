"""Colours of ranks: apart for every eye, and readable."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.viz.colors import rank_color, rank_style


def test_ranks_have_colours_of_their_own() -> None:
    colors = [rank_color(rank).get_truecolor() for rank in range(64)]
    assert len(set(colors)) == 64
    nearest = min(
        max(abs(a - b) for a, b in zip(one, two, strict=True))
        for i, one in enumerate(colors[:16])
        for two in colors[:i]
    )
    assert nearest > 24


# What each kind of colour blindness makes of linear red, green and blue (Machado and others, 2009).
VISIONS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(rank: int, vision: str) -> np.ndarray:
    """The colour of a rank as this eye sees it, in CIELAB, where distances are differences seen."""
    srgb = np.array(rank_color(rank).get_truecolor()) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]
    xyz = np.array(to_xyz) @ seen
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_the_first_ranks_differ_for_every_kind_of_colour_vision(vision: str) -> None:
    seen = [lab(rank, vision) for rank in range(8)]
    nearest = min(np.linalg.norm(one - two) for i, one in enumerate(seen) for two in seen[:i])
    assert nearest > 15  # 2 is a difference that one just sees


def test_text_on_a_rank_has_contrast() -> None:
    for rank in range(64):
        style = rank_style(rank)
        assert style.color is not None
        ink, ground = (sum(color.get_truecolor()) for color in (style.color, rank_color(rank)))
        assert abs(ink - ground) > 150
