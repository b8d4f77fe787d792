"""The algebra against torch's own, wherever torch's own is right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core import oracle
from meshverse._core import AxisLayout, Layout, RankGroups, RankMap

stock = pytest.importorskip("torch.distributed._mesh_layout")
pytestmark = pytest.mark.skipif(
    not hasattr(stock, "_FlatLayout"),
    reason="before 2.13 torch has no canonical axis layout of its own to compare with",
)


def same(ours, theirs):
    return (ours.sizes, ours.strides) == (theirs.shape, theirs.stride)


@given(oracle.any_modes)
def test_coalescing_equals_stock(modes):
    sizes, strides = modes
    ours, theirs = AxisLayout(*modes), stock._FlatLayout(tuple(sizes), tuple(strides))
    assert same(ours, theirs)
    assert oracle.positions_of(ours) == theirs.all_ranks_from_zero()
    assert ours.is_sorted() == theirs.check_sorted()


@given(oracle.any_modes)
def test_the_check_for_overlap_equals_stock(modes):
    ours = AxisLayout(*modes)
    assume(0 not in ours.strides)  # stock divides by zero
    assert ours.is_orthogonal() == stock._FlatLayout(ours.sizes, ours.strides).check_orthogonal()


@given(
    st.one_of(
        oracle.tilings(),
        st.tuples(oracle.any_modes, st.integers(1, 60)).map(lambda drawn: (*drawn[0], drawn[1])),
    )
)
def test_groups_equal_stock_for_all_that_it_accepts(tiling):
    sizes, strides, n = tiling
    theirs = stock._FlatLayout(tuple(sizes), tuple(strides))
    assume(0 not in theirs.stride and theirs.check_orthogonal())
    ours = AxisLayout(sizes, strides)
    # Stock rounds up where a layout does not fill the world; ours refuses.
    assume(oracle.tile(oracle.positions(sizes, strides), n) is not None)
    assert same(ours.complement(n), theirs.complement(n))
    assert RankGroups(ours, RankMap.identity(n)).all().tolist() == theirs.global_ranks(n)


@given(oracle.digits(), st.data())
def test_an_axis_unflattens_as_in_stock(modes, data):
    ours = Layout([AxisLayout(*modes)])
    is_contiguous = len(ours[0].sizes) < 2
    sizes = data.draw(oracle.factors(ours.size)) if is_contiguous else modes[0]
    assert _unflattens_as_stock(ours, sizes) is True


@given(oracle.any_modes, st.data())
def test_any_axis_unflattens_as_in_stock_wherever_stock_is_right(modes, data):
    ours = Layout([AxisLayout(*modes)])
    assert _unflattens_as_stock(ours, data.draw(oracle.factors(ours.size))) is not False


def _unflattens_as_stock(ours: Layout, sizes: Sequence[int]) -> bool | None:
    """Whether splitting the one axis equals stock's; None where stock refuses it or is wrong."""
    inner = stock._MeshLayout.from_sizes_strides(tuple(sizes), tuple(oracle.row_major(sizes)))
    try:
        theirs = stock._FlatLayout(ours[0].sizes, ours[0].strides).composition(inner)
    except AssertionError:
        return None
    expected = oracle.positions_of(ours.collapse())
    if len(theirs) != len(sizes) or theirs.collapse().all_ranks_from_zero() != expected:
        return None
    return all(map(same, ours.unflatten(0, sizes), theirs))


@given(oracle.tilings())
def test_a_mesh_edits_as_stock_does(tiling):
    sizes, strides, _ = tiling
    ours = Layout.from_shape(sizes, strides)
    theirs = stock._MeshLayout.from_sizes_strides(tuple(sizes), tuple(strides))
    assert ours.shape == theirs.top_level_sizes
    assert (ours.size, ours.cosize) == (theirs.numel(), theirs.cosize())
    assert same(ours.collapse(), theirs.collapse())
    assert all(map(same, ours.concatenate(ours), theirs.splice(len(sizes), len(sizes), theirs)))
