"""Data of a picture: process groups over the ranks of one world, and the lines that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshverse._core import AxisLayout


@dataclass(frozen=True)
class PicturedGroups:
    """The groups of one axis layout: every rank is in exactly one of them.

    Attributes:
        names: names of the axes that have these groups.
        axis: layout of the axes over positions of the rank map.
        preserve_rank_order: whether group ranks follow the layout, not ascending global ranks.
        made: how often Meshverse creates them, 0 or 1; None if unknown.
        stock_copies: how often torch's `DeviceMesh` would create them; None if unknown.
        bytes_each: estimated device memory of one communicator; None if unknown.
        facts: other facts that a page shows, by title.
    """

    names: tuple[str, ...]
    axis: AxisLayout
    preserve_rank_order: bool = False
    made: int | None = None
    stock_copies: int | None = None
    bytes_each: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PicturedView:
    """One way to split the world.

    Attributes:
        title: name of the view.
        axes: names of its axes, each with the index of its groups in `Picture.groups`.
    """

    title: str
    axes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Cell:
    """One rank in a picture.

    Attributes:
        rank: global rank.
        group: index of its group.
        is_mine: whether that is the group of the picture's rank.
        is_me: whether it is the picture's rank, or represents it in a line for several nodes.
    """

    rank: int
    group: int
    is_mine: bool
    is_me: bool


@dataclass(frozen=True)
class Line:
    """One line of a picture: the ranks of a node, or of several nodes with the same groups.

    Attributes:
        label: the node, or the range of consecutive nodes.
        cells: the ranks of the node, or of the first of several, ascending.
        times: number of nodes that this line represents.
    """

    label: str
    cells: tuple[Cell, ...]
    times: int


@dataclass(frozen=True)
class Gap:
    """Omitted lines between two others: like them, but with other groups."""

    text: str


@dataclass(frozen=True)
class Panel:
    """Picture of one axis, or of several axes with the same groups.

    Attributes:
        title: names of the axes.
        subtitle: number, size and layout of the groups.
        lines: lines from the first node to the last.
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
        """Number of cells of the longest line."""
        return max((len(line.cells) for line in self.drawn), default=0)

    @property
    def largest_group(self) -> int:
        """The largest group index that is drawn."""
        return max((cell.group for line in self.drawn for cell in line.cells), default=0)


@dataclass(frozen=True)
class SharedColumn:
    """The axes of all views that use the process groups of one layout.

    Attributes:
        title: size of the groups.
        names: for each view, the names of its axes that use them.
    """

    title: str
    names: tuple[tuple[str, ...], ...]

    @property
    def is_shared(self) -> bool:
        """Whether several axes use the groups."""
        return sum(map(len, self.names)) > 1


@dataclass(frozen=True)
class Sharing:
    """Which axes of several views share a process group.

    Attributes:
        title: number of process groups of a rank, with torch and with Meshverse.
        subtitle: explanation.
        views: titles of the views.
        columns: one for each of the distinct groups.
    """

    title: str
    subtitle: str
    views: tuple[str, ...]
    columns: tuple[SharedColumn, ...]
