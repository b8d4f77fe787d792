"""Lines of a panel: one for each node, or one that represents all nodes that repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meshverse._core import RankGroups, RankMap
from meshverse.wording import printable

from .model import Cell, Gap, Line, Panel, PicturedGroups
from .repeats import Folded, Part, Row, Run, fold

_N_DRAWN_WHOLE = 16  # largest number of nodes all of which are drawn
_N_DRAWN_PARTS = 8  # largest number of lines of a run (see `repeats`) all of which are drawn
_MOST_LINES = 48  # if folding leaves more lines, most of them are omitted
_MOST_RANKS_IN_LINE = 128  # larger nodes are split over several lines
_RANKS_IN_LINE = 8  # if nodes are unknown


Piece = Sequence[int]
"""Ascending ranks that are drawn as one line: a node, or a piece of a large one."""


def pieces_of(rank_map: RankMap, node_size: int | None) -> list[Piece]:
    """Split the ranks of a picture by node. O(number of ranks).

    Args:
        rank_map: map from position to global rank.
        node_size: number of ranks per node, in order of rank; None if unknown.
    """
    if rank_map.is_identity:
        n = rank_map.size
        size = node_size or _RANKS_IN_LINE
        nodes: list[Piece] = [range(start, min(start + size, n)) for start in range(0, n, size)]
    elif node_size is None:
        ranks = sorted(rank_map.ranks().tolist())
        starts = range(0, len(ranks), _RANKS_IN_LINE)
        nodes = [ranks[start : start + _RANKS_IN_LINE] for start in starts]
    else:
        ranks = sorted(rank_map.ranks().tolist())
        by_node = itertools.groupby(ranks, key=lambda rank: rank // node_size)
        nodes = [list(of_node) for _, of_node in by_node]
    size = _MOST_RANKS_IN_LINE
    return [node[start : start + size] for node in nodes for start in range(0, len(node), size)]


def panel_of(
    groups: PicturedGroups,
    rank_map: RankMap,
    rank: int,
    node_size: int | None,
    pieces: Sequence[Piece],
) -> Panel:
    """Draw the groups of one axis. O(number of ranks).

    Args:
        groups: groups of the axis.
        rank_map: map from position to global rank.
        rank: global rank whose group is marked. No group is, if the rank map lacks the rank.
        node_size: as in `pieces_of`.
        pieces: result of `pieces_of`.
    """
    rank_groups = RankGroups(groups.axis, rank_map)
    count, size = rank_groups.n_groups, rank_groups.group_size
    return Panel(
        title=", ".join(map(printable, groups.names)),
        subtitle=f"{count:,} group{'s' * (count != 1)} of {size:,}, layout {groups.axis}",
        lines=tuple(_Drawer(rank_groups, pieces, rank, node_size).lines()),
    )


def _seams(groups: RankGroups, pieces: Sequence[Piece]) -> list[int]:
    """Return the strides of the layouts in lines; `fold` joins runs between their multiples."""
    if not groups.rank_map.is_identity:
        return []
    in_line = len(pieces[0])
    strides = {*groups.axis.strides, *groups.offsets.strides}
    return [stride // in_line for stride in sorted(strides) if stride and stride % in_line == 0]


class _Drawer:
    def __init__(
        self, groups: RankGroups, pieces: Sequence[Piece], rank: int, node_size: int | None
    ) -> None:
        self._pieces = pieces
        self._node_size = node_size
        self._rank = rank
        self._seams = _seams(groups, pieces)
        # All ranks at once: a million calls of group_index would take seconds.
        all_groups = groups.all().tolist()
        group_of = {rank: index for index, ranks in enumerate(all_groups) for rank in ranks}
        self._rows = [tuple(map(group_of.__getitem__, piece)) for piece in pieces]
        self._mine = group_of.get(rank)
        self._me = next((i for i, piece in enumerate(pieces) if rank in piece), None)

    def lines(self) -> Iterator[Line | Gap]:
        if len(self._rows) <= _N_DRAWN_WHOLE:
            for index in range(len(self._rows)):
                yield self._line(index, (), self._me)
            return
        drawn = list(self._parts(fold(self._rows, self._seams), 0, (), self._me))
        if len(drawn) > _MOST_LINES:
            one_by_one: Folded = [(Row(row), 0) for row in self._rows]
            drawn = list(self._parts(one_by_one, 0, (), self._me))
        yield from drawn

    def _parts(
        self, parts: Folded, start: int, times: _Times, me: int | None
    ) -> Iterator[Line | Gap]:
        starts = []
        for part, _ in parts:
            starts.append(start)
            start += part.span
        shown = range(len(parts))
        if len(parts) > _N_DRAWN_WHOLE:
            edge = range(_N_DRAWN_WHOLE // 2)
            mine = self._mine_of([part for part, _ in parts], starts, me)
            shown = sorted({*edge, *mine, len(parts) - 1})  # type: ignore[assignment]
        last = -1
        for index in shown:
            if index > last + 1:
                yield self._gap(starts[last + 1], starts[index], times, alike=False)
            part, _ = parts[index]
            yield from self._part(part, starts[index], times, me)
            last = index

    def _part(self, part: Part, start: int, times: _Times, me: int | None) -> Iterator[Line | Gap]:
        if isinstance(part, Row):
            yield self._line(start, times, me)
        elif isinstance(part, Run):
            yield from self._run(part, start, times, me)
        else:
            yield from self._parts(list(part.parts), start, times, me)

    def _run(self, run: Run, start: int, times: _Times, me: int | None) -> Iterator[Line | Gap]:
        inner = run.part.span
        if run.step == 0:
            if _covers(run, start, me):
                assert me is not None
                me = start + (me - start) % inner
            yield from self._part(run.part, start, (*times, (run.count, inner)), me)
            return
        last = -1
        for k in self._shown(run, start, me):
            if k > last + 1:
                yield self._gap(start + (last + 1) * inner, start + k * inner, times, alike=True)
            yield from self._part(run.part, start + k * inner, times, me)
            last = k

    def _shown(self, run: Run, start: int, me: int | None) -> Sequence[int]:
        """Choose the parts of a run to draw: all if few, else first, this rank's and last."""
        if run.count * _n_lines(run.part) <= _N_DRAWN_PARTS:
            return range(run.count)
        starts = range(start, start + run.span, run.part.span)
        mine = self._mine_of([run.part] * run.count, starts, me)
        return sorted({0, *mine, run.count - 1})

    def _mine_of(self, parts: Sequence[Part], starts: Sequence[int], me: int | None) -> list[int]:
        """Return the part with this rank, and the first few parts with ranks of its group."""
        pairs = list(zip(parts, starts, strict=True))
        with_me = [i for i, (part, start) in enumerate(pairs) if _covers(part, start, me)]
        with_mine = (
            i
            for i, (part, start) in enumerate(pairs)
            if _has(part, self._rows[start][0] - _least_of(part), self._mine)
        )
        return with_me + list(itertools.islice(with_mine, _N_DRAWN_PARTS))

    def _line(self, index: int, times: _Times, me: int | None) -> Line:
        piece, row = self._pieces[index], self._rows[index]
        here = None
        if me == index and self._me is not None:  # also if this line represents the rank's line
            here = self._pieces[self._me].index(self._rank)
        cells = tuple(
            Cell(rank, group, group == self._mine, here == place)
            for place, (rank, group) in enumerate(zip(piece, row, strict=True))
        )
        n_times = 1
        for count, _ in times:
            n_times *= count
        return Line(self._label(index, times), cells, n_times)

    def _label(self, index: int, times: _Times) -> str:
        stop = index + 1
        span = 1
        for count, step in sorted(times, key=lambda pair: pair[1]):
            if step != span:
                break
            span *= count
        else:
            stop = index + span
        first, last = self._pieces[index], self._pieces[stop - 1]
        n_ranks = sum(map(len, self._pieces[index:stop]))
        ranks = _from_to(first[0], last[-1], n_ranks)
        if not self._node_size:
            return f"ranks {ranks}"
        node, last_node = first[0] // self._node_size, last[0] // self._node_size
        if self._node_size > _MOST_RANKS_IN_LINE:
            return f"node {node}: {ranks}"
        if node == last_node:
            return f"node {node}"
        return f"nodes {_from_to(node, last_node, stop - index)}"

    def _gap(self, start: int, stop: int, times: _Times, *, alike: bool) -> Gap:
        n = stop - start
        what = "node" if self._node_size and self._node_size <= _MOST_RANKS_IN_LINE else "line"
        rows = self._rows[start:stop]
        lowest, highest = min(map(min, rows)), max(map(max, rows))
        text = f"{n:,} more {what}{'s' * (n != 1)}{' like these' * alike}"
        text += f", groups {lowest} to {highest}"
        n_times = 1
        for count, _ in times:
            n_times *= count
        return Gap(text if n_times == 1 else f"{text} (x{n_times:,})")


_Times = tuple[tuple[int, int], ...]
"""Repeats that contain a line, outermost first: their count, and their distance in lines."""


def _from_to(first: int, last: int, count: int) -> str:
    """Return the first and last of some numbers, and how many they are if some between lack."""
    return f"{first}-{last}" + f" ({count:,})" * (count != last - first + 1)


def _n_lines(part: Part) -> int:
    """Return the number of lines of a part, with exact repeats drawn once."""
    if isinstance(part, Row):
        return 1
    if isinstance(part, Run):
        return _n_lines(part.part) * (part.count if part.step else 1)
    return sum(_n_lines(inner) for inner, _ in part.parts)


def _covers(part: Part, start: int, index: int | None) -> bool:
    return index is not None and start <= index < start + part.span


def _least_of(part: Part) -> int:
    """Return the first number in a part, before an offset is added."""
    while not isinstance(part, Row):
        part = part.part if isinstance(part, Run) else part.parts[0][0]
    return part.numbers[0]


def _has(part: Part, add: int, group: int | None) -> bool:
    """Return whether a part, with the offset `add`, has a rank of the group."""
    if group is None:
        return False
    if isinstance(part, Row):
        return group - add in part.numbers
    if isinstance(part, Run):
        return any(
            _has(part.part, add + k * part.step, group)
            for k in range(part.count if part.step else 1)
        )
    return any(_has(inner, add + more, group) for inner, more in part.parts)
