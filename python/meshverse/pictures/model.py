"""What is drawn: process groups over the ranks of one world, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshverse._core import AxisLayout

__all__ = ["PicturedGroups", "PicturedView", "printable"]


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
        facts: what else a page says of them, by title.
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
        title: what it is called.
        axes: names of its axes, each with the index of its groups in `Picture.groups`.
    """

    title: str
    axes: tuple[tuple[str, int], ...]


def printable(name: str) -> str:
    """A name without what would change a terminal, or what no XML may have."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
