"""Mesh axes and ranks of process groups, from c10d's names, and coordinates of ranks."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshverse._core import AxisLayout, Layout, RankMap, rank_group
from meshverse.wording import rank_ranges

from .records import (
    DEFAULT_GROUP,
    GroupSeen,
    RankRecord,
    axes_in_words,
    axes_of,
    complete_default_group,
    world_size_of,
)

_SIZE = re.compile(r"([^\W\d]\w*)\s*=\s*(\d+)")  # of an axis, with its name


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
        """Return a rank's coordinates in the mesh with the most axes; {} if it is not in it."""
        position = self._rank_map.position_of(rank)
        if position is None or not self._views:
            return {}
        names, layout = max(self._views, key=lambda view: len(view[0]))  # of several, the first
        return dict(zip(names, layout.coordinate(position), strict=True))

    def name(self, records: Mapping[int, RankRecord]) -> None:
        """Set the axes and ranks of the records' groups that belong to this universe.

        Raises:
            ValueError: the dumps have other ranks.
        """
        ascending = self._rank_map.sorted()
        largest = ascending.rank_at(ascending.size - 1)
        size = world_size_of(records)
        if size is not None and size <= largest:
            raise ValueError(
                f"--mesh: the mesh in the file has rank {largest:,}, but the job of these dumps "
                f"has {size:,} ranks. Pass the file of this job."
            )
        complete_default_group(records, largest)
        for record in records.values():
            position = self._rank_map.position_of(record.rank)
            for name, seen in record.groups.items():
                if name not in self._known and position is not None:
                    self._learn(name, record.rank, position)
                if name in self._known:
                    ranks = self._known[name].ranks
                    if seen.ranks is not None and sorted(seen.ranks) != sorted(ranks or ()):
                        raise ValueError(
                            f"--mesh: in the file, group {name} has ranks "
                            f"{rank_ranges(ranks or ())}, but the dump of rank {record.rank} says "
                            f"ranks {rank_ranges(seen.ranks)}. Pass the file of this job."
                        )
                    record.groups[name] = self._known[name]

    def _learn(self, name: str, rank: int, position: int) -> None:
        for groups in self._groups:
            seen = GroupSeen(axes_in_words(groups.axes), groups.writers_ranks)
            if groups.writers_name == name and rank in groups.writers_ranks:
                self._known[name] = seen
                return
            for ascending in (True, False):
                ranks, identity = rank_group(
                    groups.layout, self._rank_map, position, groups.salt, ascending
                )
                if name.startswith(f"meshverse-{identity}-"):
                    self._known[name] = seen._replace(ranks=ranks)
                    return


class MeshSizes:
    """The axes of a mesh over ranks 0 to n-1, in row-major order, as in `init_device_mesh`.

    Args:
        sizes: size of each axis, by name, the outermost first.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._n_ranks = math.prod(sizes.values())

    @staticmethod
    def of_text(text: str) -> MeshSizes:
        """Return the mesh of a text such as "pp=2,dp=8,tp=8"; spaces are as good as commas.

        Raises:
            ValueError: the text names no sizes, or an axis twice.
        """
        found = _SIZE.findall(text)
        if not found or _SIZE.sub("", text).strip(" ,"):
            raise ValueError(
                f"--mesh {text!r} is neither a file nor the sizes of a mesh's axes. Pass them "
                "like 'pp=2,dp=8,tp=8', the outermost axis first. No size can be -1, as dumps of "
                "some ranks may be missing."
            )
        sizes = {name: int(size) for name, size in found}
        if len(sizes) < len(found) or 0 in sizes.values():
            raise ValueError(f"--mesh {text!r}: each axis has one name, and a size of at least 1.")
        return MeshSizes(sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates; {} if it is not in the mesh."""
        if not 0 <= rank < self._n_ranks:
            return {}
        found = {}
        for name, size in reversed(self._sizes.items()):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def name(self, records: Mapping[int, RankRecord]) -> None:
        """Set the axes of the records' groups, and the ranks of those whose dump lacks them.

        A group is along the axes in which its ranks have several coordinates. If its ranks are not
        known, as with gloo, it is along the axis that torch's mesh has described it by.

        Raises:
            ValueError: the records contradict these sizes: a record is of a rank outside the mesh,
                the default group has another number of ranks, or the groups described by an axis
                have other ranks than those along it.
        """
        if (largest := max(records)) >= self._n_ranks:
            raise self._contradiction(f"there is a dump of rank {largest}")
        if (size := world_size_of(records)) is not None and size != self._n_ranks:
            raise self._contradiction(f"the job of these dumps has {size:,} ranks")
        self._check_axes(records)
        complete_default_group(records, self._n_ranks - 1)
        labels: dict[Sequence[int], str] = {}
        for rank, record in records.items():
            for name, seen in record.groups.items():
                if seen.label == DEFAULT_GROUP:
                    continue
                if seen.ranks is None:
                    axis = next((one for one in axes_of(seen.label) if one in self._sizes), None)
                    ranks = None if axis is None else self._along(axis, rank)
                    record.groups[name] = seen._replace(ranks=ranks)
                    continue
                key = seen.ranks if isinstance(seen.ranks, range) else tuple(seen.ranks)
                if key not in labels:
                    labels[key] = self._label(key) or seen.label
                record.groups[name] = seen._replace(label=labels[key])

    def _contradiction(self, but: str) -> ValueError:
        sizes = " ".join(f"{name}={size}" for name, size in self._sizes.items())
        return ValueError(
            f"--mesh '{sizes}' has {self._n_ranks:,} ranks, but {but}. Pass the sizes with which "
            "the job made its mesh, the outermost axis first; or a file with "
            "mesh.universe.explain().to_json(); or leave --mesh out."
        )

    def _check_axes(self, records: Mapping[int, RankRecord]) -> None:
        """Compare the ranks along each axis with the groups that dumps describe by this axis.

        Raises:
            ValueError: a rank's groups of an axis all have other ranks; or two ranks along an axis
                have no group of it in common. All ranks of a group give it the same name.
        """
        for axis in self._sizes:
            first: dict[range, tuple[int, str]] = {}
            for rank, record in records.items():
                own = {n: s.ranks for n, s in record.groups.items() if axis in axes_of(s.label)}
                along = self._along(axis, rank)
                known = [ranks for ranks in own.values() if ranks is not None]
                if known and not any(sorted(ranks) == list(along) for ranks in known):
                    raise self._contradiction(
                        f"in the dump of rank {rank}, the group along axis {axis} has ranks "
                        f"{rank_ranges(known[0])}; by --mesh, it has ranks {rank_ranges(along)}"
                    )
                if known or len(own) != 1:
                    continue
                (name,) = own
                other, others_name = first.setdefault(along, (rank, name))
                if name != others_name:
                    raise self._contradiction(
                        f"ranks {other} and {rank} are in different groups along axis {axis}, "
                        f"named {others_name!r} and {name!r} in their dumps; by --mesh, they are "
                        f"in one, of ranks {rank_ranges(along)}"
                    )

    def _along(self, axis: str, rank: int) -> range:
        names = list(self._sizes)
        step = math.prod(self._sizes[name] for name in names[names.index(axis) + 1 :])
        first = rank - self.coordinates(rank)[axis] * step
        return range(first, first + step * self._sizes[axis], step)

    def _label(self, ranks: Sequence[int]) -> str:
        """Return the axes that ranks are along, in words; "" if they are along none."""
        coordinates = [self.coordinates(rank) for rank in ranks]
        along = [
            name
            for name in self._sizes
            if len({coordinate.get(name) for coordinate in coordinates}) > 1
        ]
        n_ranks = math.prod(self._sizes[name] for name in along)
        if not along or not all(coordinates) or not n_ranks == len(set(ranks)) == len(ranks):
            return ""
        return f"{'axes' if len(along) > 1 else 'axis'} {', '.join(along)}"


def _axis(text: str) -> AxisLayout:
    sizes, strides = ([int(n) for n in re.findall(r"\d+", part)] for part in text.split(":"))
    return AxisLayout(sizes, strides)
