"""Meshes on process groups that the user made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.observation import OURS, STOCK, Family, assert_same
from helpers.worlds import groups_created
from meshverse import DeviceMesh, Universe

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8


@pytest.fixture
def axis_groups() -> list[dist.ProcessGroup]:
    """My groups along the two axes of [[0, 1, 2, 3], [4, 5, 6, 7]]."""
    return [dist.new_group([1, 5]), dist.new_group([4, 5, 6, 7])]


_RANKS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "mesh", [None, [1, 5], torch.tensor([1, 5])], ids=["none", "list", "tensor"]
)
@pytest.mark.parametrize("names", [None, ("dp",)], ids=["nameless", "named"])
def test_one_group(mesh, names, axis_groups) -> None:
    stock, ours = (
        family.DeviceMesh.from_group(axis_groups[0], "cpu", mesh, mesh_dim_names=names)
        for family in (STOCK, OURS)
    )
    assert_same(stock, ours)
    assert ours.get_group() is axis_groups[0]


@pytest.mark.parametrize("mesh", [_RANKS, torch.tensor(_RANKS)], ids=["list", "tensor"])
def test_several_groups(mesh, axis_groups) -> None:
    stock, ours = (
        family.DeviceMesh.from_group(axis_groups, "cpu", mesh, mesh_dim_names=("dp", "tp"))
        for family in (STOCK, OURS)
    )
    assert_same(stock, ours)
    assert ours.get_all_groups() == axis_groups
    assert_same(stock["tp"], ours["tp"])


@pytest.mark.parametrize(
    ("groups", "mesh", "names", "message"),
    [
        ([], None, None, "at least one ProcessGroup"),
        ([0, 1], None, ("dp", "tp"), "Must pass mesh if"),
        ([0, 1], _RANKS, None, "Must pass mesh_dim_names"),
        ([0, 1], [1, 5], ("dp", "tp"), r"ndim equal to number of ProcessGroups.*2 ProcessGroups"),
        (0, [0, 1], None, r"Invalid mesh \[0, 1\] for ProcessGroup with ranks \[1, 5\]"),
    ],
    ids=["no group", "no mesh", "no names", "other axes", "other ranks"],
)
@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
def test_bad_input(family: Family, groups, mesh, names, message, axis_groups) -> None:
    given = axis_groups[groups] if isinstance(groups, int) else [axis_groups[i] for i in groups]
    with groups_created(0), pytest.raises(ValueError, match=message):
        family.DeviceMesh.from_group(given, "cpu", mesh, mesh_dim_names=names)


def test_groups_of_other_ranks_than_the_axes_are_refused(axis_groups) -> None:
    # torch accepts them, and then communicates along other axes than the mesh says.
    swapped = axis_groups[::-1]
    message = r"axis 0 the process group of ranks \[4, 5, 6, 7\], but .* mesh are \[1, 5\]"
    with groups_created(0), pytest.raises(ValueError, match=message):
        DeviceMesh.from_group(swapped, "cpu", _RANKS, mesh_dim_names=("dp", "tp"))
    elsewhere = [[0, 1], [2, 3]]  # without this rank: torch's mesh has the groups too
    mesh = DeviceMesh.from_group(axis_groups, "cpu", elsewhere, mesh_dim_names=("dp", "tp"))
    assert mesh.get_coordinate() is None


def test_groups_of_the_user_are_listed_but_not_shared(axis_groups) -> None:
    with groups_created(0):
        mesh = DeviceMesh.from_group(axis_groups, "cpu", _RANKS, mesh_dim_names=("dp", "tp"))
    assert [group.how for group in mesh.universe.explain().groups] == ["given by the user"] * 2
    with groups_created(1):
        renamed = mesh.unflatten("tp", (4,), ("fsdp",))
    assert renamed.get_group("dp") is axis_groups[0]
    assert renamed.get_group("fsdp") is not axis_groups[1]


def test_the_universe_has_the_mesh_once_with_its_groups(axis_groups) -> None:
    mesh = DeviceMesh.from_group(axis_groups[0], "cpu", mesh_dim_names=("dp",))
    meshes, name = mesh.universe.meshes, axis_groups[0].group_name
    assert [*meshes] == [mesh]
    assert meshes.find((mesh.description, (name,))) is mesh
    assert meshes.find((mesh.description, None)) is None  # that would be one without groups
    assert mesh.universe.root is mesh
    assert repr(mesh.universe) == "Universe(ranks 1, 5, 1 group, 1 mesh)"
    assert repr(Universe(8)) == "Universe(ranks 0 to 7, 0 groups, 0 meshes)"


def test_a_warning_is_shown_at_the_line_that_calls_it(axis_groups) -> None:
    with pytest.warns(UserWarning, match="Did you mean 'cuda'") as warned:
        DeviceMesh.from_group(axis_groups[0], "gpu")
    assert [one.filename for one in warned] == [__file__]
