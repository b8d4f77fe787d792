"""Report on the process groups of a universe: their axes, origin and sharing. Text and data."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NamedTuple

from meshverse import _torch_compat as compat
from meshverse._core import RankMap
from meshverse.groups.group import GroupUse, Origin, State
from meshverse.pictures import Picture
from meshverse.topology import Topology
from meshverse.wording import aligned, in_bytes, rank_list

from .communicator_memory import COMMUNICATOR_BYTES, estimate_bytes
from .group_explanation import GroupExplanation
from .pictured import ExplainedView, picture_of

_WORDS = {
    Origin.DEFAULT_GROUP: "the default group",
    Origin.SPLIT: "split off the default group",
    Origin.BY_MEMBERS: "made by its members",
    Origin.BY_ALL: "made by all ranks",
    Origin.NOT_YET: "not made yet (lazy)",
    Origin.AT_FIRST_USE: "made by its members at first use",
    Origin.SHARED: "shared with another mesh",
    Origin.GIVEN: "given by the user",
    Origin.OTHER_UNIVERSE: "of another universe",
}


class Portion(NamedTuple):
    """A part of a universe.

    Attributes:
        ranks: in words.
        groups: that its meshes requested.
    """

    ranks: str
    groups: Sequence[GroupUse]


@dataclass(frozen=True, repr=False)
class Explanation:
    """A universe's groups and how they were shared: a table where it is printed or shown.

    `to_dict()` gives data, `to_html()` a page, and `picture` what it and
    `Universe.draw` show.

    Attributes:
        rank_map: the universe's ranks, in words.
        rank: this process's global rank.
        requested: number of requests for a group.
        created: groups created for them.
        planned: groups that are to be made at their first use (lazy), once each; the other requests
            were served by an existing group.
        groups: in the order they were first requested; of parts, those of this rank.
        parts: the ranks of each part of the universe, in words.
        ranks: global ranks by position, or a number n for 0 to n-1.
        views: the meshes over all ranks: by axis name its layout, `sizes:strides`.
        n_duplicates: groups that another universe made again, with the same ranks and options.
        picture: the same, to be drawn; None where no group was requested.
    """

    rank_map: str
    rank: int
    requested: int
    created: int
    planned: int
    groups: tuple[GroupExplanation, ...]
    parts: tuple[str, ...] = ()
    ranks: int | tuple[int, ...] = 0
    views: tuple[dict[str, str], ...] = ()
    n_duplicates: int = 0
    picture: Picture | None = field(default=None, repr=False, compare=False)

    @property
    def shared(self) -> int:
        """Number of requests that an existing group served, or one planned before."""
        return self.requested - self.created - self.planned

    @property
    def avoided(self) -> int:
        """Number of extra groups that stock would have created: it creates one for every request.

        The exception is the same there and here: an axis over the whole default group, with nothing
        overridden, uses the default group.
        """
        return sum(group.avoided for group in self.groups)

    @property
    def saved_bytes(self) -> int:
        """Estimated device memory of the avoided groups; of unknown backends, none is counted."""
        return sum(group.avoided * (group.bytes_each or 0) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, ready for JSON."""
        numbers = {name: getattr(self, name) for name in ("shared", "avoided", "saved_bytes")}
        plain = {name: value for name, value in vars(self).items() if name != "picture"}
        # Not by dataclasses.asdict, which copies every rank of every group by itself.
        groups = tuple({**vars(each), "requests": dict(each.requests)} for each in self.groups)
        return {**plain, "groups": groups, **numbers}

    def to_html(self) -> str:
        """Return an HTML page that needs nothing else: the views drawn, and the groups of a rank.

        Raises:
            ValueError: no group was requested yet.
        """
        return self.drawn().to_html()

    def drawn(self) -> Picture:
        """Return the picture.

        Raises:
            ValueError: no group was requested yet.
        """
        if self.picture is None:
            raise ValueError(
                f"There is nothing to draw of {self.rank_map} yet: make a mesh with groups first."
            )
        return self.picture

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON document."""
        # Without indentation, for which Python's encoder takes ten times as long.
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        titles = ("axes", "requested", "layout", "size", "my ranks", "backend", "options", "group")
        rows = [titles, *(_row(group) for group in self.groups)]
        numbers = [3]
        if any(group.nodes is not None for group in self.groups):
            nodes = [
                "nodes",
                *("?" if group.nodes is None else str(group.nodes) for group in self.groups),
            ]
            rows = [(*row[:4], cell, *row[4:]) for row, cell in zip(rows, nodes, strict=True)]
            numbers.append(4)
        if self.parts:
            over = ["meshes over", *("; ".join(group.over) for group in self.groups)]
            rows = [(row[0], cell, *row[1:]) for row, cell in zip(rows, over, strict=True)]
            numbers = [number + 1 for number in numbers]
        head = f"Universe of {self.rank_map}, seen by rank {self.rank}. {self._in_numbers()}"
        foot = (
            "Reused: served by an existing group. Saved: groups that stock torch, which creates "
            "one for each request, would have created besides."
        )
        parts = [f"Its parts: {'; '.join(self.parts)}."] if self.parts else []
        if self.n_duplicates:
            foot += (
                f"\n{in_other_universes(self.n_duplicates)} To share them, call "
                'meshverse.install(share="world") before the first mesh, unless their meshes must '
                "overlap."
            )
        return "\n".join([head, *parts, *aligned(rows, right=numbers), foot])

    __repr__ = __str__  # at a prompt

    def _repr_html_(self) -> str:  # in a notebook
        drawn = "" if self.picture is None else self.picture.to_svg()
        return f"<pre>{escape(str(self))}</pre>{drawn}"

    def _in_numbers(self) -> str:
        planned = f"{self.planned} planned (lazy), " if self.planned else ""
        text = (
            f"Requested {self.requested} process group{'s' * (self.requested != 1)}: "
            f"{self.created} created, {planned}{self.shared} reused. Saved: {self.avoided}"
        )
        if self.saved_bytes:
            text += f" (about {in_bytes(self.saved_bytes)} of device memory)"
        return text


def in_other_universes(n_duplicates: int) -> str:
    """Return a sentence about process groups that another universe made again."""
    return (
        f"{n_duplicates} of these process groups {'was' if n_duplicates == 1 else 'were'} made "
        "again in another universe, with the same ranks and options."
    )


def _row(group: GroupExplanation) -> tuple[str, ...]:
    times = sum(group.requests.values())
    return (
        ", ".join(group.requests),
        f"{times} time{'s' * (times != 1)}",
        group.layout,
        f"{len(group.ranks):,}",
        rank_list(group.ranks),
        group.backend,
        _options_in_words(group),
        group.how + ", suspended" * group.suspended,
    )


def _options_in_words(group: GroupExplanation) -> str:
    # All but the backend, which has a column of its own.
    _, _, rest = group.options.removesuffix(")").partition(", ")
    return rest or "defaults"


def explain(
    rank_map: RankMap,
    rank: int,
    groups: Iterable[GroupUse],
    communicator_bytes: Mapping[str, int] | None = None,
    views: Sequence[ExplainedView] = (),
    node_size: int | None = None,
    topology: Topology | None = None,
    parts: Sequence[Portion] = (),
    duplicates: Collection[str] = (),
) -> Explanation:
    """Explain the groups of a universe; see `Universe.explain`.

    Args:
        rank_map: of the universe.
        rank: this process's, global.
        groups: of the universe.
        communicator_bytes: as of `Universe.explain`.
        views: the meshes of the universe, for the picture.
        node_size: ranks on each node, for the picture; None where that is unknown.
        topology: where the ranks are, if that is known.
        parts: of the universe.
        duplicates: names of groups that several universes made.
    """
    groups = tuple(groups)
    figures = {**COMMUNICATOR_BYTES, **(communicator_bytes or {})}
    explained = tuple(
        _explain_group(group, over, figures, topology)
        for group, over in _with_parts(Portion(str(rank_map), groups), parts)
    )
    explanation = Explanation(
        rank_map=str(rank_map),
        rank=rank,
        requested=sum(sum(group.requests.values()) for group in explained),
        created=sum(group.created for group in explained),
        planned=sum(group.is_planned for group in explained),
        groups=explained,
        parts=tuple(part.ranks for part in parts),
        ranks=rank_map.size if rank_map.is_identity else tuple(rank_map.ranks().tolist()),
        views=tuple(_axes_of(view) for view in views),
        n_duplicates=sum(group.name in duplicates for group in explained),
    )
    pairs = list(zip(groups, explained, strict=False))  # those of the parts come last
    picture = picture_of(rank_map, rank, pairs, views, node_size, f"{explanation._in_numbers()}.")
    return replace(explanation, picture=picture)


def _axes_of(view: ExplainedView) -> dict[str, str]:
    what = view.description
    return dict(zip(what.labels, map(str, what.layout), strict=True))


def _with_parts(
    whole: Portion, parts: Sequence[Portion]
) -> Iterator[tuple[GroupUse, tuple[str, ...]]]:
    """List the groups of a universe and its parts, each once, and the portions that have it."""
    if not parts:
        yield from ((group, ()) for group in whole.groups)
        return
    found = [(group, [whole.ranks]) for group in whole.groups]
    places = {group.name: index for index, (group, _) in enumerate(found) if group.name}
    for part in parts:
        for group in part.groups:
            if group.name is None:  # this rank is not in the part
                continue
            index = places.setdefault(group.name, len(found))
            if index == len(found):
                found.append((group, [part.ranks]))
            else:
                known, over = found[index]
                found[index] = _joined(known, group), [*over, part.ranks]
    yield from ((group, tuple(dict.fromkeys(over))) for group, over in found)


def _joined(one: GroupUse, other: GroupUse) -> GroupUse:
    """Join what two universes know of one group."""
    requests = {
        name: one.requests.get(name, 0) + other.requests.get(name, 0)
        for name in (*one.requests, *other.requests)
    }
    maker = other if other.created else one
    created = one.created or other.created
    return replace(one, requests=requests, created=created, how=maker.origin)


def _explain_group(
    group: GroupUse,
    over: tuple[str, ...],
    figures: Mapping[str, int],
    topology: Topology | None,
) -> GroupExplanation:
    request = group.request
    options = request.options
    ranks = tuple(request.my_ranks())
    is_mine = group.name is not None and not group.borrowed
    requests = dict(group.requests)  # to which other threads may add
    return GroupExplanation(
        name=group.name,
        layout=str(request.axis),
        ranks=ranks,
        backend=compat.backend_in_words(options.backend),
        tag=options.tag,
        options=str(options.key),
        how=how_it_came(group),
        created=group.created,
        requests=requests,
        avoided=sum(requests.values()) - group.created if is_mine else 0,
        bytes_each=estimate_bytes(compat.backend_in_words(options.backend), len(ranks), figures),
        suspended=group.state is State.SUSPENDED,
        is_planned=group.origin is Origin.NOT_YET,
        nodes=None if topology is None else topology.spans("node", ranks),
        salt=options.name_digest,
        over=over,
    )


def how_it_came(group: GroupUse) -> str:
    """Return how a group was created, in words."""
    words = _WORDS[group.origin]
    return words if group.reason is None else f"{words} ({group.reason})"
