"""Process groups as pictures: on a terminal, as SVG, and as an HTML page.

- `model`: the data of a picture: groups and views of one world, and the lines that show them.
- `palette`: colours that the colour-blind distinguish too.
- `repeats`: finds rows that repeat, so that they are drawn once and counted.
- `lines`: the ranks by node, a line each, or one line for many nodes.
- `terminal`, `svg`, `page`: the three ways to show it.
- `picture`: `Picture`, which has all of them.

Nothing here knows torch: it draws layouts over a rank map.
"""

from __future__ import annotations

from .model import PicturedGroups, PicturedView
from .picture import Picture

__all__ = ["Picture", "PicturedGroups", "PicturedView"]
