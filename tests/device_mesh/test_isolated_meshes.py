"""An isolation tag is part of what a mesh is: of its equality, its relatives and its pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from helpers.observation import STOCK
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse.options.isolation_tags import merge_tags, own_tag, tag_inside

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "cp", "tp")


def _mesh(**extra) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES, **extra)


@pytest.fixture
def mesh() -> DeviceMesh:
    return _mesh()


def _tags(mesh: DeviceMesh) -> list[str]:
    """Tags of the groups that a mesh is on, by its axes."""
    tags = {group.name: group.tag for group in mesh.universe.explain().groups}
    return [tags[mesh.get_group(axis).group_name] for axis in range(mesh.ndim)]


# --- equality ------------------------------------------------------------------------------------


def test_meshes_under_different_tags_are_unequal(mesh) -> None:
    with isolate("x"):
        own, again = mesh["tp"], mesh["tp"]
    with isolate("y"):
        other = mesh["tp"]
    meshes = [mesh["tp"], own, other]
    assert again is own
    for one in meshes:
        assert [one == each for each in meshes] == [one is each for each in meshes]
        assert [one != each for each in meshes] == [one is not each for each in meshes]
    for digest in (hash, DeviceMesh._stable_hash, lambda mesh: mesh._compile_guard):
        assert len({digest(one) for one in meshes}) == 3


def test_the_same_tag_is_equality_between_universes(mesh) -> None:
    meshes = [_mesh(isolate="x") for _ in range(2)]
    assert meshes[0] == meshes[1]
    assert hash(meshes[0]) == hash(meshes[1])
    assert meshes[0] != mesh


def test_an_isolated_mesh_equals_no_mesh_of_torch(mesh) -> None:
    stock = STOCK.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES)
    assert mesh == stock
    for own in (_mesh(isolate="x"), _mesh(isolate={"dp": "x"})):
        assert own != stock
        assert stock != own
        assert hash(own) != hash(stock)
        assert own._layout != stock._layout


def test_which_axis_has_the_tag_counts() -> None:
    meshes = [_mesh(isolate={axis: "x"}) for axis in _AXES]
    assert len({*meshes, *(mesh._layout for mesh in meshes)}) == 6


# --- what derives from an isolated mesh ----------------------------------------------------------

_DERIVED: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "slice": lambda mesh: mesh["tp"],
    "slice of a slice": lambda mesh: mesh["dp", "tp"]["dp"],
    "flatten": lambda mesh: mesh["dp", "cp"].flatten(),
    "flatten by torch's name": lambda mesh: mesh["dp", "cp"]._flatten("other"),
    "flatten all": lambda mesh: mesh.flatten("all"),
    "flatten one axis": lambda mesh: mesh["tp"].flatten("alias"),
    "unflatten": lambda mesh: mesh.unflatten("tp", (1, 2), ("one", "two")),
    "unflatten a flattened one": lambda mesh: mesh.flatten("all").unflatten(0, (4, 2), ("a", "b")),
    "concatenate": lambda mesh: DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]),
    "pickled": lambda mesh: pickle.loads(pickle.dumps(mesh["cp", "tp"])),
    "its root": lambda mesh: mesh["tp"]._get_root_mesh(),
}


@pytest.mark.parametrize("by", ["a block", "an argument"])
@pytest.mark.parametrize("derive", _DERIVED)
def test_what_derives_from_an_isolated_mesh_is_isolated(mesh, derive: str, by: str) -> None:
    shared = _DERIVED[derive](mesh)  # all of it is there without the tag, too
    if by == "a block":
        with isolate("x"):
            own = mesh[_AXES]
    else:
        own = _mesh(universe=mesh.universe, isolate="x")
    derived = _DERIVED[derive](own)
    assert _tags(derived) == ["x"] * derived.ndim
    assert derived.description.tags == ("x",) * derived.ndim
    assert derived.description.with_tags(("",) * derived.ndim) == shared.description
    assert derived != shared
    assert _DERIVED[derive](mesh) == shared
    assert _tags(shared) == [""] * shared.ndim


def test_isolate_of_a_root_holds_for_all_that_is_derived() -> None:
    own = _mesh(isolate="x")
    for derive in _DERIVED.values():
        derive(own)
    assert {group.tag for group in own.universe.explain().groups} == {"x"}
    assert own["tp"]._get_root_mesh() is own


def test_derived_axes_may_have_tags_inside_that_of_the_axis() -> None:
    own = _mesh(isolate={"tp": "x"})
    assert _tags(own.unflatten("tp", (1, 2), ("a", "b"), isolate={"b": "y"})) == [
        *("", "", "x", "x/y")
    ]
    assert _tags(own["tp"].flatten("alias", isolate="y")) == ["x/y"]
    with isolate("z"):
        assert _tags(own.unflatten("tp", (2,), ("c",), isolate="y")) == ["z", "z", "z/x/y"]
    # What is of the tag already keeps it.
    assert _tags(own.unflatten("tp", (2,), ("d",), isolate="x"))[-1] == "x"


def test_axes_of_several_tags_flatten_to_one_of_them_all(mesh) -> None:
    own = _mesh(universe=mesh.universe, isolate={"dp": "x", "tp": "y"})
    flat = own["dp", "tp"].flatten("f")
    assert _tags(flat) == ["x; and y"]
    assert flat.unflatten(0, (2, 2), ("dp", "tp")).description.tags == ("x; and y",) * 2
    # An axis without a tag adds none; the order of the axes does not matter.
    assert _tags(own["dp", "cp"].flatten("g")) == ["x"]
    assert _tags(own["cp", "tp"].flatten("h")) == ["y"]
    backwards = DeviceMesh.concatenate([own["tp"], own["dp"]])
    with groups_created(0):
        assert backwards.flatten("f2").get_group() is flat.get_group()
    with isolate("x"):  # "x" is of the block already
        assert _tags(flat["f"]) == ["x; and x/y"]


def test_tags_of_tags() -> None:
    assert tag_inside("a", "a/b; and b") == "a/b"
    assert tag_inside("a", "b; and c") == "a/b; and a/c"
    assert own_tag("a; and b/c", "", "c") == "a/c; and b/c"
    assert merge_tags(["", "b; and a", "b"]) == "a; and b"


# --- flattened meshes are found by tag -----------------------------------------------------------


def test_a_name_that_is_known_without_the_tag_is_not_given(mesh) -> None:
    shared = mesh["dp", "tp"].flatten("all")
    with isolate("x"):
        own, again = mesh["dp", "tp"].flatten("all"), mesh["dp", "tp"]._flatten("all")
    assert again is own is not shared
    assert own.get_group() is not shared.get_group()
    assert mesh["dp", "tp"].flatten("all", isolate="x") is own
    assert mesh["dp", "tp"].flatten("all") is shared


def test_flattening_an_axis_to_its_own_name_in_a_block_is_isolated_too(mesh) -> None:
    axis = mesh["tp"]
    assert axis.flatten("tp") is axis
    with isolate("x"):
        own = axis.flatten("tp")
        assert own is mesh["tp"]
    assert axis.flatten("tp", isolate="x") is own
    assert _tags(own) == ["x"]


def test_groups_of_flattened_axes_are_found_by_tag(mesh) -> None:
    shared = mesh["dp", "tp"].flatten("all")
    with isolate("x"):
        own = mesh[_AXES]
        with pytest.raises(KeyError, match="all"):
            own.get_group("all")
        flat = mesh["dp", "tp"].flatten("all")
    for each in (own, own["dp"], flat):
        assert each.get_group("all") is flat.get_group()
    for each in (mesh, mesh["dp"], shared):
        assert each.get_group("all") is shared.get_group()
    assert list(mesh.universe.flattened) == ["all"]


def test_a_mesh_of_several_tags_finds_what_is_under_them(mesh) -> None:
    mixed = _mesh(universe=mesh.universe, isolate={"dp": "x"})
    mesh["dp", "cp"].flatten("wrong")
    flat, shared = mixed["dp", "cp"].flatten("one"), mixed["cp", "tp"].flatten("two")
    assert _tags(flat) + _tags(shared) == ["x", ""]
    assert mixed.get_group("one") is flat.get_group()
    assert mixed.get_group("two") is shared.get_group()
    assert mesh.get_group("two") is shared.get_group()
    with pytest.raises(KeyError):
        mesh.get_group("one")
    # The name of what it flattened itself, where there is another under one of its tags.
    first, own = mesh["dp", "cp"].flatten("f"), mixed["dp", "cp"].flatten("f")
    assert mixed.get_group("f") is own.get_group() is not first.get_group()


@pytest.mark.parametrize("isolated", [None, "x", {"dp": "x"}, {"dp": "x", "cp": "y"}])
def test_a_view_of_tagged_axes_knows_its_own_flattened_ones(isolated) -> None:
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    view = world.unflatten(0, (2, 2, 2), _AXES, isolate=isolated)
    for names in (("dp", "cp"), ("cp", "tp"), ("dp", "tp")):
        flat = view[names].flatten()
        assert view.get_group("_".join(names)) is flat.get_group()


# --- roots ---------------------------------------------------------------------------------------


def test_a_root_of_a_tag_is_the_first_mesh_under_it(mesh) -> None:
    with isolate("x"), groups_created(1):
        own = mesh["tp"]
        root = own._get_root_mesh()
        assert len(root.universe.explain().groups) == 4
    with isolate("x"):
        assert mesh["dp"]._get_root_mesh() is root
        assert mesh[_AXES] == root != mesh
    assert mesh["tp"]._get_root_mesh() is mesh
    assert not root["tp"].has_groups or root["tp"] is own


def test_the_groups_of_a_root_are_made_when_they_are_used(mesh) -> None:
    with isolate("x"):
        root = mesh["tp"]._get_root_mesh()
    loaded = pickle.loads(pickle.dumps(mesh["tp"]))
    assert loaded is mesh["tp"]
    with groups_created(0):  # the slice has made it
        assert root.get_group("tp").size() == 2
    with groups_created(1):  # and not those of axes that nobody reads, for which others would wait
        assert root.get_group("dp").size() == 2
    with isolate("x"), groups_created(1):
        assert [root.get_group(axis) for axis in _AXES] == mesh[_AXES].get_all_groups()


def test_what_a_root_says_of_its_groups_before_they_are_made_is_not_kept(mesh) -> None:
    with isolate("x"):
        root = mesh["tp"]._get_root_mesh()
    assert root._key_digests == []  # nor are they made for it
    before = pickle.dumps(root)
    root.get_all_groups()
    with isolate("x"):
        used = mesh[_AXES]
    assert root._key_digests == used._key_digests != []
    assert len(pickle.dumps(root)) > len(before)


def test_the_stable_hash_of_a_root_counts_its_groups_from_the_start(mesh) -> None:
    with isolate("x"):
        root = mesh["tp"]._get_root_mesh()
    digest = root._stable_hash()
    root.get_group("tp")
    assert root._stable_hash() == digest


def test_a_slice_of_a_partly_isolated_root_has_that_root() -> None:
    own = _mesh(isolate={"dp": "x"})
    for names in ("dp", "tp", ("dp", "tp"), ("cp", "tp")):
        assert own[names]._get_root_mesh() is own


def test_a_rank_outside_has_the_same_meshes() -> None:
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), isolate={"tp": "x"})
    assert part.get_coordinate() is None
    with isolate("y"):
        derived = [part["tp"], part["dp"], part.flatten("all")]
    assert [each.description.tags for each in derived] == [("y/x",), ("y",), ("y; and y/x",)]
    assert len({*derived, part["tp"], part["dp"], part.flatten("all")}) == 6


# --- pickles -------------------------------------------------------------------------------------


def _weights_only(mesh: DeviceMesh) -> DeviceMesh:
    buffer = io.BytesIO()
    torch.save(mesh, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("load", [lambda m: pickle.loads(pickle.dumps(m)), _weights_only])
def test_a_pickled_mesh_keeps_its_tags(mesh, load: Callable) -> None:
    with isolate("x"):
        own = mesh["dp", "tp"]
        flat = own.flatten("all")
    mesh["dp", "tp"].flatten("all")
    assert load(own) is own
    assert load(flat) is flat


def test_a_mesh_that_is_bound_is_under_its_tags(mesh) -> None:
    with isolate("x"):
        saved = pickle.dumps([mesh["tp"], mesh["dp", "tp"].flatten("all")])
    dist.destroy_process_group()
    with fake_world(8, 5):
        loaded = pickle.loads(saved)
        new = _mesh()
        assert new["tp"] not in loaded
        loaded[0].bind(new.universe)
        assert [_tags(each) for each in loaded] == [["x"], ["x"]]
        with isolate("x"):
            assert new["tp"] is loaded[0]
        assert new["tp"] is not loaded[0]


def test_binding_in_a_block_is_isolated(mesh) -> None:
    saved = pickle.dumps(mesh["tp"])
    dist.destroy_process_group()
    with fake_world(8, 5):
        loaded = pickle.loads(saved)
        plain = hash(loaded)
        with isolate("x"):
            loaded.bind()
        assert _tags(loaded) == ["x"]
        assert hash(loaded) != plain
        assert loaded != _mesh()["tp"]


def test_all_submeshes_of_an_axis_have_its_tag() -> None:
    own = _mesh(isolate={"tp": "x"})
    submeshes = own._get_all_submeshes("tp")
    assert {mesh.description.tags for mesh in submeshes} == {("x",)}
    assert sum(mesh.has_groups and bool(mesh.group_names) for mesh in submeshes) == 1


def test_layouts_with_tags_pickle(mesh) -> None:
    layout = _mesh(isolate={"dp": "x"})._layout
    loaded = pickle.loads(pickle.dumps(layout))
    assert loaded == layout != mesh._layout
    assert hash(loaded) == hash(layout)
