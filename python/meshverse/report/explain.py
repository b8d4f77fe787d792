"""What a universe did: which groups exist, for which axes, how each came to be. Text and data."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshverse._core import RankMap
from meshverse.groups.request import Group, Origin

from .communicator_memory import COMMUNICATOR_BYTES, estimate_bytes

__all__ = ["Explanation", "GroupExplanation", "explain"]

_SHOWN_RANKS = 8

_WORDS = {
    Origin.DEFAULT_GROUP: "the default group",
    Origin.SPLIT: "split off the default group",
    Origin.BY_MEMBERS: "made by its members",
    Origin.BY_ALL: "made by all ranks",
    Origin.NOT_YET: "not made yet (lazy)",
    Origin.AT_FIRST_USE: "made by its members at first use",
    Origin.AGAIN: "made again by its members: it was destroyed",
    Origin.SHARED: "shared with another mesh",
    Origin.GIVEN: "given by the user",
    Origin.OTHER_UNIVERSE: "of another universe",
}


@dataclass(frozen=True)
class GroupExplanation:
    """One group, as this rank sees it.

    Attributes:
        name: c10d's name of my group, None if this rank is in none of the axis's groups.
        layout: axis layout over the universe's positions, `sizes:strides`.
        ranks: global ranks of my group, in group-rank order.
        backend: its backend string.
        tag: the isolation tag it is shared under; "" for none.
        options: backend, options and tag, naming what differs from the defaults.
        how: how the group came to be.
        created: whether a new group was made for it.
        requests: how often it was asked for, by axis name.
        avoided: how many more groups stock would have made for these requests.
        bytes_each: estimated device memory of one such communicator; None if unknown.
        suspended: whether it is suspended now.
    """

    name: str | None
    layout: str
    ranks: tuple[int, ...]
    backend: str
    tag: str
    options: str
    how: str
    created: bool
    requests: dict[str, int]
    avoided: int
    bytes_each: int | None
    suspended: bool = False


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

    @property
    def avoided(self) -> int:
        """Groups that stock would have made besides these: it makes one for every request.

        The exception is the same there and here: an axis over the whole default group, with nothing
        overridden, uses the default group.
        """
        return sum(group.avoided for group in self.groups)

    @property
    def saved_bytes(self) -> int:
        """Estimated device memory of the avoided groups; of unknown backends, none is counted."""
        return sum(group.avoided * (group.bytes_each or 0) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        numbers = {name: getattr(self, name) for name in ("shared", "avoided", "saved_bytes")}
        return {**asdict(self), **numbers}

    def to_json(self) -> str:
        """`to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = (
            f"Universe of {self.rank_map}, seen by rank {self.rank}: {self.requested} groups asked "
            f"for, {self.created} created, {self.shared} shared, {self.avoided} avoided"
        )
        if self.saved_bytes:
            head += f" (about {self.saved_bytes / 2**20:,.0f} MiB of device memory)"
        rows = [
            (
                " ".join(f"{axis} x{count}" for axis, count in group.requests.items()),
                group.layout,
                _shorten(group.ranks),
                group.options,
                group.how + ", suspended" * group.suspended,
            )
            for group in self.groups
        ]
        titles = ("axes", "layout", "my ranks", "options", "how")
        return "\n".join([head, *_aligned([titles, *rows])])


def explain(
    rank_map: RankMap,
    rank: int,
    groups: Iterable[Group],
    communicator_bytes: Mapping[str, int] | None = None,
    suspended: Collection[str] = (),
) -> Explanation:
    """What happened to the groups of a universe; see `Universe.explain`."""
    figures = {**COMMUNICATOR_BYTES, **(communicator_bytes or {})}
    explained = tuple(_explain_group(group, figures, suspended) for group in groups)
    return Explanation(
        rank_map=str(rank_map),
        rank=rank,
        requested=sum(sum(group.requests.values()) for group in explained),
        created=sum(group.created for group in explained),
        groups=explained,
    )


def _explain_group(
    group: Group, figures: Mapping[str, int], suspended: Collection[str]
) -> GroupExplanation:
    request = group.request
    options = request.options
    ranks = tuple(request.my_ranks())
    is_mine = group.name is not None and not group.borrowed
    asked = sum(group.requests.values())
    return GroupExplanation(
        name=group.name,
        layout=str(request.axis),
        ranks=ranks,
        backend=options.backend,
        tag=options.tag,
        options=str(options.key),
        how=_in_words(group),
        created=group.created,
        requests=dict(group.requests),
        avoided=asked - group.created if is_mine else 0,
        bytes_each=estimate_bytes(options.backend, len(ranks), figures),
        suspended=group.name in suspended,
    )


def _in_words(group: Group) -> str:
    words = _WORDS[group.origin]
    return words if group.hazard is None else f"{words} ({group.hazard})"


def _shorten(ranks: Sequence[int]) -> str:
    """Ranks in one short line: all of a few, else the first ones, the last and how many."""
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks)) or "none"
    return f"{', '.join(map(str, ranks[: _SHOWN_RANKS - 2]))}, ... {ranks[-1]} ({len(ranks)})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]
