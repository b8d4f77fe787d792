"""`Picture` of process groups: shown on a terminal, as SVG, or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshverse._core import RankMap
from meshverse.wording import did_you_mean, printable

from .model import Panel, PicturedGroups, PicturedView, Sharing
from .palette import COLORS

# The other modules are imported at their first use: most programs never draw a picture.

if TYPE_CHECKING:
    from rich.text import Text

# What a place in a picture is, and the marks of the rank's group and of the rank itself.
_IN_TEXT = ("Each place is a rank, and the number is its group's", "[ ]", "< >")
_IN_SVG = (
    "Each square is a rank, with the number and color of its group",
    "outlined",
    "outlined twice",
)


@dataclass(frozen=True, repr=False)
class Picture:
    """Picture of process groups over the ranks of one world, with a panel for each axis.

    The ranks are drawn by node, each with the number and color of its group; the groups of one
    rank are outlined. Nodes with the same groups are drawn once and counted. `print()` shows the
    picture as text, `show()` in colors if rich is installed; a notebook shows it as SVG.

    Attributes:
        title: title of the picture.
        rank_map: map from position to global rank.
        rank: global rank whose groups are outlined.
        groups: the distinct groups.
        views: the views that a page shows.
        node_size: number n of ranks per node: ranks 0 to n-1 are on the first; None if unknown.
        summary: first sentence of a page.
        notes: warnings and remarks for a page, one sentence each.
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
        size: Any = self.node_size  # users give it
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and (not is_int or size < 1):
            raise ValueError(f"node_size={size!r}: give an int above 0.")
        if not self.groups:
            raise ValueError(f"There is nothing to draw yet: {self.title} has no process groups.")

    def of_axes(self, *names: str) -> Picture:
        """Return a picture of only the groups of these axes.

        Raises:
            KeyError: there is no axis of one of these names.
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
        """Indices of the groups to draw: groups of a single rank only if there are no others."""
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
        return as_text(panels, _legend(self, panels, *_IN_TEXT))

    __repr__ = __str__  # at a prompt

    def __rich__(self) -> Text:
        from .terminal import as_rich

        panels = self.panels
        return as_rich(panels, _legend(self, panels, *_IN_TEXT))

    def show(self) -> None:
        """Print the picture, in colors if rich is installed (extra `meshverse[pictures]`)."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)  # noqa: T201  # printing is its purpose
        else:
            Console().print(self, soft_wrap=True)

    @property
    def sharing(self) -> Sharing | None:
        """Which axes of several views share a process group; None if no two do."""
        from .sharing import sharing_of

        return sharing_of(self.groups, self.views)

    def to_svg(self) -> str:
        """Return an SVG document, which follows the reader's light or dark color scheme."""
        from .svg import as_svg

        panels = self.panels
        return as_svg(panels, self.sharing, printable(self.title), _legend(self, panels, *_IN_SVG))

    def _repr_html_(self) -> str:
        from .sharing import sharing_table

        sharing = self.sharing
        table = "" if sharing is None else f"<p>{sharing.title}</p>{sharing_table(sharing)}"
        return table + self.figure(self.panels, self.title)

    def figure(self, panels: Sequence[Panel], title: str) -> str:
        """Return panels as an HTML element, whose panels wrap and have the color of its text."""
        from .svg import as_figure

        legend = _legend(self, panels, *_IN_SVG)
        return as_figure(panels, printable(title), legend)

    def to_html(self) -> str:
        """Return a self-contained HTML page: drawings of the views, and a table of the groups."""
        from .page import as_page

        return as_page(self)


def _legend(
    picture: Picture, panels: Sequence[Panel], cell: str, group_mark: str, rank_mark: str
) -> str:
    repeats = any(panel.largest_group >= len(COLORS) for panel in panels)
    parts = [cell + " (eight colors, which repeat)" * (repeats and "color" in cell)]
    if picture.rank_map.position_of(picture.rank) is not None:
        parts += [
            f"{group_mark}: the group of rank {picture.rank}",
            f"{rank_mark}: rank {picture.rank}",
        ]
    if any(line.times > 1 for panel in panels for line in panel.drawn):
        parts.append(f"xN: N {'nodes' if picture.node_size else 'lines'} with these groups")
    return "; ".join(parts) + "."
