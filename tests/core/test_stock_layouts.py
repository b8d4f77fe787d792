"""The algebra against torch's own, wherever torch's own is right."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
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
    assert ours.positions().tolist() == theirs.all_ranks_from_zero()
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


# Most pairs of layouts do not compose, or stock composes them wrongly: hence the filtering.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.one_of(oracle.digits(), oracle.any_modes), oracle.some_axes(3))
def test_composition_equals_stock_wherever_stock_is_right(outer_modes, inner_axes):
    outer = AxisLayout(*outer_modes)
    inner = Layout([AxisLayout(*modes) for modes in inner_axes])
    assume(inner.cosize <= outer.size)
    assert _composes_as_stock(outer, inner) is not False


@given(oracle.digits(), st.data())
def test_an_axis_unflattens_as_in_stock(outer_modes, data):
    outer, sizes = AxisLayout(*outer_modes), outer_modes[0]
    is_contiguous = len(outer.sizes) < 2
    inner = Layout.from_shape(data.draw(st.permutations(sizes)) if is_contiguous else sizes)
    assert _composes_as_stock(outer, inner) is True


def _composes_as_stock(outer: AxisLayout, inner: Layout) -> bool | None:
    """Whether a composition equals stock's; None where stock refuses it or is wrong."""
    expected = [outer(position) for position in inner.collapse().positions().tolist()]
    axes = [stock._FlatLayout(axis.sizes, axis.strides) for axis in inner]
    try:
        theirs = stock._FlatLayout(outer.sizes, outer.strides).composition(stock._MeshLayout(axes))
    except AssertionError:
        return None
    if len(theirs) != len(axes) or theirs.collapse().all_ranks_from_zero() != expected:
        return None
    return all(map(same, outer.compose(inner), theirs))


@given(oracle.tilings())
def test_a_mesh_edits_as_stock_does(tiling):
    sizes, strides, _ = tiling
    ours = Layout.from_shape(sizes, strides)
    theirs = stock._MeshLayout.from_sizes_strides(tuple(sizes), tuple(strides))
    assert ours.shape == theirs.top_level_sizes
    assert (ours.size, ours.cosize) == (theirs.numel(), theirs.cosize())
    assert same(ours.collapse(), theirs.collapse())
    half = len(sizes) // 2
    ours, theirs = ours.splice(half, len(sizes), ours), theirs.splice(half, len(sizes), theirs)
    assert all(map(same, ours, theirs))
