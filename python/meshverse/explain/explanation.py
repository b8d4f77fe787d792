"""Report on the process groups of a universe: their axes, origin and sharing; text and data."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from meshverse._core import AxisLayout, RankMap
from meshverse._torch_compat.backends import backend_in_words
from meshverse.groups.group import GroupRef, State
from meshverse.groups.request import GroupRequest
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.user_input import TopologyLike
from meshverse.wording import (
    aligned,
    counted,
    html_table,
    in_bytes,
    printable,
    rank_list,
    wrapped,
)

from .calling_threads import CallingThreads
from .communicator_memory import estimate_bytes, with_measured
from .group_explanation import GroupExplanation

if TYPE_CHECKING:
    from meshverse.tools.pictures import Picture

_SHOWN_THREADS = 6
_LONGEST_NAME = 60  # characters of an axis or a thread in a text; data have all of them

_NOT_REQUESTED = (
    "Requested 0 times: a mesh of another universe brought the group when it was combined with one "
    "of this universe."
)
_MEANING = (
    "Reused: served by an existing group.",
    (
        "Saved: reused groups that torch would have created again. For an axis over all ranks, "
        "torch uses the default group, too."
    ),
)


class ExplainedView(NamedTuple):
    """A mesh, as a view of the ranks.

    Attributes:
        description: layout and axis names of the mesh.
        group_names: c10d names of its groups on this rank, one per axis; None or empty if it has no
            groups on this rank.
        flattened: layouts of the axes flattened from it or its submeshes, by name.
    """

    description: MeshDescription
    group_names: Sequence[str] | None
    flattened: Mapping[str, AxisLayout]


class _Pictured(NamedTuple):
    """Arguments of `meshverse.tools.pictures.of_universe.picture_of`."""

    rank_map: RankMap
    rank: int
    groups: Sequence[tuple[GroupRequest, GroupExplanation]]
    views: Sequence[ExplainedView]


class ReportSection(NamedTuple):
    """A universe or one of its parts, with its groups.

    Attributes:
        ranks: its ranks, in words.
        groups: groups that its meshes requested.
    """

    ranks: str
    groups: Sequence[GroupRef]


@dataclass(frozen=True, repr=False)
class Explanation:
    """Report on a universe's groups and how they were shared. It prints as a table.

    `to_dict()` gives data, `to_html()` a page, and `picture` the picture that the page and
    `Universe.draw` show.

    Attributes:
        rank_map: the universe's ranks, in words.
        rank: global rank of this process.
        requested: number of requests for a group that this rank is in.
        created: number of groups created for them.
        planned: number of lazy groups that are still to be created at their first use. All requests
            beyond `created` and `planned` were served by an existing or planned group.
        groups: groups in the order of their first requests; of parts, only the groups that this
            rank is in.
        parts: the ranks of each part of the universe, in words.
        ranks: global ranks by position, or a number n for ranks 0 to n-1.
        views: meshes over all ranks; for each, axis layouts (`sizes:strides`) by axis name.
        n_duplicates: number of groups that another universe created too, with the same ranks and
            options.
        n_surplus: number of those that were not the first of their kind: sharing would save these.
        ended: why these groups have ended, and what to do; "" while they can be used.
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
    n_surplus: int = 0
    ended: str = ""
    _pictured: _Pictured | None = field(default=None, repr=False, compare=False)

    @property
    def reused(self) -> int:
        """Number of requests that were served by a group created or planned before."""
        return self.requested - self.created - self.planned

    @property
    def saved(self) -> int:
        """Number of extra groups that torch would have created: it creates one for every request.

        An axis over the whole default group, without options of its own, is not counted: it uses
        the default group in torch too.
        """
        return sum(group.saved for group in self.groups)

    @property
    def saved_bytes(self) -> int:
        """Estimated device memory of the saved groups; groups of unknown backends count 0."""
        return sum(group.saved * (group.bytes_each or 0) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        numbers = {name: getattr(self, name) for name in ("reused", "saved", "saved_bytes")}
        plain = {name: value for name, value in vars(self).items() if name != "_pictured"}
        # Not dataclasses.asdict: it copies every rank of every group one by one.
        groups = tuple({**vars(each), "requests": dict(each.requests)} for each in self.groups)
        return {**plain, "groups": groups, **numbers}

    def to_html(self) -> str:
        """Return a self-contained HTML page: drawings of the views, and the groups of this rank.

        Raises:
            ValueError: no group was requested yet.
        """
        return self.drawn().to_html()

    @property
    def picture(self) -> Picture | None:
        """Picture of the groups; None if no group was requested."""
        return self._picture(None)

    def drawn(self, node_size: int | None = None) -> Picture:
        """Return the picture.

        Args:
            node_size: number of ranks on each node, by default torchrun's `LOCAL_WORLD_SIZE`.

        Raises:
            ValueError: no group was requested yet.
        """
        picture = self._picture(node_size)
        if picture is None:
            raise ValueError(
                f"There is nothing to draw of {self.rank_map} yet: create a mesh with groups first."
            )
        return picture

    def _picture(self, node_size: int | None) -> Picture | None:
        if self._pictured is None:
            return None
        from meshverse.tools.pictures.of_universe import picture_of

        summary = f"{in_numbers([self])}."
        return picture_of(*self._pictured, node_size=node_size, summary=summary)

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON document."""
        # No indentation: with it, Python's encoder takes ten times as long.
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        alike, rows, numbers = self._table()
        table = aligned(rows, right=numbers)
        return "\n".join([*wrapped([*self._head(), *alike]), *table, *wrapped(self._foot())])

    __repr__ = __str__  # at a prompt

    def _repr_html_(self) -> str:  # in a notebook
        alike, rows, numbers = self._table()
        head, foot = (
            "".join(f"<p>{escape(line)}</p>" for line in lines)
            for lines in ([*self._head(), *alike], self._foot())
        )
        picture = self.picture
        drawn = "" if picture is None else picture._repr_html_()
        return f"{head}{html_table(rows, right=numbers) if self.groups else ''}{foot}{drawn}"

    def _head(self) -> list[str]:
        head = f"Universe of {self.rank_map}, seen by rank {self.rank}. {in_numbers([self])}"
        ended = [f"These process groups have ended. {self.ended}"] if self.ended else []
        parts = [f"Its parts: {'; '.join(self.parts)}."] if self.parts else []
        return [head, *ended, *parts]

    def _table(self) -> tuple[list[str], list[list[str]], list[int]]:
        """Return what all groups have alike; the rows, titles first; the columns of numbers."""
        columns = {
            "axes": [_axes_in_words(group) for group in self.groups],
            "meshes over": ["; ".join(group.over) for group in self.groups],
            "requested": [_times(group) for group in self.groups],
            "layout": [group.layout for group in self.groups],
            "size": [f"{len(group.ranks):,}" if group.ranks else "-" for group in self.groups],
            "nodes": ["?" if group.nodes is None else str(group.nodes) for group in self.groups],
            "ranks": [rank_list(group.ranks) for group in self.groups],
            "backend": [group.backend for group in self.groups],
            "options": [_options_in_words(group) for group in self.groups],
            "group": [group.how_and_state for group in self.groups],
        }
        if not self.parts:
            del columns["meshes over"]
        if all(group.nodes is None for group in self.groups):
            del columns["nodes"]
        same = [name for name in ("backend", "options") if len(set(columns[name])) == 1]
        equal = ", ".join(f"{name} {columns.pop(name)[0]}" for name in same)
        rows = [[*columns], *map(list, zip(*columns.values(), strict=True))]
        numbers = [index for index, name in enumerate(columns) if name in ("size", "nodes")]
        return [f"All groups: {equal}."] if equal else [], rows, numbers

    def _foot(self) -> list[str]:
        foot = [*_MEANING] if self.reused else []
        if not all(group.requests for group in self.groups):
            foot.append(_NOT_REQUESTED)
        foot += [
            f"Shared, and called by several threads: {_axes_in_words(group)} (ranks "
            f"{rank_list(group.ranks)}), by {threads_in_words(group.threads)}. If their "
            "calls must overlap, give one axis its own group: see meshverse.isolate."
            for group in self.groups
            if len(group.threads) > 1
        ]
        for same in self._same_ranks_other_options():
            each = "; ".join(
                f"{_axes_in_words(group)} ({_backend_and_options(group)})" for group in same
            )
            ranks = rank_list(same[0].ranks)
            foot.append(f"Several groups have the ranks {ranks}, because options differ: {each}.")
        if self.n_duplicates:
            foot.append(
                f"{in_other_universes(self.n_duplicates)} To share them, create their meshes with "
                'universe=, or call meshverse.install(share="world") before the first mesh, if all '
                "ranks use these meshes in the same order."
            )
        return foot

    def _same_ranks_other_options(self) -> list[list[GroupExplanation]]:
        """Return the groups that are over the same ranks as others, but have other options."""
        found: dict[frozenset[int], dict[str, GroupExplanation]] = {}
        for group in self.groups:
            if len(group.ranks) > 1 and not group.destroyed:
                found.setdefault(frozenset(group.ranks), {}).setdefault(
                    _backend_and_options(group), group
                )
        return [[*same.values()] for same in found.values() if len(same) > 1]


def in_numbers(explanations: Sequence[Explanation]) -> str:
    """Return the numbers of process groups requested, created and saved, in words."""
    requested = sum(each.requested for each in explanations)
    created = sum(each.created for each in explanations)
    planned = sum(each.planned for each in explanations)
    reused = sum(each.reused for each in explanations)
    saved = sum(each.saved for each in explanations)
    saved_bytes = sum(each.saved_bytes for each in explanations)
    text = (
        f"Requested {counted(requested, 'process group')}: {created} created, "
        + (f"{planned} planned (lazy), " if planned else "")
        + f"{reused} reused"
        + (f" (torch would reuse {reused - saved} of them, too)" if reused > saved else "")
        + f". Saved: {saved}"
    )
    text += f" (about {in_bytes(saved_bytes)} of device memory)" * bool(saved_bytes)
    return text + f", {planned} of them not created so far" * bool(planned)


def in_surplus(n_surplus: int) -> str:
    """Return a sentence about process groups that are copies of earlier ones."""
    return (
        f"{n_surplus} of these process groups {'has' if n_surplus == 1 else 'have'} the same ranks "
        "and options as groups that another root mesh had created before."
    )


def in_other_universes(n_duplicates: int) -> str:
    """Return a sentence about process groups that another universe created too."""
    return (
        f"{n_duplicates} of these process groups {'was' if n_duplicates == 1 else 'were'} also "
        "created by another universe, with the same ranks and options."
    )


def threads_in_words(threads: Mapping[str, int]) -> str:
    """Return the threads that called in a group, such as "MainThread (2 calls), other (1 call)"."""
    each = [f"{_shown(name)} ({counted(times, 'call')})" for name, times in threads.items()]
    left_out = len(each) - _SHOWN_THREADS
    return ", ".join(each if left_out <= 0 else [*each[:_SHOWN_THREADS], f"{left_out} more"])


def _shown(name: str) -> str:
    """Return a name that can neither control a terminal nor fill it."""
    text = printable(name)
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _times(group: GroupExplanation) -> str:
    times = sum(group.requests.values())
    return f"{times} time{'s' * (times != 1)}"


def _axes_in_words(group: GroupExplanation) -> str:
    return ", ".join(map(_shown, group.requests)) or "-"


def _options_in_words(group: GroupExplanation) -> str:
    # Without the backend, which has its own column.
    _, _, rest = group.options.removesuffix(")").partition(", ")
    return rest or "defaults"


def _backend_and_options(group: GroupExplanation) -> str:
    return f"{group.backend}, {_options_in_words(group)}"


def explain(
    rank_map: RankMap,
    rank: int,
    groups: Iterable[GroupRef],
    communicator_bytes: Mapping[str, int] | None = None,
    views: Sequence[ExplainedView] = (),
    topology: TopologyLike | None = None,
    parts: Sequence[ReportSection] = (),
    duplicates: Collection[str] = (),
    surplus: Collection[str] = (),
    ended: str = "",
    threads: CallingThreads | None = None,
) -> Explanation:
    """Return the report on a universe's groups; see `Universe.explain`.

    Args:
        rank_map: ranks of the universe by position.
        rank: global rank of this process.
        groups: groups of the universe.
        communicator_bytes: as for `Universe.explain`.
        views: meshes of the universe, for the picture.
        topology: topology of the ranks, or None.
        parts: parts of the universe.
        duplicates: c10d names of groups that several universes created.
        surplus: those of them that were not the first of their kind.
        ended: why the groups have ended; "" while they can be used.
        threads: threads that called in the groups; None to leave them out.
    """
    groups = tuple(groups)
    figures = with_measured(communicator_bytes)
    explained = tuple(
        _explain_group(group, over, figures, topology, threads)
        for group, over in _with_parts(ReportSection(str(rank_map), groups), parts)
    )
    # Groups of parts are last. A picture has none of them.
    requests = [group.request for group in groups]
    pictured = _Pictured(rank_map, rank, list(zip(requests, explained, strict=False)), views)
    return Explanation(
        rank_map=str(rank_map),
        rank=rank,
        requested=sum(sum(group.requests.values()) for group in explained if group.ranks),
        created=sum(group.created for group in explained),
        planned=sum(group.is_planned and not group.created for group in explained),
        groups=explained,
        parts=tuple(part.ranks for part in parts),
        ranks=rank_map.size if rank_map.is_identity else tuple(rank_map.ranks().tolist()),
        views=tuple(_axes_of(view) for view in views),
        # Not those of another universe, which this one has not requested.
        n_duplicates=sum(group.name in duplicates for group in explained if group.requests),
        n_surplus=sum(group.name in surplus for group in explained if group.requests),
        ended=ended,
        _pictured=pictured,
    )


def _axes_of(view: ExplainedView) -> dict[str, str]:
    what = view.description
    return dict(zip(what.labels, map(str, what.layout), strict=True))


def _with_parts(
    whole: ReportSection, parts: Sequence[ReportSection]
) -> Iterator[tuple[GroupRef, tuple[str, ...]]]:
    """Yield each group of a universe and its parts once, with the ranks of those that have it."""
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


def _joined(one: GroupRef, other: GroupRef) -> GroupRef:
    """Merge the records that a universe and a part, or two parts, have of one group."""
    requests = {
        name: one.requests.get(name, 0) + other.requests.get(name, 0)
        for name in (*one.requests, *other.requests)
    }
    maker = other.request if other.created else one.request
    request = one.request._replace(way=maker.way, all_ranks_reason=maker.all_ranks_reason)
    created = one.created or other.created
    return replace(one, request=request, requests=requests, created=created)


def _explain_group(
    group: GroupRef,
    over: tuple[str, ...],
    figures: Mapping[str, int],
    topology: TopologyLike | None,
    threads: CallingThreads | None,
) -> GroupExplanation:
    request = group.request
    options = request.options
    ranks = tuple(request.my_ranks())
    is_mine = group.name is not None and not group.is_borrowed
    requests = dict(group.requests)  # a copy: other threads may add requests
    return GroupExplanation(
        name=group.name,
        layout=str(request.axis),
        ranks=ranks,
        backend=backend_in_words(options.backend),
        tag=options.tag,
        options=str(options.key),
        how=group.origin if ranks else "not on this rank",
        created=group.created,
        requests=requests,
        saved=sum(requests.values()) - group.created if is_mine else 0,
        bytes_each=estimate_bytes(backend_in_words(options.backend), len(ranks), figures),
        suspended=group.state is State.SUSPENDED,
        destroyed=group.state is State.DESTROYED,
        is_planned=group.is_planned,
        nodes=None if topology is None else topology.spans("node", ranks),
        salt=options.digest_without_timeout,
        over=over,
        threads=threads.of(group.name) if threads is not None and _is_shared(group) else {},
    )


def _is_shared(group: GroupRef) -> bool:
    refs = [] if group.group is None else group.group.refs.alive()
    return len(group.requests) > 1 or len(refs) > 1
