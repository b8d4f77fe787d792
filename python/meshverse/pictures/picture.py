"""`Picture`: process groups, to be shown on a terminal, as SVG, or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshverse._core import RankMap
from meshverse.wording import did_you_mean

from .model import Panel, PicturedGroups, PicturedView, printable

# The other files are imported where they are used: most programs that import Meshverse use none.

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Picture:
    """Process groups over the ranks of one world, a panel for each axis.

    The ranks are drawn by node, in the colour and with the number of their group; the groups of one
    rank are outlined. Nodes that have the same groups are drawn once and counted. `print()` shows
    it as text, `show()` in colours where rich is installed; a notebook shows it as SVG.

    Attributes:
        title: what it shows.
        rank_map: position -> global rank.
        rank: global rank whose groups are outlined.
        groups: the distinct groups.
        views: the ways to split the world that a page offers.
        node_size: ranks 0 to n-1 are on the first node, and so on; None where nobody knows.
        summary: what a page says first.
        notes: what to mind, a sentence each.
    """

    title: str
    rank_map: RankMap
    rank: int
    groups: tuple[PicturedGroups, ...]
    views: tuple[PicturedView, ...] = ()
    node_size: int | None = None
    summary: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(f"node_size={self.node_size} is no number of ranks: give 1 or more.")
        if not self.groups:
            raise ValueError(f"There is nothing to draw yet: {self.title} has no process groups.")

    def of_axes(self, *names: str) -> Picture:
        """Return the picture of only those groups that have one of these axis names.

        Raises:
            KeyError: no groups have one of the names.
        """
        known = [name for groups in self.groups for name in groups.names]
        unknown = [name for name in names if name not in known]
        if unknown:
            hint = did_you_mean(unknown[0], known)
            raise KeyError(f"There is no axis {unknown[0]!r} to draw: the axes are {known}.{hint}")
        return replace(
            self,
            groups=tuple(groups for groups in self.groups if set(names) & {*groups.names}),
            views=(),
        )

    @property
    def drawn(self) -> list[int]:
        """Indices of the groups that are drawn: those of one rank only if there are no others."""
        large = [index for index, one in enumerate(self.groups) if one.axis.size > 1]
        return large or list(range(len(self.groups)))

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels, one for each of the groups that are drawn. O(ranks)."""
        from .lines import panel_of, pieces_of

        pieces = pieces_of(self.rank_map, self.node_size)
        return tuple(
            panel_of(self.groups[index], self.rank_map, self.rank, self.node_size, pieces)
            for index in self.drawn
        )

    def __str__(self) -> str:
        from .terminal import as_text

        panels = self.panels
        return as_text(panels, _legend(self, panels, "[ ]", "< >"))

    def __rich__(self) -> Text:
        from .terminal import as_rich

        panels = self.panels
        return as_rich(panels, _legend(self, panels, "[ ]", "< >"))

    def show(self) -> None:
        """Print the picture: in colours if rich is there, which `meshverse[pictures]` brings."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)  # noqa: T201  # which is what it is for
        else:
            Console().print(self, soft_wrap=True)

    def to_svg(self) -> str:
        """Return an SVG document, light or dark as the reader's screen is."""
        return self.svg_of(self.panels, self.title)

    def svg_of(self, panels: Sequence[Panel], title: str) -> str:
        """Return some of the panels as an SVG document."""
        from .svg import as_svg

        return as_svg(panels, printable(title), _legend(self, panels, "outlined", "outlined twice"))

    def _repr_html_(self) -> str:
        return self.to_svg()

    def to_html(self) -> str:
        """Return an HTML page that needs nothing else: its views drawn, its groups in a table."""
        from .page import as_page

        return as_page(self)


def _legend(picture: Picture, panels: Sequence[Panel], group_mark: str, rank_mark: str) -> str:
    parts = ["Number and colour: the group"]
    if picture.rank_map.position_of(picture.rank) is not None:
        parts += [f"{group_mark}: the group of rank {picture.rank}", f"{rank_mark}: the rank"]
    if any(line.times > 1 for panel in panels for line in panel.drawn):
        parts.append(f"xN: N {'nodes' if picture.node_size else 'lines'} with these groups")
    return "; ".join(parts) + "."
