"""Groups of one's own: by a block, by axis, nested, in threads; and shared again under one tag."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.interrupts import is_interrupted_at
from helpers.worlds import groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh, isolate

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "tp")


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)


def _ranks(mesh: DeviceMesh, axis: str) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


_OPERATIONS: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "slice": lambda mesh: mesh["tp"],
    "slice of all axes": lambda mesh: mesh["dp", "tp"],
    "slice by a list": lambda mesh: mesh[["tp"]],
    "flatten": lambda mesh: mesh["tp"].flatten("alias"),
    "unflatten": lambda mesh: mesh.unflatten("tp", (1, 4), ("one", "tp")),
    "concatenate": lambda mesh: DeviceMesh.concatenate([mesh["dp"], mesh["tp"]]),
    "a further mesh": lambda mesh: init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=_AXES, universe=mesh.universe
    ),
}


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_any_operation_in_a_block_gives_groups_of_its_own(mesh, operation: str) -> None:
    make = _OPERATIONS[operation]
    with isolate("mine"):
        own = make(mesh)
        assert make(mesh) is own or operation == "a further mesh"
    axis = own.mesh_dim_names[-1]
    assert own.get_group(axis) is not mesh.get_group("tp")
    shared = {group.name for group in mesh.universe.explain().groups if not group.tag}
    assert shared.isdisjoint(own.group_names)
    assert _ranks(own, axis) == _ranks(mesh, "tp") == [4, 5, 6, 7]
    assert own.universe is mesh.universe
    # Outside of the block everything is as it was.
    assert mesh["tp"].get_group() is mesh.get_group("tp")
    assert mesh["tp"] is mesh["tp"]


def test_all_users_of_a_tag_share(mesh) -> None:
    with isolate("mine"):
        own = mesh["tp"]
    with isolate("mine"), groups_created(1):  # of "dp", which is of the new mesh too
        view = mesh.unflatten("tp", (4,), ("shard",))
        assert DeviceMesh.concatenate([mesh["tp"]]).get_group() is own.get_group()
    assert view.get_group("shard") is own.get_group()
    with isolate("other"), groups_created(1):
        assert mesh["tp"].get_group() is not own.get_group()


def test_even_the_whole_world_gets_a_group_of_its_own() -> None:
    shared = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    assert shared.get_group() is dist.group.WORLD
    own = init_device_mesh("cpu", (8,), mesh_dim_names=("world",), isolate="mine")
    assert own.get_group() is not dist.group.WORLD
    assert own.get_group().size() == 8


def test_nested_blocks_add_up(mesh) -> None:
    with isolate("a"):
        with isolate("b"):
            both = mesh["tp"].get_group()
        outer = mesh["tp"].get_group()
    with isolate("b"):
        inner = mesh["tp"].get_group()
    with isolate("a/b"):
        assert mesh["tp"].get_group() is both
    assert len({group.group_name for group in (both, outer, inner)}) == 3


def test_a_block_ends_where_an_error_leaves_it(mesh) -> None:
    with pytest.raises(KeyError), isolate("mine"):
        mesh["no such axis"]
    assert mesh["tp"].get_group() is mesh.get_group("tp")


def test_wherever_a_block_was_interrupted_no_tag_is_left(mesh) -> None:
    def block() -> None:
        with isolate("a"):
            pass

    place = 1
    while is_interrupted_at(place, block):
        assert mesh["dp"].description.tags == (), place
        place += 1
    assert place > 3


# --- by axis -------------------------------------------------------------------------------------

_FORMS: dict[str, Callable[[Universe], DeviceMesh]] = {
    "by name": lambda u: _mesh_in(u, isolate={"tp": "mine"}),
    "by index": lambda u: _mesh_in(u, isolate={1: "mine"}),
    "by the constructor": lambda u: DeviceMesh(
        "cpu",
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        mesh_dim_names=_AXES,
        universe=u,
        isolate={"tp": "mine"},
    ),
}


def _mesh_in(universe: Universe, **extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, universe=universe, **extra)


@pytest.mark.parametrize("form", _FORMS)
def test_one_axis_may_have_a_tag(mesh, form: str) -> None:
    with groups_created(1):
        own = _FORMS[form](mesh.universe)
    assert own.get_group("tp") is not mesh.get_group("tp")
    assert own.get_group("dp") is mesh.get_group("dp")
    with isolate("mine"):
        assert mesh["tp"].get_group() is own.get_group("tp")


def test_tags_of_axes_are_inside_the_blocks_around(mesh) -> None:
    with isolate("outer"):
        own = _mesh_in(mesh.universe, isolate={"tp": "inner"})
    with isolate("outer/inner"):
        assert mesh["tp"].get_group() is own.get_group("tp")
    with isolate("outer"):
        assert mesh["dp"].get_group() is own.get_group("dp")


def test_one_tag_may_be_for_all_axes_or_for_derived_ones(mesh) -> None:
    own = _mesh_in(mesh.universe, isolate="mine")
    flat = mesh["tp"].flatten("alias", isolate="mine")
    view = mesh.unflatten("tp", (2, 2), ("a", "b"), isolate={"b": "mine"})
    assert flat.get_group() is own.get_group("tp")
    tags = {name: g.tag for g in mesh.universe.explain().groups for name in g.requests}
    assert (tags["a"], tags["b"]) == ("", "mine")
    assert view.get_group("dp") is mesh.get_group("dp")


def test_explain_shows_the_tag(mesh) -> None:
    with isolate("reduce_scatter"):
        mesh["dp"]
    report = mesh.universe.explain()
    assert [group.tag for group in report.groups] == ["", "", "reduce_scatter"]
    *_, row, why_several = str(report).splitlines()
    assert "tag='reduce_scatter'" in row
    assert "tag='reduce_scatter'" in why_several


# --- threads, and what is no tag -----------------------------------------------------------------


def test_a_block_is_in_force_in_its_own_thread(mesh) -> None:
    groups: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def isolated() -> None:
        with isolate("mine"):
            inside.set()
            done.wait(30)
            groups["inside"] = mesh["tp"].get_group().group_name

    thread = threading.Thread(target=isolated)
    thread.start()
    assert inside.wait(30)
    groups["beside"] = mesh["tp"].get_group().group_name
    done.set()
    thread.join(30)
    assert groups["beside"] == mesh.get_group("tp").group_name != groups["inside"]


@pytest.mark.parametrize(
    ("tag", "error", "message"),
    [
        ("", ValueError, "at least one character"),
        ("a; b", ValueError, "no '; '"),
        ("a\nb", ValueError, "printable"),
        (None, TypeError, "is a string"),
        (7, TypeError, "Isolation tag 7"),
    ],
)
def test_what_is_no_tag_is_refused_and_changes_nothing(mesh, tag, error, message: str) -> None:
    before = mesh.universe.explain()
    with pytest.raises(error, match=message), isolate(tag):
        pytest.fail("the block was entered")
    if tag is not None:
        with pytest.raises(error, match=message):
            mesh.unflatten("tp", (2, 2), ("a", "b"), isolate={"a": tag})
    assert mesh.universe.explain() == before


def test_tags_of_axes_that_are_not_there_are_refused(mesh) -> None:
    with pytest.raises(RuntimeError, match=r"invalid keys in isolate: got \['pp'\]"):
        _mesh_in(mesh.universe, isolate={"pp": "mine"})
    with pytest.raises(RuntimeError, match="redundant dim index 1 and name tp in isolate"):
        _mesh_in(mesh.universe, isolate={"tp": "mine", 1: "mine"})
    with pytest.raises(TypeError, match="mapping from axis name or index"):
        _mesh_in(mesh.universe, isolate=["tp"])


def test_keys_that_only_equal_an_axis_are_refused(mesh) -> None:
    with groups_created(0), pytest.raises(RuntimeError, match="invalid keys in isolate"):
        _mesh_in(mesh.universe, isolate={torch.tensor(1): "mine"})


def test_a_tag_may_be_a_member_of_an_enum_of_strings(mesh) -> None:
    class Tag(str, enum.Enum):
        A = "a"

    with isolate("x"):
        plain, member = mesh.flatten("all", isolate="a"), mesh.flatten("all", isolate=Tag.A)
    with isolate("x"), isolate(Tag.A):
        in_block = mesh.flatten("all")
    assert plain is member is in_block


# --- together with other things that keep groups apart -------------------------------------------


def test_the_order_of_ranks_is_kept_in_a_block() -> None:
    universe = Universe([3, 5, 2, 0])
    kept, ascending = (
        DeviceMesh(
            "cpu",
            [3, 5, 2, 0],
            mesh_dim_names=(name,),
            preserve_rank_order=keep,
            universe=universe,
        )
        for name, keep in (("kept", True), ("ascending", False))
    )
    with isolate("mine"):
        groups = [kept["kept"].get_group(), ascending["ascending"].get_group()]
    assert [dist.get_process_group_ranks(group) for group in groups] == [
        [3, 5, 2, 0],
        [0, 2, 3, 5],
    ]


def test_a_group_that_is_of_the_block_already_is_kept() -> None:
    with isolate("x"):
        own = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, isolate={"dp": "rs"})
        with groups_created(0):
            assert own["dp"].get_group() is own.get_group("dp")
            assert own["tp"].get_group() is own.get_group("tp")
    with isolate("y"), groups_created(2):  # "y/x/rs" and "y/x": apart from each other, too
        assert own["dp"].get_group() is not own.get_group("dp")
        own["tp"].get_group()


def test_an_axis_with_options_of_its_own_keeps_them_in_a_block() -> None:
    mesh = init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=_AXES, backend_override={"tp": "cpu:fake"}
    )
    with isolate("mine"):
        mesh["tp"]
    assert [g.backend for g in mesh.universe.explain().groups] == ["fake", "cpu:fake", "cpu:fake"]


def test_a_mesh_on_given_groups_gets_groups_like_any_other() -> None:
    given = DeviceMesh.from_group(dist.new_group([4, 5]), "cpu", mesh_dim_names=("given",))
    with isolate("mine"):
        own = given["given"]
    assert dist.get_process_group_ranks(own.get_group()) == [4, 5]
    assert own.get_group() is not given.get_group()


def test_slices_in_a_block_avoid_nothing(mesh) -> None:
    with isolate("mine"):
        for _ in range(10):
            mesh["dp"]
    report = mesh.universe.explain()
    assert (report.requested, report.created, report.saved) == (3, 3, 0)


def test_axes_behind_one_that_is_split_keep_their_own_tags(world) -> None:
    mesh = init_device_mesh(
        "cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"), isolate={"b": "one", "c": "other"}
    )
    split = mesh.unflatten("a", (1, 2), ("d", "e"))
    assert split.get_group("b") is mesh.get_group("b")
    assert split.get_group("c") is mesh.get_group("c")
    assert split["b"] == mesh["b"] != mesh["c"]
