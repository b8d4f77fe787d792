"""A coordinate is of the rank that made the mesh: asked by another one, the mesh says so."""

from __future__ import annotations

import copy
import pickle

import pytest

from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh, isolate

_AXES = ("dp", "tp")


class _Named(DeviceMesh):
    """A mesh of a subclass, which is copied instead of shared."""


def _meshes() -> dict[str, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    with isolate("apart"):
        apart = mesh["dp", "tp"]
    named = _Named("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=_AXES)
    return {
        "a root": mesh,
        "created a second time": init_device_mesh(
            "cpu", (2, 4), mesh_dim_names=_AXES, universe=mesh.universe
        ),
        "a slice": mesh["tp"],
        "a view": mesh.unflatten("tp", (2, 2), ("a", "b")),
        "flattened": mesh.flatten("all"),
        "isolated": apart,
        "an isolated root": apart._get_root_mesh(),
        "of a subclass": named,
        "a copy of it": copy.copy(named),
        "loaded": pickle.loads(pickle.dumps(named)),
        "on the default group": init_device_mesh("cpu", (8,), mesh_dim_names=("world",)),
    }


def test_another_rank_gets_no_coordinate() -> None:
    with fake_world(8, 5):
        meshes = _meshes()
        places = {name: mesh.get_coordinate() for name, mesh in meshes.items()}
    assert places["a view"] == (1, 0, 1)
    assert {name: mesh.get_coordinate() for name, mesh in meshes.items()} == places
    for size, rank in ((8, 4), (16, 5)):
        with fake_world(size, rank):
            for name, mesh in meshes.items():
                for ask in (mesh.get_coordinate, lambda mesh=mesh: mesh._sym_get_coordinate(0)):
                    with pytest.raises(RuntimeError, match="there is another one now"):
                        pytest.fail(f"{name} gave {ask()}")
            with pytest.raises(RuntimeError, match="Create the mesh again"):
                meshes["a root"]["dp"].get_coordinate()


@pytest.mark.parametrize("read_before", [False, True])
def test_another_rank_gets_no_ranks_of_a_part(read_before: bool) -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        parts = [mesh["tp"], mesh.unflatten("tp", (2, 2), ("a", "b"))["a"]]
        if read_before:
            assert [part.mesh.tolist() for part in parts] == [[4, 5, 6, 7], [5, 7]]
    with fake_world(8, 2):
        for part in parts:
            with pytest.raises(RuntimeError, match="Create the mesh again"):
                pytest.fail(f"gave {part.mesh.tolist()}")
        assert mesh.mesh.flatten().tolist() == list(range(8))  # of all ranks, whoever asks
    with fake_world(8, 5):
        assert [part.mesh.tolist() for part in parts] == [[4, 5, 6, 7], [5, 7]]


def test_the_same_rank_of_a_restarted_world_gets_its_coordinate() -> None:
    with fake_world(8, 5):
        meshes = _meshes()
        places = {name: mesh.get_coordinate() for name, mesh in meshes.items()}
    with fake_world(8, 5):
        assert {name: mesh.get_coordinate() for name, mesh in meshes.items()} == places


def test_a_rank_that_is_bound_anew_has_its_new_coordinate() -> None:
    with fake_world(8, 5):
        saved = pickle.dumps(init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES))
    mesh = pickle.loads(saved)
    with fake_world(8, 2):
        mesh.bind()
        assert mesh.get_coordinate() == (0, 2)
    with fake_world(8, 5), pytest.raises(RuntimeError, match="Create the mesh again"):
        mesh.get_coordinate()
