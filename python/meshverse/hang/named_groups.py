"""Mesh axes and ranks of process groups, from c10d's names, and coordinates of ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshverse._core import AxisLayout, Layout, RankMap
from meshverse.groups.request import ranks_and_identity
from meshverse.universe.registry import universes_here

from .records import GroupSeen, RankRecord, complete_default_group


class _Groups(NamedTuple):
    """The groups along an axis with the same options: each rank is in one of them.

    Attributes:
        axes: names of the axes that requested the groups.
        layout: layout of the axis, over positions.
        salt: digest of the options; it is part of what c10d's names of the groups are made from.
        writers_name: c10d's name of the group that the rank which wrote the file is in, or None.
        writers_ranks: global ranks of that group.
    """

    axes: Sequence[str]
    layout: AxisLayout
    salt: str
    writers_name: str | None
    writers_ranks: Sequence[int]


class MeshNames:
    """The axes of a job's process groups, and its ranks' coordinates, from a saved `explain()`.

    Args:
        explained: result of `Explanation.to_dict` on any rank.

    Raises:
        ValueError: `explained` is not such a result.
    """

    def __init__(self, explained: Mapping[str, Any]) -> None:
        try:
            ranks = explained["ranks"]
            self._rank_map = (
                RankMap.identity(ranks) if isinstance(ranks, int) else RankMap.from_ranks(ranks)
            )
            self._views = [
                (list(view), Layout([_axis(text) for text in view.values()]))
                for view in explained["views"]
            ]
            self._groups = [
                _Groups(
                    list(group["requests"]),
                    _axis(group["layout"]),
                    group["salt"],
                    group["name"],
                    group["ranks"],
                )
                for group in explained["groups"]
            ]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"it is not the JSON that mesh.universe.explain().to_json() returns ({error!r})"
            ) from None
        self._known: dict[str, GroupSeen] = {}

    @staticmethod
    def of_file(file: str | os.PathLike[str]) -> MeshNames:
        """Read a file that holds `mesh.universe.explain().to_json()`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            return MeshNames(json.loads(Path(file).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file}: {error}. Pass a file with that JSON.") from None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates in the first mesh over all ranks; {} if it is not in it."""
        position = self._rank_map.position_of(rank)
        if position is None or not self._views:
            return {}
        names, layout = self._views[0]
        return dict(zip(names, layout.coordinate(position), strict=True))

    def name(self, records: Mapping[int, RankRecord]) -> None:
        """Set the axes and ranks of the records' groups that belong to this universe."""
        ascending = self._rank_map.sorted()
        complete_default_group(records, ascending.rank_at(ascending.size - 1))
        for record in records.values():
            position = self._rank_map.position_of(record.rank)
            for name in record.groups:
                if name not in self._known and position is not None:
                    self._learn(name, record.rank, position)
                if name in self._known:
                    record.groups[name] = self._known[name]

    def _learn(self, name: str, rank: int, position: int) -> None:
        for groups in self._groups:
            seen = GroupSeen(axes_in_words(groups.axes), groups.writers_ranks)
            if groups.writers_name == name and rank in groups.writers_ranks:
                self._known[name] = seen
                return
            for keeps_order in (False, True):
                ranks, identity = ranks_and_identity(
                    groups.layout,
                    self._rank_map,
                    position,
                    groups.salt,
                    keeps_order=keeps_order,
                )
                if name.startswith(f"meshverse-{identity}-"):
                    self._known[name] = seen._replace(ranks=ranks)
                    return


def axes_in_words(axes: Sequence[str]) -> str:
    """Return the axes of a group, for messages: "axis tp (shared with ep)"."""
    first, *others = axes or ("unnamed",)
    return f"axis {first}" + (f" (shared with {', '.join(others)})" if others else "")


def _axis(text: str) -> AxisLayout:
    sizes, strides = ([int(n) for n in re.findall(r"\d+", part)] for part in text.split(":"))
    return AxisLayout(sizes, strides)


def name_live(record: RankRecord) -> None:
    """Set the axes of the groups in this process's record, from its universes."""
    for universe in universes_here():
        for use in universe.groups:
            if use.name in record.groups and use.requests:
                seen = record.groups[use.name]
                record.groups[use.name] = seen._replace(label=axes_in_words(list(use.requests)))


def live_coordinates(rank: int) -> dict[str, int]:
    """Return a rank's coordinates in the root mesh of the first universe that has it; else {}."""
    for universe in universes_here():
        position, root = universe.rank_map.position_of(rank), universe.root
        if position is not None and root is not None:
            what = root._description
            return dict(zip(what.labels, what.layout.coordinate(position), strict=True))
    return {}
