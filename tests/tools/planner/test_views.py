"""Views are read as they are written; the error about one that does not fit names some that do."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshverse.parallel.meshes.degrees import ParallelismSizes
from meshverse.tools.planner.views import View, as_view, check_fits, nearest, trainer_views


def test_a_view_is_read_as_it_is_written() -> None:
    view = as_view("pp=8, dp=160,cp=1,tp=8,loss=dp*cp", None)
    assert view == View({"pp": 8, "dp": 160, "cp": 1, "tp": 8}, {"loss": ("dp", "cp")})
    assert str(view) == "pp=8,dp=160,cp=1,tp=8,loss=dp*cp"
    assert view.size == 10_240
    layouts = {name: str(axis) for name, axis in view.axis_layouts().items()}
    assert layouts == {"pp": "8:1280", "dp": "160:8", "cp": "1:0", "tp": "8:1", "loss": "160:8"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not an axis: write each as name=size"),
        ("dp", "'dp' in the view 'dp' is not an axis"),
        ("dp=", "is not an axis"),
        ("=8", "is not an axis"),
        ("pp=2 dp=4", 'several axes: write commas between them, such as "pp=2,dp=4"'),
        ("dp=2,,tp=4", "'' in the view"),
        ("dp=0", "dp=0 in the view 'dp=0' is not a size"),
        ("dp=-1", "dp=-1 in the view 'dp=-1' needs the number of ranks"),
        ("dp=2.0", "dp=2.0 in the view 'dp=2.0' is not a size"),
        ("dp=2,dp=4", "has the axis 'dp' twice"),
        ("dp=2,tp=4,dp=dp*tp", "has the axis 'dp' twice"),
        ("all=dp*tp", "has no axis with a size"),
        ("dp=2,all=dp*tp", "no axis 'tp'. The axes are dp"),
        ("dp=2,all=dp*dp", "has one axis twice"),
        ("dp=2,tp=4,all=tp*dp", "write all=dp*tp"),
    ],
)
def test_what_is_no_view_raises(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        as_view(text, None)


@pytest.mark.parametrize(
    ("sizes", "flattened", "said"),
    [
        ({}, {}, "has no axis with a size"),
        ({"a": 0}, {}, "a=0 in the view 'a=0' is not a size"),
        ({"a": True}, {}, "a=True in the view 'a=True' is not a size"),
        ({"a": "2"}, {}, "a=2 in the view 'a=2' is not a size"),
        ({"a": 2, "": 2}, {}, "'' cannot name an axis"),
        ({"a*b": 2}, {}, "'a*b' cannot name an axis"),
        ({" a": 2}, {}, "' a' cannot name an axis"),
        ({"a": 2}, {"b\n": ("a",)}, r"'b\n' cannot name an axis"),
        ({"a": 2}, {"b": ("c",)}, "b=c of the view 'a=2,b=c': there is no axis 'c'"),
        ({"a": 2}, {"b": ()}, "it combines no axes"),
        ({"a": 2}, {"b": ("a", "a")}, "has one axis twice"),
        ({"a": 2, "b": 2}, {"a": ("b",)}, "has the axis 'a' twice"),
        ({"a": 2, "b": 2}, {"c": ("b", "a")}, "write c=a*b"),
    ],
)
def test_what_no_mesh_can_have_is_no_view(sizes, flattened, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        View(sizes, flattened)


@pytest.mark.parametrize("given", [([2, 2],), ({"a": 2}, ["b"]), ({"a": 2}, {"b": "a"})])
def test_a_view_takes_mappings_and_tuples(given) -> None:
    with pytest.raises(TypeError, match="give a"):
        View(*given)


def test_a_view_stays_as_it_was_made() -> None:
    sizes = {"a": 2}
    view = View(sizes)
    sizes["a"] = 0
    assert view.sizes == {"a": 2}


def test_the_error_about_a_view_that_does_not_cover_the_world_names_the_nearest_that_do() -> None:
    with pytest.raises(ValueError, match="has 10,496 ranks, but the world has 10,240") as caught:
        check_fits(as_view("pp=8,replicate=4,shard=41,tp=8", None), 10_240)
    assert str(caught.value).endswith("The nearest sizes that fit: pp=8,replicate=4,shard=40,tp=8.")
    check_fits(as_view("pp=8,replicate=4,shard=40,tp=8", None), 10_240)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1),
    st.integers(1, 5_000),
)
def test_the_nearest_views_cover_the_world(sizes: dict[str, int], world: int) -> None:
    found = nearest(sizes, world)
    assert 1 <= len(found) <= 3
    assert all(math.prod(view.values()) == world and list(view) == list(sizes) for view in found)
    assert len({tuple(view.items()) for view in found}) == len(found)


def test_one_size_is_changed_where_that_suffices() -> None:
    assert nearest({"dp": 3, "tp": 8}, 32)[0] == {"dp": 4, "tp": 8}
    assert nearest({"dp": 3, "tp": 5}, 16)[0] in ({"dp": 4, "tp": 4},)


def test_a_trainers_degrees_become_its_views() -> None:
    sizes = ParallelismSizes(dp_size=160, dp_replicate_size=4, tp_size=8, pp_size=8, ep_size=8)
    dense, experts = trainer_views(sizes, 10_240)
    assert dense.sizes == {"pp": 8, "dp_replicate": 4, "dp_shard": 40, "cp": 1, "tp": 8}
    assert dense.flattened["dp_cp"] == ("dp_replicate", "dp_shard", "cp")
    assert experts.sizes == {"pp": 8, "ep_shard": 160, "ep": 8}
    with pytest.raises(ValueError, match=r"ep_size=7 must .* divides the 2 ranks"):
        trainer_views(ParallelismSizes(dp_size=2, ep_size=7), 2)
