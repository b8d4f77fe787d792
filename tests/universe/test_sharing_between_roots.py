"""Root meshes share process groups where they are asked to: by a universe, or process-wide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh

import meshverse
from helpers.worlds import fake_world, group_names, groups_created
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse._torch_compat.backends import HowCreated
from meshverse.world import World

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "tp")


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)


def test_separate_roots_share_nothing() -> None:
    mesh = _mesh()
    with groups_created(2):
        other = _mesh()
    assert other == mesh
    assert other.get_group("tp") is not mesh.get_group("tp")


def test_roots_in_one_universe_share() -> None:
    mesh = _mesh()
    with groups_created(3):  # none for "tp"
        other = init_device_mesh(
            "cpu", (2, 1, 4), mesh_dim_names=("a", "b", "tp"), universe=mesh.universe
        )
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "y"), universe=mesh.universe)[
            "x"
        ].get_group()
    assert other.get_group("tp") is mesh.get_group("tp")


@pytest.mark.usefixtures("shared")
class TestWorldWide:
    def test_roots_share(self) -> None:
        mesh = _mesh()
        with groups_created(0):
            other = _mesh()
        assert other.universe is not mesh.universe
        assert other.get_group("tp") is mesh.get_group("tp")
        hows = [group.how for group in other.universe.explain().groups]
        assert hows == ["shared with another mesh"] * 2  # of the same names
        assert (other.universe.explain().created, other.universe.explain().saved) == (0, 2)

    def test_by_torchs_own_names_too(self) -> None:
        mesh = _mesh()
        with groups_created(0):
            other = stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
        assert isinstance(other, DeviceMesh)
        assert other.get_group("y") is mesh.get_group("tp")
        (dp, tp), (x, y) = (each.universe.explain().groups for each in (mesh, other))
        assert (x.how, y.how) == tuple(
            f"shared with axis '{n}' of another mesh" for n in ("dp", "tp")
        )
        assert dp.how == "created by its members, shared with axis 'x' of another mesh"
        assert tp.how == "created by its members, shared with axis 'y' of another mesh"

    def test_what_counts_is_ranks_not_layouts(self) -> None:
        mesh = _mesh()
        with groups_created(0):
            part = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("part",))
        assert part.get_group() is mesh.get_group("tp")
        with groups_created(1):
            DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("part",))

    def test_options_and_tags_are_distinguished(self) -> None:
        mesh = _mesh()
        with isolate("mine"), groups_created(2):
            own = _mesh()
        assert own.get_group("tp") is not mesh.get_group("tp")
        with groups_created(1):
            init_device_mesh("cpu", (2, 4), backend_override={1: "cpu:fake"})

    def test_a_rank_outside_shares_nothing(self) -> None:
        with groups_created(0):
            for _ in range(2):
                mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("part",))
        assert mesh.get_coordinate() is None

    def test_the_last_user_frees_a_group(self) -> None:
        before = group_names()
        mesh, other = _mesh(), _mesh()
        mesh.universe.destroy()
        assert other.get_group("tp").size() == 4
        assert len(group_names() - before) == 2
        other.universe.destroy()
        assert group_names() == before
        with groups_created(2):
            assert _mesh().get_group("tp").size() == 4

    def test_each_world_begins_anew(self) -> None:
        old = _mesh()
        dist.destroy_process_group()
        with fake_world(8, 5), groups_created(2):
            assert _mesh().get_group("tp").size() == 4
        assert old.has_groups


def test_sharing_ends_with_uninstall() -> None:
    meshverse.install(share="world")
    try:
        mesh = _mesh()
        meshverse.install()  # shares between roots no more
        with groups_created(2):
            assert _mesh().get_group("tp") is not mesh.get_group("tp")
        meshverse.install(share="world")
    finally:
        meshverse.uninstall()
    with groups_created(2):
        _mesh()
    with groups_created(4):  # stock's own: two axes, their groups made one by one
        stock = stock_init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        _mesh()
    assert not isinstance(stock, DeviceMesh)


def test_another_way_of_sharing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"install\(share='job'\): pass 'mesh' or 'world'"):
        meshverse.install(share="job")  # type: ignore[arg-type]
    assert not isinstance(stock_init_device_mesh("cpu", (8,)), DeviceMesh)


def test_a_universe_is_for_its_own_ranks() -> None:
    universe = init_device_mesh("cpu", (4,)).universe
    with groups_created(0), pytest.raises(ValueError, match="cannot be in a universe"):
        DeviceMesh("cpu", torch.arange(8), universe=universe)


@pytest.mark.usefixtures("shared")
class TestWorldWideWithOthers:
    def test_groups_that_all_ranks_make_are_not_shared(self, monkeypatch) -> None:
        # Ranks that are not in the group take part in making it: none of them may sit it out.
        monkeypatch.setattr(
            World, "how_created", lambda self, backend: HowCreated(False, "so says a test", False)
        )
        mesh = _mesh()
        with groups_created(1):
            part = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("part",))
        assert part.get_group() is not mesh.get_group("tp")
        assert "created by all ranks" in part.universe.explain().groups[0].how

    @pytest.mark.parametrize("lazy", [(True, False), (False, True), (True, True)])
    def test_lazy_and_eager_meshes_share(self, lazy: tuple[bool, bool]) -> None:
        with groups_created(2):
            one, other = (
                init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, lazy=each) for each in lazy
            )
            for axis in _AXES:
                assert other.get_group(axis) is one.get_group(axis)
        for mesh in (one, other):
            assert set(mesh.group_names) <= set(mesh._pg_registry)
            assert not any("not created yet" in g.how for g in mesh.universe.explain().groups)
        assert sum(mesh.universe.explain().created for mesh in (one, other)) == 2

    def test_who_makes_a_lazy_group_says_so(self) -> None:
        one, other = (
            init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, lazy=True) for _ in range(2)
        )
        one.universe.destroy()
        other.get_group("tp")
        assert other.universe.explain().created == 1


def test_lazy_and_eager_meshes_can_be_concatenated() -> None:
    eager = _mesh()
    lazy = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, lazy=True)
    joined = DeviceMesh.concatenate([eager["dp"], lazy["tp"]])
    assert joined.get_group("tp") is lazy.get_group("tp")


@pytest.mark.usefixtures("shared")
def test_a_shared_group_that_the_user_destroyed_is_made_anew_once() -> None:
    one, two = _mesh(), _mesh()
    gone = one.get_group("tp")
    assert two.get_group("tp") is gone
    dist.destroy_process_group(gone)
    with groups_created(1):
        again = [init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, universe=one.universe)]
        again.append(_mesh())
    assert again[0].get_group("tp") is again[1].get_group("tp")
    two.universe.destroy()  # which knows the old one only
    with groups_created(0):
        again.append(_mesh())
    assert again[2].get_group("tp") is again[0].get_group("tp")


def test_an_axis_cannot_have_the_name_of_a_flattened_mesh_of_other_ranks() -> None:
    # torch looks names up among the flattened meshes of the first root: get_group("flat") of the
    # second root gave the group of all ranks.
    first = _mesh()
    flattened = first.flatten("flat")
    with (
        groups_created(0),
        pytest.raises(ValueError, match=r"flat already exists .*8:1, but 2:1"),
    ):
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "flat"), universe=first.universe)
    same = init_device_mesh("cpu", (8,), mesh_dim_names=("flat",), universe=first.universe)
    assert same.get_group("flat") is flattened.get_group()


def test_a_flattened_mesh_cannot_have_the_name_of_another_axis_of_a_later_root() -> None:
    first = _mesh()
    later = init_device_mesh("cpu", (4, 2), mesh_dim_names=("x", "flat"), universe=first.universe)
    with (
        groups_created(0),
        pytest.raises(ValueError, match=r"flat already exists .*2:1, but 8:1"),
    ):
        first.flatten("flat")
    assert dist.get_process_group_ranks(later.get_group("flat")) == [4, 5]
    assert first["tp"].flatten("tp") is first["tp"]
