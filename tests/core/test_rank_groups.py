"""Rank maps, the groups of an axis, and the arrays that ranks come in."""

from __future__ import annotations

import array
import gc
import math
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import oracle
from meshverse._core import AxisLayout, RankGroups, RankMap, rank_group

unique_ranks = st.lists(st.integers(0, 2**40), min_size=1, max_size=30, unique=True)


def ranks_of_map(rank_map):
    return [rank_map.rank_at(position) for position in range(rank_map.size)]


@given(unique_ranks, st.integers(0, 60))
def test_a_rank_map_is_a_list_and_its_inverse(ranks, other):
    rank_map = RankMap.from_ranks(ranks)
    assert ranks_of_map(rank_map) == ranks
    assert rank_map.size == len(ranks)
    assert [rank_map.position_of(rank) for rank in ranks] == list(range(len(ranks)))
    assert rank_map.position_of(other) == (ranks.index(other) if other in ranks else None)


@given(unique_ranks, unique_ranks)
def test_equal_content_is_the_same_object(ranks, others):
    one, other = RankMap.from_ranks(ranks), RankMap.from_ranks(others)
    assert (one is other) == (one == other) == (ranks == others)
    assert (one.fingerprint == other.fingerprint) == (ranks == others)
    assert one is RankMap.from_ranks(tuple(ranks))


@given(unique_ranks)
def test_a_rank_map_knows_whether_its_ranks_ascend(ranks):
    rank_map = RankMap.from_ranks(ranks)
    assert ranks_of_map(rank_map.sorted()) == sorted(ranks)
    assert rank_map.is_sorted() == (ranks == sorted(ranks))
    assert rank_map.sorted().is_sorted()
    assert (rank_map.sorted() is rank_map) == rank_map.is_sorted()


def test_counting_up_from_zero_is_the_identity():
    identity = RankMap.identity(5)
    assert identity.is_identity
    assert identity is RankMap.from_ranks(range(5)) is RankMap.from_ranks(torch.arange(5).numpy())
    assert not RankMap.from_ranks(range(1, 6)).is_identity
    assert ranks_of_map(identity) == list(range(5))
    assert identity.position_of(5) is identity.position_of(-1) is None


@given(unique_ranks)
def test_the_hash_of_the_tuple_is_pythons(ranks):
    assert RankMap.from_ranks(ranks).tuple_hash() == hash(tuple(ranks))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 10_240])
def test_the_hash_of_the_tuple_of_an_identity_is_pythons(size):
    assert RankMap.identity(size).tuple_hash() == hash(tuple(range(size)))


def test_fingerprints_are_the_same_everywhere():
    # Ranks on different machines compare these: a change breaks jobs of mixed versions.
    assert RankMap.identity(8).fingerprint == "de9dd91f11a10f2ab5b2f762c56e99d4"
    assert RankMap.from_ranks((7, 3)).fingerprint == "3ac885f629c6ebf744bd92f36089b46a"


@pytest.mark.parametrize("kind", ["i", "q"])
def test_ranks_come_from_buffers(kind):
    ranks = [4, 2, 9]
    expected = RankMap.from_ranks(ranks)
    assert RankMap.from_ranks(array.array(kind, ranks)) is expected
    dtype = {"i": numpy.int32, "q": numpy.int64}[kind]
    assert RankMap.from_ranks(numpy.array(ranks, dtype)) is expected
    with pytest.raises(ValueError, match="must be one-dimensional, contiguous and of int32 or"):
        RankMap.from_ranks(numpy.array([ranks, ranks], dtype)[:, ::2])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RankMap.identity(0), ValueError, "size 0: a rank map holds at least one rank"),
        (lambda: RankMap.from_ranks([]), ValueError, "a rank map holds at least one rank"),
        (lambda: RankMap.from_ranks([3, -2]), ValueError, "rank -2 at position 1: .*at least 0"),
        (lambda: RankMap.from_ranks([5, 1, 5]), ValueError, "rank 5 stands at positions 0 and 2"),
        (lambda: RankMap.from_ranks([1, 5, 5]), ValueError, "rank 5 stands at positions 1 and 2"),
        (lambda: RankMap.from_ranks(4), TypeError, "ranks must be a sequence of integers, got 4"),
        (lambda: RankMap.from_ranks(["a"]), TypeError, "ranks must be integers, got 'a'"),
        (lambda: RankMap.from_ranks(numpy.zeros(2)), ValueError, "format 'd'.*convert it first"),
        (lambda: RankMap(), TypeError, r"made by RankMap.identity\(n\) or RankMap.from_ranks"),
        (lambda: RankMap.identity(4).rank_at(4), IndexError, "positions run from 0 to 3"),
        (lambda: RankMap.from_ranks([2**31]).ranks(), ValueError, "must be below 2..31"),
        (lambda: RankMap.identity(2**40).ranks(), ValueError, "rank 1099511627775 as int32"),
    ],
)
def test_errors_say_what_was_asked_and_the_rule(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_text_is_short():
    assert repr(RankMap.identity(8)) == "RankMap(identity of 8)"
    assert repr(RankMap.from_ranks((0, 2, 4, 6))) == "RankMap(4 ranks: 0, 2, 4, 6)"
    assert repr(RankMap.from_ranks([9])) == "RankMap(1 rank: 9)"
    assert (
        repr(RankMap.from_ranks(range(1, 100))) == "RankMap(99 ranks: 1, 2, 3, 4, 5, 6, 7, 8, ...)"
    )


def test_the_table_of_rank_maps_does_not_keep_them():
    ranks = numpy.arange(1, 1_000_001)
    first = RankMap.from_ranks(ranks).fingerprint
    again = RankMap.from_ranks(ranks)
    assert again.fingerprint == first
    assert again is RankMap.from_ranks(ranks)


def test_threads_agree_on_one_rank_map():
    start, found = threading.Barrier(8), []

    def intern():
        start.wait()
        found.extend(RankMap.from_ranks((n + 9, n)) for n in range(200))

    threads = [threading.Thread(target=intern) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(rank_map) for rank_map in found}) == 200


@st.composite
def groups_with_ranks(draw):
    sizes, strides, n = draw(oracle.tilings())
    ranks = draw(st.one_of(st.just(list(range(n))), st.permutations(range(5, 5 + 2 * n, 2))))
    return AxisLayout(sizes, strides), ranks


@given(groups_with_ranks())
def test_groups_partition_the_ranks(axis_and_ranks):
    axis, ranks = axis_and_ranks
    groups = RankGroups(axis, RankMap.from_ranks(ranks))
    expected = oracle.groups(oracle.positions_of(axis), ranks)
    assert groups.all().tolist() == expected
    assert sorted(rank for group in expected for rank in group) == sorted(ranks)
    assert numpy.asarray(groups.all()).shape == (len(ranks) // axis.size, axis.size)
    offsets = oracle.positions_of(axis.complement(len(ranks)))
    assert [group[0] for group in expected] == [ranks[offset] for offset in offsets]


@pytest.mark.long
@given(groups_with_ranks())
def test_every_rank_finds_its_own_group_by_itself(axis_and_ranks):
    axis, ranks = axis_and_ranks
    groups = RankGroups(axis, RankMap.from_ranks(ranks))
    expected = oracle.groups(oracle.positions_of(axis), ranks)
    for position, rank in enumerate(ranks):
        mine = groups.ranks_of(position)
        assert mine == expected[groups.group_index(position)]
        assert mine[groups.coordinate(position)] == rank
        both = rank_group(axis, groups.rank_map, position, "salt")
        assert both == (mine, groups.fingerprint_of(position, "salt"))
        ascending = sorted(mine)
        in_order = RankGroups(AxisLayout(len(mine)), RankMap.from_ranks(ascending))
        assert rank_group(axis, groups.rank_map, position, "salt", ascending=True) == (
            *(ascending, in_order.fingerprint_of(0, "salt")),
        )


def test_a_million_ranks_cost_one_rank_nothing():
    world = 2**50  # no list of it could exist
    groups = RankGroups(AxisLayout((2, 4), (2**49, 2)), RankMap.identity(world))
    position = 2**49 + 2 * 3 + 1
    assert (groups.group_index(position), groups.coordinate(position)) == (1, 7)
    assert groups.group_index(world - 1) == 2**47 - 1
    assert groups.ranks_of(position) == [1, 3, 5, 7, *(2**49 + r for r in (1, 3, 5, 7))]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RankGroups(AxisLayout(3), RankMap.identity(8)), ValueError, "3:1 in 8 positions"),
        (
            lambda: RankGroups(AxisLayout(2), RankMap.identity(4)).ranks_of(4),
            IndexError,
            "position 4 among the groups of axis 2:1: positions run from 0 to 3",
        ),
        (
            lambda: RankGroups(AxisLayout(2), RankMap.identity(4)).group_index(-1),
            IndexError,
            "position -1",
        ),
    ],
)
def test_group_errors_say_the_rule(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("ranks", "dtype", "shape"),
    [
        (RankMap.from_ranks((4, 0, 2)).ranks(), "int32", (3,)),
        (RankGroups(AxisLayout(2, 4), RankMap.identity(8)).all(), "int64", (4, 2)),
    ],
    ids=str,
)
def test_arrays_are_viewed_without_a_copy(ranks, dtype, shape):
    viewed = numpy.asarray(ranks)
    assert (viewed.dtype, viewed.shape, memoryview(ranks).shape) == (dtype, shape, shape)
    assert viewed.tolist() == ranks.tolist() == memoryview(ranks).tolist()
    tensor = torch.frombuffer(ranks, dtype=getattr(torch, dtype))
    assert tensor.numel() == math.prod(shape)
    assert tensor.data_ptr() == viewed.ctypes.data
    viewed += 100
    assert tensor.view(shape).tolist() == ranks.tolist() == viewed.tolist()


def test_a_tensor_keeps_the_memory_it_views():
    tensor = torch.frombuffer(RankMap.identity(1000).ranks(), dtype=torch.int32)
    gc.collect()
    RankMap.from_ranks(range(3, 1003)).ranks()  # would take the place of freed memory
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.int32))
