"""Colours of groups, distinguishable with any kind of colour blindness.

They are those of Masataka Okabe and Kei Ito, "Color Universal Design" (2008), with a grey in the
place of black. The number of a group is always written too: colour alone says nothing.
"""

from __future__ import annotations

COLOURS = (
    "#56b4e9",  # sky blue
    "#e69f00",  # orange
    "#009e73",  # bluish green
    "#f0e442",  # yellow
    "#0072b2",  # blue
    "#cc79a7",  # reddish purple
    "#d55e00",  # vermilion
    "#b8b8b8",  # grey
)
INKS = ("#000", "#000", "#000", "#000", "#fff", "#000", "#000", "#000")
"""Colours of the text on each of them."""


def colour_index(group: int) -> int:
    """Return a group's colour: neighbours differ, and the groups eight further are shifted."""
    return (group + 3 * (group // len(COLOURS))) % len(COLOURS)
