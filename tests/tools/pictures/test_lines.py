"""Lines of pictures show the groups as they are, count all of them, and are never many."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshverse._core import AxisLayout, Layout, RankGroups, RankMap
from meshverse.tools.pictures.lines import panel_of, pieces_of
from meshverse.tools.pictures.model import Gap, Panel, PicturedGroups

_SHAPES = [(8,), (2, 4), (2, 2, 8), (4, 8, 8), (8, 160, 8), (8, 4, 40, 8), (10, 128, 8)]
_SHAPES += [(16, 5, 64, 2), (4, 80, 6), (3, 7, 5), (10_240,), (2, 5_120), (5_120, 2)]


def _panel(axis: AxisLayout, rank_map: RankMap, rank: int, node_size: int | None) -> Panel:
    pieces = pieces_of(rank_map, node_size)
    return panel_of(PicturedGroups(("x",), axis), rank_map, rank, node_size, pieces)


def _check(panel: Panel, axis: AxisLayout, rank_map: RankMap, rank: int, n_lines: int) -> None:
    groups = RankGroups(axis, rank_map)
    mine = set(groups.ranks_of(rank_map.position_of(rank)))
    for line in panel.drawn:
        for cell in line.cells:
            position = rank_map.position_of(cell.rank)
            assert position is not None
            assert cell.group == groups.group_index(position)
            assert cell.is_mine == (cell.rank in mine)
    gaps = [line.text for line in panel.lines if isinstance(line, Gap)]
    left_out = 0
    for text in gaps:
        found = re.match(r"([\d,]+) more \w+?s?\b.*?(?: \(x([\d,]+)\))?$", text)
        assert found is not None
        count, times = (int((part or "1").replace(",", "")) for part in found.groups())
        left_out += count * times
    assert sum(line.times for line in panel.drawn) + left_out == n_lines
    assert sum(cell.is_me for line in panel.drawn for cell in line.cells) == 1


@pytest.mark.parametrize("node_size", [8, 72, None])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_worlds_from_8_to_10_240_ranks_are_drawn_in_few_lines(shape, node_size) -> None:
    world = math.prod(shape)
    rank_map = RankMap.identity(world)
    n_lines = len(pieces_of(rank_map, node_size))
    for axis in Layout.from_shape(shape):
        for rank in {world // 3, world - 1}:
            panel = _panel(axis, rank_map, rank, node_size)
            _check(panel, axis, rank_map, rank, n_lines)
            assert len(panel.lines) <= 64


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([None, 1, 3, 8]),
    st.randoms(use_true_random=False),
)
def test_any_order_of_ranks(shape: list[int], node_size: int | None, random) -> None:
    world = math.prod(shape)
    ranks = random.sample(range(2 * world), world)
    rank_map = RankMap.from_ranks(ranks)
    n_lines = len(pieces_of(rank_map, node_size))
    for axis in Layout.from_shape(tuple(shape)):
        panel = _panel(axis, rank_map, ranks[0], node_size)
        _check(panel, axis, rank_map, ranks[0], n_lines)


def test_ten_thousand_ranks_in_no_order_are_still_few_lines() -> None:
    ranks = [(position * 7_919) % 10_240 for position in range(10_240)]
    panel = _panel(Layout.from_shape((8, 160, 8))[1], RankMap.from_ranks(ranks), 777, 8)
    assert len(panel.lines) <= 40
    assert any(
        line.text.endswith("groups 0 to 63") for line in panel.lines if isinstance(line, Gap)
    )


def test_nodes_with_the_same_groups_are_drawn_once_and_counted() -> None:
    panel = _panel(Layout.from_shape((8, 160, 8))[1], RankMap.identity(10_240), 777, 8)
    assert (panel.title, panel.subtitle) == ("x", "64 groups of 160, layout 160:8")
    assert [(line.label, line.times) for line in panel.drawn] == [
        (f"nodes {160 * stage}-{160 * stage + 159}", 160) for stage in range(8)
    ]
    assert [cell.group for cell in panel.drawn[1].cells] == list(range(8, 16))
    assert [cell.is_me for cell in panel.drawn[0].cells] == [False, True] + [False] * 6


def test_my_node_is_drawn_where_others_are_left_out() -> None:
    panel = _panel(Layout.from_shape((8, 160, 8))[2], RankMap.identity(10_240), 777, 8)
    assert [line.text if isinstance(line, Gap) else line.label for line in panel.lines] == [
        "node 0",
        "96 more nodes like these, groups 1 to 96",
        "node 97",
        "1,181 more nodes like these, groups 98 to 1278",
        "node 1279",
    ]


def test_a_large_node_is_drawn_in_pieces() -> None:
    panel = _panel(AxisLayout(2, 1), RankMap.identity(512), 300, 256)
    assert [line.label for line in panel.drawn] == [
        "node 0: 0-127",
        "node 0: 128-255",
        "node 1: 256-383",
        "node 1: 384-511",
    ]


@pytest.mark.parametrize(
    ("ranks", "node_size", "label"),
    [
        ([0, 2, 4, 6], None, "ranks 0-6 (4)"),
        ([4, 5, 6, 7], None, "ranks 4-7"),
        ([4 * n + k for n in range(20) for k in (0, 1)], 2, "nodes 0-38 (20)"),
        ([*range(40)], 2, "nodes 0-19"),
        ([0, 2, 300, 302], 256, "node 0: 0-2 (2)"),
    ],
)
def test_a_label_counts_what_is_there_between_its_ends(ranks, node_size, label: str) -> None:
    axis = AxisLayout(20, 2) if len(ranks) == 40 else AxisLayout(2, 1)  # nodes with the same groups
    panel = _panel(axis, RankMap.from_ranks(ranks), 10_000, node_size)
    assert panel.drawn[0].label == label


def test_only_ranks_that_are_there_are_drawn() -> None:
    panel = _panel(AxisLayout(2, 1), RankMap.from_ranks([21, 3, 20, 2]), 9, 8)
    lines = [(line.label, [cell.rank for cell in line.cells]) for line in panel.drawn]
    assert lines == [("node 0", [2, 3]), ("node 2", [20, 21])]
    assert not any(cell.is_mine or cell.is_me for line in panel.drawn for cell in line.cells)
