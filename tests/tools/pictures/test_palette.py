"""Colours of groups can be read, and distinguished by the red-green colour-blind too."""

from __future__ import annotations

import itertools

import pytest

from meshverse.tools.pictures.palette import COLOURS, INKS, colour_index

Colour = tuple[float, float, float]

# What is seen of linear light: Viénot, Brettel and Mollon, "Digital video colourmaps for checking
# the legibility of displays by dichromats" (1999).
_SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def _linear(colour: str) -> Colour:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return red, green, blue


def _luminance(colour: Colour) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def _lab(colour: Colour) -> Colour:
    red, green, blue = (max(0.0, part) for part in colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = _luminance((red, green, blue))
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _distance(one: Colour, other: Colour) -> float:
    pairs = zip(_lab(one), _lab(other), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


@pytest.mark.parametrize("seen", _SEEN)
def test_all_pairs_differ_clearly(seen: str) -> None:
    rows = _SEEN[seen]

    def see(colour: str) -> Colour:
        light = _linear(colour)
        red, green, blue = (sum(a * b for a, b in zip(row, light, strict=True)) for row in rows)
        return red, green, blue

    for one, other in itertools.combinations(COLOURS, 2):
        assert _distance(see(one), see(other)) > 10, (one, other)


def test_numbers_can_be_read_on_every_colour() -> None:
    """A contrast of 4.5 is what WCAG 2.2 asks for (level AA)."""
    for colour, ink in zip(COLOURS, INKS, strict=True):
        low, high = sorted((_luminance(_linear(colour)), _luminance(_linear(ink))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_neighbours_have_different_colours() -> None:
    indices = [colour_index(group) for group in range(2_000)]
    assert set(indices) == set(range(len(COLOURS)))
    assert all(one != other for one, other in itertools.pairwise(indices))
    assert all(one != other for one, other in zip(indices, indices[8:], strict=False))
