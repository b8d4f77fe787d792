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
    assert layout.positions().tolist() == expected
    assert [layout(i) for i in range(layout.size)] == expected
    assert oracle.positions(layout.sizes, layout.strides) == expected
    assert (layout.size, layout.cosize) == (len(expected), max(expected) + 1)


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


@given(oracle.any_modes, oracle.any_modes)
def test_composition_applies_one_layout_after_the_other(outer_modes, inner_modes):
    outer, inner = AxisLayout(*outer_modes), AxisLayout(*inner_modes)
    try:
        composed = outer.compose(inner)
    except ValueError:
        return
    assert inner.cosize <= outer.size
    assert [composed(i) for i in range(inner.size)] == [outer(inner(i)) for i in range(inner.size)]


@given(oracle.any_modes, oracle.some_axes(3))
def test_composition_goes_axis_by_axis(outer_modes, inner_axes):
    outer = AxisLayout(*outer_modes)
    inner = Layout([AxisLayout(*modes) for modes in inner_axes])
    try:
        composed = outer.compose(inner)
    except ValueError:
        return
    assert composed.shape == inner.shape
    assert composed.axes == tuple(outer.compose(axis) for axis in inner)
    assert composed.collapse().positions().tolist() == [
        outer(p) for p in inner.collapse().positions().tolist()
    ]


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


@given(oracle.digits(), st.data())
def test_selecting_whole_digits_always_composes(modes, data):
    sizes, strides = modes
    outer = AxisLayout(sizes, strides)
    places = data.draw(st.permutations(range(len(sizes))))
    kept = places[: data.draw(st.integers(0, len(sizes)))]
    inner = AxisLayout([sizes[p] for p in kept], [oracle.row_major(sizes)[p] for p in kept])
    assert outer.compose(inner) == AxisLayout([sizes[p] for p in kept], [strides[p] for p in kept])


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (AxisLayout((2, 5), (8, 1)), AxisLayout(3, 2)),  # ends inside a digit of odd size
        (AxisLayout((4, 6), (16, 1)), AxisLayout((2, 2), (3, 1))),  # two modes share a digit
    ],
)
def test_composition_within_one_digit_needs_no_divisibility(outer, inner):
    assert outer.compose(inner).positions().tolist() == [outer(inner(i)) for i in range(inner.size)]


def test_composition_refuses_a_carry_between_modes():
    outer = AxisLayout((2, 4), (8, 1))
    carrying = AxisLayout((2, 2), (3, 2))  # 3 + 2 is beyond the digit of size 4
    with pytest.raises(ValueError, match=r"compose \(2,4\):\(8,1\) with \(2,2\):\(3,2\).*across"):
        outer.compose(carrying)
    apart = Layout([AxisLayout(2, 3), AxisLayout(2, 2)])
    with pytest.raises(ValueError, match="each inner stride must divide"):
        outer.compose(apart)


def test_composition_refuses_what_is_outside():
    with pytest.raises(ValueError, match=r"reaches index 8, but the outer one has only 8 indices"):
        AxisLayout(8).compose(AxisLayout(3, 4))
    with pytest.raises(ValueError, match=r"with \(2:4, 3:2\).*reaches index 8"):
        AxisLayout(8).compose(Layout([AxisLayout(2, 4), AxisLayout(3, 2)]))


@given(oracle.any_modes, st.integers(1, 60))
def test_complement_tiles_or_raises(modes, n):
    layout, offsets = AxisLayout(*modes), oracle.tile(oracle.positions(*modes), n)
    if offsets is None:
        with pytest.raises(ValueError, match=rf"complement of .* in {n} positions: "):
            layout.complement(n)
    else:
        assert layout.complement(n).positions().tolist() == offsets


@given(oracle.tilings())
def test_complement_of_digits_is_the_other_digits(tiling):
    sizes, strides, n = tiling
    layout = AxisLayout(sizes, strides)
    complement = layout.complement(n)
    covered = [a + b for a in layout.positions().tolist() for b in complement.positions().tolist()]
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
        assert in_order.positions().tolist() == expected
        assert in_order.is_sorted()


@pytest.mark.parametrize("modes", [((4,), (0,)), ((2, 4), (1, 0)), ((2, 2), (0, 1))])
def test_a_broadcast_mode_is_never_orthogonal(modes):
    assert not AxisLayout(*modes).is_orthogonal()


@given(oracle.some_axes(3), oracle.some_axes(2), st.data())
def test_layouts_edit_like_tuples_of_axes(axes, inserted, data):
    axes = tuple(AxisLayout(*modes) for modes in axes)
    inserted = tuple(AxisLayout(*modes) for modes in inserted)
    layout, other = Layout(axes), Layout(inserted)
    start = data.draw(st.integers(0, len(axes)))
    stop = data.draw(st.integers(start, len(axes)))
    assert layout.splice(start, stop, other).axes == axes[:start] + inserted + axes[stop:]
    assert layout.concatenate(other).axes == axes + inserted
    assert layout.axes == tuple(layout) == axes
    assert len(layout) == len(axes)
    assert layout.shape == tuple(axis.size for axis in axes)
    assert layout.size == math.prod(layout.shape)
    assert layout.cosize == max(layout.collapse().positions().tolist()) + 1
    if axes:
        picked = data.draw(st.lists(st.integers(-len(axes), len(axes) - 1), max_size=4))
        assert layout.select(picked).axes == tuple(axes[i] for i in picked)
        assert [layout[i] for i in picked] == [axes[i] for i in picked]


@given(oracle.some_axes(3))
def test_collapsing_enumerates_the_last_axis_fastest(axes):
    layout = Layout([AxisLayout(*modes) for modes in axes])
    sizes = [size for modes in axes for size in modes[0]]
    strides = [stride for modes in axes for stride in modes[1]]
    assert layout.collapse().positions().tolist() == oracle.positions(sizes, strides)
    assert layout.is_orthogonal() == layout.collapse().is_orthogonal()
    assert layout.is_sorted() == layout.collapse().is_sorted()


@given(oracle.tilings(), st.data())
def test_coordinate_and_base_find_a_position_again(tiling, data):
    sizes, strides, n = tiling
    layout = Layout.from_shape(sizes, strides)
    indices = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    base = data.draw(st.sampled_from(layout.collapse().complement(n).positions().tolist()))
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
