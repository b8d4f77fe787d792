"""Layouts as Python values: construction, text, pickling, and errors that say the cure."""

from __future__ import annotations

import copy
import importlib.util
import io
import operator
import pickle
import sys
import weakref

import numpy
import pytest
import torch

from meshverse import _core
from meshverse._core import AxisLayout, Layout, OptionsKey, RankMap

INT64_MAX = 2**63 - 1


def test_sizes_come_as_any_integers():
    expected = AxisLayout((2, 3), (3, 1))
    assert expected == AxisLayout(6) == AxisLayout([6]) == AxisLayout(torch.Size((2, 3)))
    assert expected == AxisLayout(numpy.array([2, 3])) == AxisLayout((numpy.int32(6),), (1,))
    assert AxisLayout(4, 2) == AxisLayout((4,), (2,))
    assert AxisLayout(()) == AxisLayout(1) == AxisLayout((1, 1), (7, 0))


@pytest.mark.parametrize(
    ("layout", "text", "representation"),
    [
        (AxisLayout((2, 4), (8, 1)), "(2,4):(8,1)", "AxisLayout((2, 4):(8, 1))"),
        (AxisLayout(4), "4:1", "AxisLayout((4,):(1,))"),
        (AxisLayout(()), "1:0", "AxisLayout(():())"),
        (Layout.from_shape((2, 4)), "(2:4, 4:1)", "Layout(2:4, 4:1)"),
        (Layout([AxisLayout((2, 4), (8, 1))]), "((2,4):(8,1))", "Layout((2,4):(8,1))"),
        (Layout([]), "()", "Layout()"),
    ],
)
def test_text(layout, text, representation):
    assert (str(layout), repr(layout)) == (text, representation)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: AxisLayout((2, 3), (1,)), ValueError, r"\(2,3\) and strides \(1\).*one stride"),
        (lambda: AxisLayout((2, 0)), ValueError, "size 0 and stride 1: sizes must be at least 1"),
        (lambda: AxisLayout(2, -1), ValueError, "size 2 and stride -1.*strides at least 0"),
        (lambda: AxisLayout(2.5), TypeError, "sizes must be a sequence of integers, got 2.5 of"),
        (lambda: AxisLayout((2, "a")), TypeError, "sizes must be integers, got 'a' of type str"),
        (lambda: AxisLayout(2, (1.0,)), TypeError, "strides must be integers, got 1.0"),
        (lambda: AxisLayout(2**64), OverflowError, "sizes with 18446744073709551616"),
        (lambda: AxisLayout((2**40, 2**40)), OverflowError, "1099511627776 . 1099511627776"),
        (lambda: AxisLayout(3, INT64_MAX), OverflowError, "a layout's position needs 2 . 9223"),
        (lambda: Layout([4]), TypeError, "axis 4: every axis must be an AxisLayout"),
        (lambda: Layout.from_shape((2,), ()), ValueError, "sizes .2. and strides ..: every size"),
        (lambda: Layout([AxisLayout(2**40)] * 2), OverflowError, "a mesh's size"),
        (lambda: AxisLayout(4)(4), IndexError, "index 4 of layout 4:1: indices run from 0 to 3"),
        (lambda: AxisLayout(4)(-1), IndexError, "index -1 of layout"),
        (lambda: AxisLayout(4, 0).sorted(), ValueError, "sort 4:0: stride 0 does not step over"),
        (lambda: Layout.from_shape((2, 3))[2], IndexError, "axis 2 of layout .* it has 2 axes"),
        (lambda: Layout.from_shape((2, 3)).select((0, -3)), IndexError, "axis -3 of layout"),
        (lambda: Layout([]).select(0), TypeError, "indices must be a sequence of integers, got 0"),
        (lambda: AxisLayout(2, sizes=3), TypeError, "sizes"),
        (lambda: Layout(4), TypeError, "'int' object is not iterable"),
        (lambda: AxisLayout(4)("a"), TypeError, "indices must be integers, got 'a' of type str"),
        (lambda: AxisLayout(4).complement(2**64), OverflowError, "arguments with 18446744073709"),
        (
            lambda: AxisLayout(4).complement(),
            TypeError,
            "AxisLayout: 0 arguments given to a method that has 1",
        ),
        (lambda: Layout([])[1:], TypeError, "indices must be integers, got slice"),
        (
            lambda: Layout([]).concatenate(AxisLayout(4)),
            TypeError,
            r"AxisLayout\(\(4,\):\(1,\)\) of type .*, where a meshverse._core.Layout has to be",
        ),
    ],
)
def test_errors_say_what_was_asked_and_the_rule(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_widest_layouts_are_exact():
    widest = AxisLayout((2, 2**61), (2**61, 1))
    assert widest == AxisLayout(2**62)
    assert widest(2**62 - 1) == 2**62 - 1
    assert AxisLayout(2**31, 2**31).complement(2**62) == AxisLayout(2**31)
    assert AxisLayout(2, INT64_MAX - 1).is_orthogonal()


def test_values_compare_only_with_their_own_kind():
    layout = AxisLayout(4)
    assert layout != (4,)
    assert Layout([layout]) != layout
    assert len({AxisLayout(4), AxisLayout((2, 2)), Layout([layout]), Layout([layout])}) == 2
    with pytest.raises(AttributeError):
        layout.size = 3


def test_values_have_no_order_and_no_subclasses():
    with pytest.raises(TypeError, match="'<' not supported"):
        sorted([AxisLayout(4), AxisLayout(2)])
    for kind in (AxisLayout, Layout, OptionsKey):
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Derived", (kind,), {})


def test_a_layout_is_a_sequence_of_its_axes():
    layout = Layout.from_shape((2, 3))
    axes = list(layout)
    assert axes == [AxisLayout(2, 3), AxisLayout(3, 1)]
    assert list(reversed(layout)) == axes[::-1]
    assert (layout[-1], layout[numpy.int64(0)], len(layout)) == (axes[1], axes[0], 2)
    assert axes[0] in layout
    assert AxisLayout(7) not in layout
    assert numpy.array(layout, dtype=object).shape == (2,)
    assert operator.indexOf(layout, axes[1]) == 1
    with pytest.raises(IndexError):
        layout[-3]


def test_nobody_changes_the_types():
    for kind in (AxisLayout, Layout, OptionsKey):
        with pytest.raises(TypeError, match="immutable type"):
            kind.size = 3


def test_a_module_that_is_loaded_once_more_shares_the_types():
    # pybind11 refuses its own classes; what was there before must work on.
    spec = importlib.util.spec_from_file_location("again._core", _core.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="already registered"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    layout = Layout([AxisLayout(2)])
    assert type(layout) is Layout
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_values_come_and_go_without_a_trace():
    def use() -> None:
        layout = Layout.from_shape((2, 3, 4))
        key = OptionsKey.of("gloo").with_tag("x")
        watched = weakref.ref(layout.slice((0, 2)))
        assert watched() is None
        same = pickle.loads(pickle.dumps(layout)), copy.deepcopy(key)
        assert same == (layout, key)
        assert hash(same) == hash((layout, key))
        assert layout.unflatten(2, (2, 2)).coordinate(5) == (0, 1, 0, 1)
        assert [axis(1) for axis in layout] == [12, 4, 1]
        with pytest.raises(ValueError, match="indices are not"):
            layout.unflatten(0, (3,))

    use()
    types = AxisLayout, Layout, OptionsKey
    before = [sys.getrefcount(kind) for kind in types]  # every object holds its type
    for _ in range(10):
        use()
    assert [sys.getrefcount(kind) for kind in types] == before


VALUES = [
    AxisLayout((2, 4), (8, 1)),
    AxisLayout(()),
    Layout([AxisLayout((2, 4), (8, 1)), AxisLayout(2, 4)]),
    RankMap.identity(100_000),
    RankMap.from_ranks((7, 3, 5)),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(value, protocol):
    pickled = pickle.dumps(value, protocol)
    assert pickle.loads(pickled) == value
    assert len(pickled) < 200


def test_torch_loads_values_without_arbitrary_code():
    file = io.BytesIO()
    torch.save(VALUES, file)
    file.seek(0)
    with torch.serialization.safe_globals([AxisLayout, Layout, RankMap]):
        assert torch.load(file, weights_only=True) == VALUES
