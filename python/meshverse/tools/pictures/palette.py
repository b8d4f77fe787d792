"""Colors of groups, distinguishable with any kind of color blindness.

Source: Masataka Okabe and Kei Ito, "Color Universal Design" (2008), with gray in place of black.
The number of a group is always written too, so that nothing depends on color alone.
"""

from __future__ import annotations

COLORS = (
    "#56b4e9",  # sky blue
    "#e69f00",  # orange
    "#009e73",  # bluish green
    "#f0e442",  # yellow
    "#0072b2",  # blue
    "#cc79a7",  # reddish purple
    "#d55e00",  # vermilion
    "#b8b8b8",  # gray
)
INKS = ("#000", "#000", "#000", "#000", "#fff", "#000", "#000", "#000")
"""Text color on each of `COLORS`."""


def color_index(group: int) -> int:
    """Return the index of a group's color: neighbors differ, and so do groups 8 apart."""
    return (group + 3 * (group // len(COLORS))) % len(COLORS)
