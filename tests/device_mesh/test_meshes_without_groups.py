"""Meshes that are made without process groups: they answer from their rank alone, as stock's.

torch keeps such meshes for the life of a process, through one default process group after another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshverse
from helpers.observation import OURS, STOCK, Family, attempt
from helpers.sides import side
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh

_AXES = ("dp", "tp")
both = pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])


def _line(family: Family, size: int = 4, rank: int = 2) -> Any:
    return family.DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=rank)


def _answers(mesh: Any) -> dict[str, Any]:
    return {
        "coordinate": mesh.get_coordinate(),
        "is member": mesh._is_current_rank_part_of_mesh(),
        "symbol": attempt(lambda: mesh._sym_get_coordinate(0)),
        "ranks": mesh.mesh.tolist(),
        "group": attempt(mesh.get_group).error,
        "tensor": DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False).shape,
    }


# Another rank, another number of ranks, the same again; each after the one before.
_WORLDS = [(8, 5), (8, 2), (4, 1), (2, 0), (8, 5)]


@both
def test_in_every_world_it_answers_from_its_rank(family: Family) -> None:
    with fake_world(8, 5):
        mesh, outside = _line(family), _line(family, rank=7)
        result = _answers(mesh)
        assert (result["coordinate"], result["is member"]) == ((2,), True)
        assert (outside.get_coordinate(), outside._is_current_rank_part_of_mesh()) == (None, False)
    for size, rank in _WORLDS:
        with fake_world(size, rank):
            assert _answers(mesh) == result
            assert outside.get_coordinate() is None
            assert outside.mesh.tolist() == [0, 1, 2, 3]
            assert mesh == _line(family)
            assert _line(family) == mesh
            assert copy.deepcopy(mesh) == mesh
    assert mesh.get_coordinate() == (2,)


@both
def test_it_equals_the_same_with_groups_in_every_world(family: Family) -> None:
    with fake_world(8, 2):
        bare, other = _line(family), _line(STOCK)
        old = family.DeviceMesh("cpu", torch.arange(4))
        assert bare == old == bare == other == bare
    with fake_world(8, 1):
        new = family.DeviceMesh("cpu", torch.arange(4))
        assert bare == new == bare == other == bare
        assert hash(bare) == hash(new)
        assert (new == old) is (family is STOCK)


def test_without_a_given_rank_it_is_of_its_world_only() -> None:
    def mesh(*, has_groups: bool) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(8), _init_backend=has_groups)

    with fake_world(8, 5):
        ended = mesh(has_groups=True), mesh(has_groups=False)
        tensor = DTensor.from_local(torch.ones(1), ended[1], [Shard(0)], run_check=False)
        assert (tensor + 1).device_mesh is ended[1]
    with fake_world(8, 6):
        for has_groups in (False, True):
            mine = mesh(has_groups=has_groups)
            assert mine not in ended
            tensor = DTensor.from_local(torch.ones(1), mine, [Shard(0)], run_check=False)
            # Not what torch keeps of the ended world.
            assert (tensor + 1).device_mesh.get_coordinate() == (6,)


def test_submeshes_of_a_mesh_with_a_rank_of_its_own() -> None:
    with fake_world(8, 1):
        mesh = DeviceMesh(
            *("cpu", torch.arange(8).view(2, 4)),
            mesh_dim_names=_AXES,
            _rank=6,
            _init_backend=False,
        )
        places = [each.get_coordinate() for each in mesh._get_all_submeshes("tp")]
    assert places == [None, (2,)]


def test_its_slices_answer_from_its_rank_too() -> None:
    with fake_world(8, 5):
        mesh = DeviceMesh(
            "cpu",
            torch.arange(8).view(2, 4),
            mesh_dim_names=_AXES,
            _init_backend=False,
            _rank=3,
        )
    with fake_world(4, 1):
        assert mesh["tp"].get_coordinate() == (3,)
        assert mesh["tp"].mesh.tolist() == [0, 1, 2, 3]
        assert mesh["dp"].mesh.tolist() == [3, 7]


def test_a_mesh_of_this_process_s_rank_is_still_of_its_world_only() -> None:
    with fake_world(8, 5):
        mesh = DeviceMesh("cpu", torch.arange(8), _init_backend=False)
        of_all = meshverse.init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        submeshes = of_all._get_all_submeshes("tp")
        assert mesh.get_coordinate() == (5,)
    with fake_world(8, 2):
        for old in (mesh, of_all, submeshes[1]):
            with pytest.raises(RuntimeError, match="there is another one now"):
                old.get_coordinate()


# --- what torch keeps ----------------------------------------------------------------------------


@pytest.fixture
def kept_by_torch() -> Iterator[None]:
    """torch's own such meshes, which decide how DTensor decomposes operators, made anew."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    strategy = getattr(propagator, "decomp_strategy", None)
    if strategy is None:
        pytest.skip("this torch keeps no such meshes")
    before = dict(strategy._fake_meshes)
    strategy._fake_meshes.clear()
    yield
    strategy._fake_meshes.clear()
    strategy._fake_meshes.update(before)


@pytest.mark.usefixtures("kept_by_torch")
def test_operators_that_torch_decomposes_in_a_second_world() -> None:
    placed = []
    for size, rank in ((8, 5), (4, 1)):
        with side("installed") as family, fake_world(size, rank):
            mesh = family.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
            tensor = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
            halves = torch.nn.functional.glu(tensor)
            placed.append((halves.placements, torch.rot90(tensor).placements))
            assert halves.device_mesh is mesh
    assert placed == [((Shard(0),), (Shard(1),))] * 2


# --- groups that come later ----------------------------------------------------------------------


def test_names_that_torch_adds() -> None:
    with fake_world(8, 5):
        group = dist.new_group([4, 5, 6, 7])
        mesh = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("tp",), _init_backend=False, _rank=5)
        mesh._dim_group_names = [group.group_name]
        assert mesh.get_group() is group
        assert mesh["tp"].get_group("tp") is group
        assert (mesh.get_local_rank(), mesh.get_coordinate()) == (1, (1,))


@pytest.mark.parametrize("rank", [None, 5])
def test_slices_of_a_mesh_to_which_names_were_added(rank: int | None) -> None:
    with fake_world(8, 5):
        ranks = torch.arange(8).view(2, 4)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=_AXES, _init_backend=False, _rank=rank)
        groups = [dist.new_group([1, 5]), dist.new_group([4, 5, 6, 7])]
        mesh._dim_group_names = [group.group_name for group in groups]
        joined = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
        split = mesh._unflatten(1, (2, 2), ("cp", "tp"))
        for derived in (mesh, joined):
            assert derived.get_all_groups() == groups
            assert [derived[name].get_group() for name in _AXES] == groups
            assert [derived[name].get_local_rank() for name in _AXES] == [1, 1]
        assert split["dp"].get_group() is groups[0]
        dist.destroy_process_group(groups[1])
        with pytest.raises(RuntimeError, match="was destroyed"):
            mesh["tp"].get_group()


def test_groups_that_are_adopted() -> None:
    with fake_world(8, 5):
        group = dist.new_group([4, 5, 6, 7])
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        assert mesh.get_group() is group
        assert mesh.universe.explain().to_dict()["groups"][0]["how"] == "given by the user"
    with fake_world(8, 2), pytest.raises(RuntimeError, match="there is another one now"):
        mesh.get_coordinate()


@pytest.mark.parametrize("later", [False, True], ids=["same world", "later world"])
def test_bound(later: bool) -> None:
    with fake_world(8, 5):
        mesh = DeviceMesh(
            "cpu",
            torch.arange(8).view(2, 4),
            mesh_dim_names=_AXES,
            _init_backend=False,
            _rank=5,
        )
        if not later:
            _bind(mesh)
    if later:
        with fake_world(8, 5):
            _bind(mesh)


def _bind(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"mesh\.bind\(\)"):
        mesh.get_group("tp")
    with groups_created(2):
        mesh.bind()
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [4, 5, 6, 7]
    assert mesh.get_coordinate() == (1, 1)


def test_flattened_in_its_world() -> None:
    with fake_world(8, 5):
        mesh = DeviceMesh(
            "cpu",
            torch.arange(8).view(2, 4),
            mesh_dim_names=_AXES,
            _init_backend=False,
            _rank=5,
        )
        assert mesh._flatten("all").get_group() is dist.group.WORLD
