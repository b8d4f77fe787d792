"""Process groups as pictures: on a terminal, as SVG, and as an HTML page.

- `model`: the data of a picture: groups and views of one world, and the lines that show them.
- `palette`: colors that color-blind readers can distinguish.
- `repeats`: finds rows that repeat, so that they are drawn once and counted.
- `sharing`: finds the axes of several views that share a process group.
- `lines`: draws one line for each node, or one for many nodes with the same groups.
- `terminal`, `svg`, `page`: the three output formats.
- `picture`: `Picture`, which offers all of them.
- `of_mesh`, `of_universe`: the pictures of a mesh and of a universe.

Only `of_mesh` and `of_universe` import torch: pictures show layouts over a rank map.
"""

from __future__ import annotations

from .model import PicturedGroups, PicturedView
from .picture import Picture

__all__ = ["Picture", "PicturedGroups", "PicturedView"]
