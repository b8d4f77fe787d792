"""The laws of the layout algebra, against enumeration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import oracle
from meshverse._core import AxisLayout, Layout


@given(oracle.any_modes)
def test_coalescing_keeps_the_map(modes):
    sizes, strides = modes
    layout, expected = AxisLayout(sizes, strides), oracle.positions(sizes, strides)
    assert oracle.positions_of(layout) == expected
    assert oracle.positions(layout.sizes, layout.strides) == expected
    assert layout.size == len(expected)


@given(oracle.any_modes, oracle.any_modes)
def test_equal_maps_are_equal_objects(a, b):
    one, other = AxisLayout(*a), AxisLayout(*b)
    same = oracle.positions(*a) == oracle.positions(*b)
    assert (one == other) == same
    assert (repr(one) == repr(other)) == same
    assert not same or hash(one) == hash(other)


@given(oracle.digits(), st.data())
def test_splitting_a_mode_changes_nothing(modes, data):
    sizes, strides = modes
    place = data.draw(st.integers(0, len(sizes) - 1))
    inner = data.draw(st.sampled_from([d for d in range(1, 6) if sizes[place] % d == 0]))
    split_sizes = [*sizes[:place], sizes[place] // inner, inner, *sizes[place + 1 :]]
    split_strides = [*strides[:place], strides[place] * inner, *strides[place:]]
    assert AxisLayout(split_sizes, split_strides) == AxisLayout(sizes, strides)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_unflattening_replaces_an_axis_by_row_major_ones(sizes, data):
    outer = data.draw(st.lists(st.integers(1, 4), max_size=2))
    index = data.draw(st.integers(0, len(outer)))
    layout = Layout.from_shape((*outer[:index], math.prod(sizes), *outer[index:]))
    split = layout.unflatten(index, sizes)
    assert split == layout.unflatten(index - len(layout), sizes)
    assert split.shape == (*outer[:index], *sizes, *outer[index:])
    assert split.collapse() == layout.collapse()
    with pytest.raises(ValueError, match="indices are not"):
        layout.unflatten(index, [*sizes, 2])
    with pytest.raises(IndexError):
        layout.unflatten(len(layout), sizes)


@given(oracle.any_modes, st.data())
def test_an_axis_of_any_strides_unflattens_by_index(modes, data):
    whole = AxisLayout(*modes)
    sizes = data.draw(oracle.factors(whole.size))
    layout = Layout([AxisLayout(2, 7), whole])
    try:
        split = layout.unflatten(1, sizes)
    except ValueError:
        assert not oracle.divide_evenly(whole.sizes, sizes)
        return
    assert split[0] == layout[0]
    assert split.shape == (2, *sizes)
    assert oracle.positions_of(split.collapse()) == oracle.positions_of(layout.collapse())


def test_an_axis_is_not_split_inside_a_mode_that_does_not_divide():
    # 6 indices in steps of 1, 1, 10, 1, 1: the pairs (0, 1), (2, 12), (13, 14) are no axis.
    with pytest.raises(ValueError, match=r"compose \(2,3\):\(12,1\) with .*across digits"):
        Layout([AxisLayout((2, 3), (12, 1))]).unflatten(0, (3, 2))


@given(oracle.any_modes, st.integers(1, 60))
def test_complement_tiles_or_raises(modes, n):
    layout, offsets = AxisLayout(*modes), oracle.tile(oracle.positions(*modes), n)
    if offsets is None:
        with pytest.raises(ValueError, match=rf"complement of .* in {n} positions: "):
            layout.complement(n)
    else:
        assert oracle.positions_of(layout.complement(n)) == offsets


@given(oracle.tilings())
def test_complement_of_digits_is_the_other_digits(tiling):
    sizes, strides, n = tiling
    layout = AxisLayout(sizes, strides)
    complement = layout.complement(n)
    offsets = oracle.positions_of(complement)
    covered = [offset + p for offset in offsets for p in oracle.positions_of(layout)]
    assert sorted(covered) == list(range(n))
    assert complement.is_sorted()


@pytest.mark.parametrize(
    ("layout", "n", "rule"),
    [
        (AxisLayout(3, 2), 8, "not a positive multiple of 6, the span of the layout"),
        (AxisLayout((2, 2), (3, 2)), 12, "stride 3 is not a positive multiple of 4"),
        (AxisLayout(2, 0), 4, "stride 0 is not a positive multiple of 1"),
        (AxisLayout(()), 0, "not a positive multiple of 1"),
    ],
)
def test_complement_says_what_does_not_tile(layout, n, rule):
    with pytest.raises(ValueError, match=rule):
        layout.complement(n)


@given(oracle.any_modes)
def test_orthogonal_layouts_do_not_overlap(modes):
    layout, expected = AxisLayout(*modes), oracle.positions(*modes)
    if layout.is_orthogonal():
        assert len(set(expected)) == len(expected)


@given(oracle.digits())
def test_digits_are_orthogonal_and_sorting_restores_them(modes):
    layout = AxisLayout(*modes)
    assert layout.is_orthogonal()
    assert layout.sorted() == AxisLayout(layout.size)
    assert layout.is_sorted() == (layout == layout.sorted())


@given(oracle.any_modes)
def test_sorting_gives_the_same_positions_in_order(modes):
    layout, expected = AxisLayout(*modes), sorted(oracle.positions(*modes))
    try:
        in_order = layout.sorted()
    except ValueError:
        assert not layout.is_orthogonal()
    else:
        assert oracle.positions_of(in_order) == expected
        assert in_order.is_sorted()


@pytest.mark.parametrize("modes", [((4,), (0,)), ((2, 4), (1, 0)), ((2, 2), (0, 1))])
def test_a_broadcast_mode_is_never_orthogonal(modes):
    assert not AxisLayout(*modes).is_orthogonal()


@given(oracle.some_axes(3), oracle.some_axes(2), st.data())
def test_layouts_edit_like_tuples_of_axes(axes, inserted, data):
    axes = tuple(AxisLayout(*modes) for modes in axes)
    inserted = tuple(AxisLayout(*modes) for modes in inserted)
    layout, other = Layout(axes), Layout(inserted)
    assert layout.concatenate(other).axes == axes + inserted
    assert layout.axes == tuple(layout) == axes
    assert len(layout) == len(axes)
    assert layout.shape == tuple(axis.size for axis in axes)
    assert layout.size == math.prod(layout.shape)
    assert layout.cosize == max(oracle.positions_of(layout.collapse())) + 1
    if axes:
        picked = data.draw(st.lists(st.integers(-len(axes), len(axes) - 1), max_size=4))
        assert layout.select(picked).axes == tuple(axes[i] for i in picked)
        assert [layout[i] for i in picked] == [axes[i] for i in picked]


@given(oracle.some_axes(3))
def test_collapsing_enumerates_the_last_axis_fastest(axes):
    layout = Layout([AxisLayout(*modes) for modes in axes])
    sizes = [size for modes in axes for size in modes[0]]
    strides = [stride for modes in axes for stride in modes[1]]
    assert oracle.positions_of(layout.collapse()) == oracle.positions(sizes, strides)
    assert layout.is_orthogonal() == layout.collapse().is_orthogonal()
    assert layout.is_sorted() == layout.collapse().is_sorted()


@given(oracle.tilings(), st.data())
def test_coordinate_and_base_find_a_position_again(tiling, data):
    sizes, strides, n = tiling
    layout = Layout.from_shape(sizes, strides)
    indices = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    base = data.draw(st.sampled_from(oracle.positions_of(layout.collapse().complement(n))))
    base += n * data.draw(st.integers(0, 3))
    position = base + sum(i * stride for i, stride in zip(indices, strides, strict=True))
    assert layout.coordinate(position) == indices
    assert layout.base(position) == base


def test_coordinate_needs_axes_that_do_not_overlap():
    overlapping = Layout.from_shape((2, 4), (2, 1))
    with pytest.raises(ValueError, match=r"position 3 in layout \(2:2, 4:1\).*overlap"):
        overlapping.coordinate(3)
    with pytest.raises(IndexError, match=r"position -1 in layout .*positions start at 0"):
        Layout.from_shape((2, 4)).base(-1)


def test_ascending_axes_hold_the_same_positions():
    axes = Layout([AxisLayout(2, 4), AxisLayout((2, 2), (1, 2)), AxisLayout(3, 0)])
    assert axes.ascending == (axes[0], AxisLayout(4), axes[2])


@given(oracle.any_modes, st.data())
def test_a_slice_is_a_selection_that_is_sorted_and_orthogonal(modes, data):
    layout = Layout.from_shape(*modes)
    any_index = st.integers(-len(layout), len(layout) - 1)
    indices = data.draw(st.lists(any_index, max_size=4) if len(layout) else st.just([]))
    part = layout.select(indices)
    fits = part.is_sorted() and part.is_orthogonal()
    assert layout.slice(indices) == (part if fits else None)
