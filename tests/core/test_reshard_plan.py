"""Plans of moves: each element once, from ranks that send equally much, against a slow oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.reshard_oracle import Grid, Move, Played, Side, grid_of
from meshverse._core import AxisLayout, Holders, Layout, RankMap, plan_reshard, shard_shape


@st.composite
def grids(draw: st.DrawFn, world: int) -> Grid:
    """Some ranks of a world, in order or not, on up to three axes in any order."""
    ranks = draw(st.permutations(range(world)))
    first = draw(st.integers(0, world - 1))
    n = draw(st.integers(1, world))
    if draw(st.booleans()):
        ranks = range(min(first, world - n), min(first, world - n) + n)
    sizes, left = [], n
    for _ in range(draw(st.integers(0, 2))):
        sizes.append(draw(st.sampled_from([k for k in range(1, left + 1) if left % k == 0])))
        left //= sizes[-1]
    sizes.append(left)
    order = draw(st.permutations(range(len(sizes))))
    return grid_of(list(ranks)[:n], sizes, order, world)


@st.composite
def sides(draw: st.DrawFn, grids: list[Grid], ndim: int) -> Side:
    """Any placements: several axes on one dimension, strided ones, replicas."""
    grid = draw(st.integers(0, len(grids) - 1))
    axes = range(len(grids[grid].sizes))
    dims = [draw(st.integers(-1, ndim - 1)) for _ in axes]
    factors = [draw(st.sampled_from([1, 1, 2, 3])) if dim >= 0 else 1 for dim in dims]
    return Side(grid, dims, factors, draw(st.booleans()))


_SHAPES = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3),
    st.lists(st.sampled_from([9, 16]), min_size=1, max_size=2),
    st.just([40]),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Grid], list[Move], int, int, dict[str, Any]]:
    """Some tensors of one world, with a length of rounds and nodes."""
    world = draw(st.integers(1, 12))
    all_grids = [draw(grids(world)) for _ in range(draw(st.integers(1, 3)))]
    moves = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(_SHAPES)
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
        source, target = (draw(sides(all_grids, len(shape))) for _ in range(2))
        moves.append(Move(shape, itemsize, source, target))
    round_bytes = draw(st.sampled_from([16, 48, 256, 100_000]))
    nodes: dict[str, Any] = {"node_size": draw(st.sampled_from([1, 2, 4, 100]))}
    if draw(st.booleans()):
        nodes = {"node_of_rank": draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))}
    return all_grids, moves, world, round_bytes, nodes


@given(jobs())
def test_every_element_comes_once_and_what_is_there_is_kept(job: tuple[Any, ...]) -> None:
    all_grids, moves, world, round_bytes, nodes = job
    played = Played(all_grids, moves, world, round_bytes, **nodes)
    for rank in range(world):
        for got, wanted in zip(played.got[rank], played.wanted[rank], strict=True):
            assert wanted is None or bool((got == wanted).all())
        assert played.received[rank] == played.least_bytes(rank)
        _check_shapes(all_grids, moves, played, rank)


def _check_shapes(all_grids: list[Grid], moves: list[Move], played: Played, rank: int) -> None:
    for number, move in enumerate(moves):
        for side, locals_ in ((move.source, played.sources), (move.target, played.wanted)):
            grid, local = all_grids[side.grid], locals_[rank][number]
            coordinates = grid.holders.coordinates_of(rank)
            assert (coordinates is None) == (local is None)
            if coordinates is not None:
                said = shard_shape(move.shape, *side[1:], grid.sizes, coordinates)
                assert said == tuple(local.shape)


@given(n_replicas=st.integers(1, 6), n_receivers=st.integers(1, 12), n_tensors=st.integers(1, 3))
def test_replicas_send_equally_much(n_replicas: int, n_receivers: int, n_tensors: int) -> None:
    """Replicas on one node, receivers on another: the largest sends at most 1.25x the mean."""
    world = n_replicas + n_receivers
    all_grids = [
        grid_of(range(n_replicas), [n_replicas], [0], world),
        grid_of(range(n_replicas, world), [n_receivers], [0], world),
    ]
    replicated = [Side(grid, [-1], [1], False) for grid in range(2)]
    moves = [Move([64, 40], 16, *replicated) for _ in range(n_tensors)]
    nodes = [0] * n_replicas + [1] * n_receivers
    played = Played(all_grids, moves, world, 1 << 20, node_of_rank=nodes)
    sent = [played.sent[rank] for rank in range(n_replicas)]
    assert max(sent) <= 1.25 * sum(sent) / n_replicas


def test_a_replica_on_the_node_sends() -> None:
    """Ranks 0, 4 have all; each serves the three others of its node."""
    all_grids = [
        Grid(Holders(RankMap.identity(8), 0, Layout([AxisLayout(2, 4)])), [2]),
        grid_of(range(8), [8], [0], 8),
    ]
    move = Move([64, 64], 4, Side(0, [-1], [1], False), Side(1, [-1], [1], False))
    played = Played(all_grids, [move], 8, 1 << 20, node_size=4)
    for rank, plan in enumerate(played.plans):
        for _, _, peer, *_ in plan.messages:
            assert peer // 4 == rank // 4
    assert dict(played.sent) == {0: 3 * 4 * 4096, 4: 3 * 4 * 4096}


def test_replicas_of_a_node_share_its_receivers() -> None:
    """Ranks 0 and 1 have all, ranks 2, 3 and 4 of the node want it: one and a half each."""
    all_grids = [grid_of(range(2), [2], [0], 5), grid_of(range(2, 5), [3], [0], 5)]
    move = Move([64, 64], 4, Side(0, [-1], [1], False), Side(1, [-1], [1], False))
    played = Played(all_grids, [move], 5, 1 << 20, node_size=8)
    assert dict(played.sent) == {0: 1.5 * 4 * 4096, 1: 1.5 * 4 * 4096}


def _trainer_to_generator(replicas: int, n_tensors: int = 1_000) -> tuple[Any, ...]:
    """pp 8 x dp 160 x tp 8, FSDP2 and tensor parallel, in some replicas -> tp 8 x 512 replicas."""
    pp, dp, tp = 8, 160, 8
    stage = replicas * dp * tp
    world = pp * stage + 4096
    ranks = RankMap.identity(world)
    trainer = Layout.from_shape((replicas, dp, tp))
    holders = [Holders(ranks, index * stage, trainer) for index in range(pp)]
    holders.append(Holders(ranks, pp * stage, Layout.from_shape((512, tp))))
    kinds = [([-1, 0, 0], [1, tp, 1], [-1, 0]), ([-1, 0, 1], [1, 1, 1], [-1, 1])]
    shapes = [(8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
    moves = []
    for number in range(n_tensors):
        dims, factors, target = kinds[number % 2]
        source = (number * pp // n_tensors, dims, factors, True)
        moves.append((shapes[number % 4], 2, source, (pp, target, [1, 1], False)))
    return holders, moves, world


@pytest.mark.parametrize("replicas", [1, 102])
def test_a_job_of_ten_thousand_ranks_and_one_of_a_million(replicas: int) -> None:
    """The plan of a rank has to do with its peers only, however many other ranks there are."""
    holders, moves, world = _trainer_to_generator(replicas)
    sizes = [math.prod(shape) * 2 for shape, *_ in moves]
    for rank in (0, 777, world - 4096, world - 1):
        messages, _, kept = plan_reshard(holders, moves, rank, world, 16 << 20, 8)
        rows = messages.tolist()
        assert kept.tolist() == []
        received = sum(row[4] for row in rows if not row[3])
        sent = sum(row[4] for row in rows if row[3])
        if rank >= world - 4096:
            assert (sent, received) == (0, sum(sizes) // 8)
            assert len({row[2] for row in rows}) <= 8 * 160 * 2
        else:
            # 512 receivers want what this rank has, and as many ranks have it as replicas.
            own = holders[0].coordinates_of(rank)
            assert own is not None
            mine = sum(
                2 * math.prod(shard_shape(shape, *source[1:], [replicas, 160, 8], own))
                for shape, _, source, _ in moves
                if source[0] == 0
            )
            assert received == 0
            assert 0.75 * 512 / replicas * mine <= sent <= 1.25 * 512 / replicas * mine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 8}, "rank 8 is outside the world of 8"),
        ({"round_bytes": 2}, "a round must have room for one"),
        (
            {"moves": [([4], 4, (1, [0], [1], False), (0, [0], [1], False))]},
            "number 1 of 1",
        ),
        ({"moves": [([4], 4, (0, [1], [1], False), (0, [0], [1], False))]}, "splits dimension 1"),
        ({"moves": [([4], 4, (0, [0], [0], False), (0, [0], [1], False))]}, "by factor 0"),
        (
            {"moves": [([4], 4, (0, [], [], False), (0, [0], [1], False))]},
            "one of each an axis",
        ),
        ({"moves": [([-4], 4, (0, [0], [1], False), (0, [0], [1], False))]}, "size -4"),
        ({"node_size": 0}, "must be at least 1"),
        ({"world_size": 4}, "rank 7, which is outside the world of 4"),
        ({"world_size": 2**31 + 1}, "2147483649 ranks: plans are made for 2\\*\\*31"),
        ({"node_of_rank": [0] * 4}, "node_of_rank for 4 ranks in a world of 8"),
        ({"moves": [([2**40], 4, *[(0, [0], [1], False)] * 2)]}, "give longer ones"),
    ],
)
def test_what_cannot_be_planned(change: dict[str, Any], said: str) -> None:
    side = (0, [0], [1], False)
    holders = [Holders(RankMap.identity(8), 0, Layout([AxisLayout(8)]))]
    given_ = {"holders": holders, "moves": [([4], 4, side, side)], "rank": 0, "world_size": 8}
    with pytest.raises(ValueError, match=said):
        plan_reshard(**{**given_, "round_bytes": 64, **change})


def test_a_tensor_whose_bytes_need_more_than_64_bits() -> None:
    side = (0, [0], [1], False)
    holders = [Holders(RankMap.identity(8), 0, Layout([AxisLayout(8)]))]
    with pytest.raises(OverflowError, match="the bytes of a tensor"):
        plan_reshard(holders, [([2**62, 2**62], 4, side, side)], 0, 8, 64)
    plan_reshard(holders, [([2**62, 2**62, 0], 4, side, side)], 0, 8, 64)  # has none


def test_more_dimensions_and_axes_than_the_stack_has_room_for() -> None:
    n = 200_000
    axes = Layout([AxisLayout(2), *[AxisLayout(1)] * (n - 1)])
    holders = [Holders(RankMap.identity(2), 0, axes)]
    split, whole = ((0, [dim] * n, [1] * n, False) for dim in (0, -1))
    plan = plan_reshard(holders, [([4] + [1] * n, 1, split, whole)], 0, 2, 64)
    assert plan[0].tolist() == [[1, 0, 1, 0, 2, 0, 1], [1, 0, 1, 1, 2, 2 * n + 5, 1]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"axis_sizes": [0, 2]}, "axis 0 of size 0: an axis has at least one rank; give"),
        ({"axis_sizes": [2, -2]}, "axis 1 of size -2: an axis has at least one rank; give"),
        ({"shape": [9, -4]}, "size -4: sizes are at least 0; give the shape of the whole"),
        ({"coordinates": [-1, 0]}, "coordinate -1 on axis 0 of size 2: .* from 0 to 1; give"),
        ({"coordinates": [0, 7]}, "coordinate 7 on axis 1 of size 2: .* from 0 to 1; give"),
        ({"coordinates": [0]}, "1 coordinates for 2 axes: give one an axis"),
        ({"dims": [0, 2]}, "axis 1 splits dimension 2"),
        ({"factors": [1, 0]}, "by factor 0 .* factors from 1 to 16777216"),
        ({"factors": [2**62, 1]}, "by factor 4611686018427387904 .* from 1 to 16777216"),
    ],
)
def test_shards_that_are_none(change: dict[str, Any], said: str) -> None:
    given_: dict[str, Any] = {"shape": [9, 4], "dims": [0, -1], "factors": [1, 1]}
    given_ |= {"right_to_left": False, "axis_sizes": [2, 2], "coordinates": [0, 0]}
    with pytest.raises(ValueError, match=said):
        shard_shape(**{**given_, **change})


def test_shards_of_the_longest_dimensions() -> None:
    longest = 2**63 - 1
    assert shard_shape([longest], [0], [2], False, [1], [0]) == (longest,)
    assert shard_shape([longest], [0], [1], False, [2], [1]) == (longest // 2,)
    assert shard_shape([longest], [0], [1], False, [2**62 + 1], [2**62]) == (0,)
    assert shard_shape([9], [0], [1], False, [longest], [8]) == (1,)


def test_holders_that_leave_their_ranks() -> None:
    with pytest.raises(ValueError, match="leave identity of 8"):
        Holders(RankMap.identity(8), 2**63 - 1, Layout([AxisLayout(8)]))
    with pytest.raises(ValueError, match="leave identity of 8"):
        Holders(RankMap.identity(8), 4, Layout([AxisLayout(8)]))
    with pytest.raises(ValueError, match="overlap or are not nested"):
        Holders(RankMap.identity(8), 0, Layout([AxisLayout(2, 1), AxisLayout(2, 1)]))
