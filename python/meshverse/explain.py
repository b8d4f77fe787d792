"""What a universe did: which groups exist, for which axes, how each came to be. Text and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Explanation", "GroupExplanation"]

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class GroupExplanation:
    """One group, as this rank sees it.

    Attributes:
        name: c10d's name of my group, None if this rank is in none of the axis's groups.
        layout: axis layout over the universe's positions, `sizes:strides`.
        ranks: global ranks of my group, in group-rank order.
        options: backend, options and tag, naming what differs from the defaults.
        how: how the group came to be.
        created: whether a new group was made for it.
        requests: how often it was asked for, by axis name.
    """

    name: str | None
    layout: str
    ranks: tuple[int, ...]
    options: str
    how: str
    created: bool
    requests: dict[str, int]


@dataclass(frozen=True)
class Explanation:
    """A universe's groups and how they were shared. `str()` prints it, `to_dict()` gives data.

    Attributes:
        rank_map: the universe's ranks, in words.
        rank: this process's global rank.
        requested: groups asked for; `created` new ones answered them, the rest were shared.
        created: groups made.
        groups: in the order they were first asked for.
    """

    rank_map: str
    rank: int
    requested: int
    created: int
    groups: tuple[GroupExplanation, ...]

    @property
    def shared(self) -> int:
        """Requests that no new group was made for."""
        return self.requested - self.created

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {**asdict(self), "shared": self.shared}

    def __str__(self) -> str:
        head = (
            f"Universe of {self.rank_map}, seen by rank {self.rank}: {self.requested} groups asked "
            f"for, {self.created} created, {self.shared} shared"
        )
        rows = [
            (
                " ".join(f"{axis} x{count}" for axis, count in group.requests.items()),
                group.layout,
                shorten(group.ranks),
                group.options,
                group.how,
            )
            for group in self.groups
        ]
        titles = ("axes", "layout", "my ranks", "options", "how")
        return "\n".join([head, *_aligned([titles, *rows])])


def shorten(ranks: Sequence[int]) -> str:
    """Ranks in one short line: all of a few, else the first ones, the last and how many."""
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks)) or "none"
    return f"{', '.join(map(str, ranks[: _SHOWN_RANKS - 2]))}, ... {ranks[-1]} ({len(ranks)})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]
