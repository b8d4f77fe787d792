"""Colors of groups can be read, and distinguished by the red-green color-blind too."""

from __future__ import annotations

import itertools

import pytest

from meshverse.tools.pictures.palette import COLORS, INKS, color_index

Color = tuple[float, float, float]

# What is seen of linear light: Viénot, Brettel and Mollon, "Digital video colourmaps for checking
# the legibility of displays by dichromats" (1999).
_SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def _linear(color: str) -> Color:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return red, green, blue


def _luminance(color: Color) -> float:
    return 0.2126 * color[0] + 0.7152 * color[1] + 0.0722 * color[2]


def _lab(color: Color) -> Color:
    red, green, blue = (max(0.0, part) for part in color)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = _luminance((red, green, blue))
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _distance(one: Color, other: Color) -> float:
    pairs = zip(_lab(one), _lab(other), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


@pytest.mark.parametrize("seen", _SEEN)
def test_all_pairs_differ_clearly(seen: str) -> None:
    rows = _SEEN[seen]

    def see(color: str) -> Color:
        light = _linear(color)
        red, green, blue = (sum(a * b for a, b in zip(row, light, strict=True)) for row in rows)
        return red, green, blue

    for one, other in itertools.combinations(COLORS, 2):
        assert _distance(see(one), see(other)) > 10, (one, other)


def test_numbers_can_be_read_on_every_color() -> None:
    """A contrast of 4.5 is what WCAG 2.2 asks for (level AA)."""
    for color, ink in zip(COLORS, INKS, strict=True):
        low, high = sorted((_luminance(_linear(color)), _luminance(_linear(ink))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, color


def test_neighbors_have_different_colors() -> None:
    indices = [color_index(group) for group in range(2_000)]
    assert set(indices) == set(range(len(COLORS)))
    assert all(one != other for one, other in itertools.pairwise(indices))
    assert all(one != other for one, other in zip(indices, indices[8:], strict=False))
