"""The data of a picture: process groups over the ranks of one world, and lines that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshverse._core import AxisLayout


@dataclass(frozen=True)
class PicturedGroups:
    """The groups of one axis layout: every rank is in exactly one of them.

    Attributes:
        names: of the axes that have these groups.
        axis: their layout over positions of the rank map.
        keeps_order: whether group ranks follow the layout, not ascending global ranks.
        made: how often they were made: once, or not at all; None where that is unknown.
        stock_copies: how often stock would make them; None where that is unknown.
        bytes_each: estimated device memory of one communicator; None where that is unknown.
        facts: other facts that a page shows, by title.
    """

    names: tuple[str, ...]
    axis: AxisLayout
    keeps_order: bool = False
    made: int | None = None
    stock_copies: int | None = None
    bytes_each: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PicturedView:
    """One way to split the world.

    Attributes:
        title: its name.
        axes: names of its axes, each with the index of its groups in `Picture.groups`.
    """

    title: str
    axes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Cell:
    """One rank.

    Attributes:
        rank: global.
        group: index of its group.
        is_mine: whether that is the group of the picture's rank.
        is_me: whether it is the picture's rank, or stands for it.
    """

    rank: int
    group: int
    is_mine: bool
    is_me: bool


@dataclass(frozen=True)
class Line:
    """The ranks of a node.

    Attributes:
        label: which node it is, or which nodes if they come after each other.
        cells: its ranks, ascending; of several nodes, those of the first.
        times: how many nodes have the same groups.
    """

    label: str
    cells: tuple[Cell, ...]
    times: int


@dataclass(frozen=True)
class Gap:
    """Lines that are left out between two others: more of the same, with other groups."""

    text: str


@dataclass(frozen=True)
class Panel:
    """One axis.

    Attributes:
        title: names of the axes.
        subtitle: how many groups, and how large.
        lines: from the first node to the last.
    """

    title: str
    subtitle: str
    lines: tuple[Line | Gap, ...]

    @property
    def drawn(self) -> list[Line]:
        """The lines without the gaps."""
        return [line for line in self.lines if isinstance(line, Line)]

    @property
    def most_cells(self) -> int:
        """Cells of the longest line."""
        return max((len(line.cells) for line in self.drawn), default=0)

    @property
    def largest_group(self) -> int:
        """The largest number of a group that is written."""
        return max((cell.group for line in self.drawn for cell in line.cells), default=0)


def printable(name: str) -> str:
    """Return a name without characters that change a terminal, or that XML forbids."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
