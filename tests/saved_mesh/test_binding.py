"""Meshes that were loaded without process groups, and how they get some."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import meshverse
from helpers.interrupts import is_interrupted_at
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh


@pytest.fixture
def decoupled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DeviceMesh, "decouple_backend_at_save", True)
    return


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def _copy_of(*meshes: DeviceMesh) -> tuple[DeviceMesh, ...]:
    return pickle.loads(pickle.dumps(meshes))


@pytest.mark.usefixtures("decoupled")
def test_a_decoupled_mesh_is_apart_until_it_is_bound() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        loaded, loaded_tp = _copy_of(mesh, mesh["tp"])
        assert loaded != mesh
        assert mesh != loaded
        assert loaded["tp"] is loaded_tp
        assert hash(loaded) == hash(mesh)
        assert loaded.get_coordinate() == mesh.get_coordinate()
        assert loaded.mesh.equal(mesh.mesh)
        with pytest.raises(RuntimeError, match=r"not initialized! .*dp=2, tp=4.* mesh\.bind\(\)"):
            loaded.get_group("tp")
        with pytest.raises(RuntimeError, match=r"has no process groups: .* Call bind\(\)"):
            loaded.flatten("all")
        with pytest.raises(RuntimeError, match=r"has no process groups: .* Call bind\(\)"):
            loaded.universe.groups_of([range(4), range(4, 8)])

        assert loaded.bind() is loaded
        assert loaded == mesh
        assert loaded_tp == mesh["tp"], "what was loaded with it is bound with it"
        assert loaded.universe is mesh.universe
        assert loaded_tp.get_group() is mesh.get_group("tp")
        assert loaded.flatten("all") is mesh.flatten("all")


@pytest.mark.usefixtures("decoupled")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_binding_was_interrupted_a_second_call_binds() -> None:
    place, is_interrupted, kept = 0, True, []
    while is_interrupted:
        place += 1
        with fake_world(8, 3):
            mesh = _mesh()
            loaded, loaded_tp = _copy_of(mesh, mesh["tp"])
            kept.append(loaded.universe)  # as a cycle of references would, until it is collected
            is_interrupted = is_interrupted_at(place, loaded.bind)
            for each in (loaded, loaded_tp):
                if not each.has_groups:
                    each.bind()
            assert loaded == mesh, place
            assert loaded_tp.get_group() is mesh.get_group("tp"), place
            mesh.universe.destroy()
    assert place > 100


@pytest.mark.usefixtures("decoupled")
def test_a_load_after_a_universe_lost_its_meshes_gives_new_ones() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        (loaded,) = _copy_of(mesh)
        before = loaded.universe  # stays
        loaded.bind()
        again, again_tp = _copy_of(mesh, mesh["tp"])
        assert before.root is again or before.root is None
        assert again.universe is again_tp.universe is not mesh.universe
        assert not again.has_groups
        assert again_tp._root() is again
        assert again != mesh
        again_tp.bind()
        assert again == mesh
        assert again_tp == mesh["tp"]


def test_so_does_a_load_after_the_world_that_its_meshes_went_to() -> None:
    with fake_world(8, 3):
        saved = pickle.dumps(_mesh())
    loaded = pickle.loads(saved)
    before = loaded.universe
    assert pickle.loads(saved) is loaded
    with fake_world(8, 3):
        loaded.bind()
    again = pickle.loads(saved)
    assert before.root is again or before.root is None
    assert again is not loaded
    assert again._root() is again
    assert not again.has_groups


def test_a_universe_with_groups_is_found_after_a_mesh_without_any_left_it() -> None:
    with fake_world(8, 3):
        state = pickle.dumps(_mesh().unflatten("tp", (2, 2), ("a", "b"))["a"])
    with fake_world(8, 3):
        mesh, other = _mesh(), _mesh()
        loaded = pickle.loads(state)
        assert loaded.universe is mesh.universe
        assert not loaded.has_groups
        loaded.bind(other.universe)
        assert pickle.loads(pickle.dumps(mesh)) is mesh


def test_a_failed_bind_leaves_the_universe_to_later_loads() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        states = pickle.dumps(mesh), pickle.dumps(mesh["tp"])
    loaded = pickle.loads(states[0])
    with fake_world(4, 3), pytest.raises(ValueError, match="includes rank 7"):
        loaded.bind()
    loaded_tp = pickle.loads(states[1])
    assert loaded_tp.universe is loaded.universe
    with fake_world(8, 3):
        loaded.bind()
        assert loaded_tp.has_groups


def test_a_new_mesh_of_a_universe_whose_root_was_bound_elsewhere_is_the_root() -> None:
    with fake_world(8, 3):
        bare = DeviceMesh("cpu", list(range(8)), mesh_dim_names=("all",), _init_backend=False)
        left, target = bare.universe, _mesh().universe
        bare.bind(target)
        assert left.root is None
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"), universe=left)
        assert mesh._root() is left.root is mesh
        flat = mesh.flatten("flat")
        assert mesh.get_group("flat") is flat.get_group()
        assert flat._root() is mesh
        assert pickle.loads(pickle.dumps(mesh)) is mesh


@pytest.mark.parametrize("tag", [None, "mine"])
def test_a_mesh_that_could_not_be_bound_can_be(
    monkeypatch: pytest.MonkeyPatch, tag: str | None
) -> None:
    with fake_world(8, 3):
        saved = pickle.dumps(_mesh())
    loaded, calls = pickle.loads(saved), itertools.count()
    made = c10d._new_process_group_helper

    def fail_once(*given: object, **named: object) -> object:
        if next(calls) == 1:
            raise RuntimeError("no more of these")
        return made(*given, **named)

    with fake_world(8, 3), meshverse.isolate(tag) if tag else contextlib.nullcontext():
        with monkeypatch.context() as patch:
            patch.setattr(c10d, "_new_process_group_helper", fail_once)
            with pytest.raises(RuntimeError, match="no more of these"):
                loaded.bind()
        assert not loaded.has_groups
        assert loaded.bind() is loaded
        assert [group.size() for group in loaded.get_all_groups()] == [2, 4]
        assert loaded["tp"].get_group() is loaded.get_group("tp")


@pytest.mark.usefixtures("decoupled")
def test_meshes_saved_one_by_one_are_in_one_universe_again() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        (loaded,), (loaded_tp,) = _copy_of(mesh), _copy_of(mesh["tp"])
        assert loaded.universe is loaded_tp.universe
        assert loaded["tp"] is loaded_tp


def test_without_decoupling_a_loaded_mesh_is_the_live_one() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        assert _copy_of(mesh["tp"]) == (mesh["tp"],)


def test_loaded_between_two_worlds_and_bound_in_the_second() -> None:
    with fake_world(8, 3):
        saved = pickle.dumps(_mesh()["tp"])
    loaded: DeviceMesh = pickle.loads(saved)
    assert loaded.get_coordinate() == (3,)
    with pytest.raises(RuntimeError, match=r"before init_process_group\(\)"):
        loaded.bind()
    with fake_world(8, 5):
        loaded.bind()
        assert dist.get_process_group_ranks(loaded.get_group()) == [4, 5, 6, 7]
        assert loaded.get_coordinate() == (1,), "that of this process's rank now"
        assert loaded.mesh.tolist() == [4, 5, 6, 7]


def test_loaded_before_its_universe_is_made() -> None:
    with fake_world(8, 3):
        saved = pickle.dumps(_mesh()["tp"])
    with fake_world(8, 3):
        loaded: DeviceMesh = pickle.loads(saved)
        with pytest.raises(RuntimeError, match=r"not initialized! .*mesh\.bind\(\)"):
            loaded.get_group()
        loaded.bind()
        assert dist.get_process_group_ranks(loaded.get_group()) == [0, 1, 2, 3]
        root = loaded._get_root_mesh()
        assert root.mesh_dim_names == ("dp", "tp")
        assert root["tp"] is loaded, "its root is bound with it"
        assert root._root_mesh is None, "a root has none above it"


def test_bind_refuses_what_it_is_not_for() -> None:
    with fake_world(8, 3):
        mesh = _mesh()
        with pytest.raises(RuntimeError, match=r"already; bind\(\) is for meshes that were loaded"):
            mesh.bind()


@pytest.mark.usefixtures("decoupled")
def test_bind_needs_the_same_ranks() -> None:
    with fake_world(8, 3):
        (loaded,) = _copy_of(_mesh())
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        with pytest.raises(ValueError, match=r"ranks 0 to 7.*ranks 0 to 3"):
            loaded.bind(other.universe)
        assert loaded.bind(meshverse.Universe(loaded.universe.rank_map)) is loaded


# --- meshes of another root than the one that is here -------------------------------------------


def _views() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))


def test_a_loaded_root_is_the_equal_mesh_that_was_unflattened_or_sliced() -> None:
    with fake_world(8, 2):
        saved = pickle.dumps(_mesh())
    with fake_world(8, 2):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("w",)).unflatten(
            "w", (2, 4), ("dp", "tp")
        )
        assert pickle.loads(saved) is mesh
    with fake_world(8, 2):
        mesh = init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
        assert pickle.loads(saved) is mesh["dp", "tp"]


@pytest.mark.parametrize("is_flattened_before", [False, True])
def test_a_loaded_root_stays_a_root_beside_another_one(is_flattened_before: bool) -> None:
    with fake_world(8, 2):
        saved = pickle.dumps(_mesh())
    with fake_world(8, 2):
        other = _views()
        if is_flattened_before:
            other["replicate", "shard"].flatten("dp")
        loaded = pickle.loads(saved)
        assert loaded._get_root_mesh() is loaded
        assert pickle.loads(saved) is loaded
        assert loaded["dp"]._get_root_mesh_dim() == 0
        assert loaded.universe is not other.universe
        loaded.bind()
        other["replicate", "shard"].flatten("dp")
        assert dist.get_process_group_ranks(loaded.get_group("dp")) == [2, 6]
        assert loaded["dp"].get_group() is loaded.get_group("dp")
        assert loaded.get_local_rank("dp") == 0
        assert dist.get_process_group_ranks(other.get_group("dp")) == [0, 2, 4, 6]
        assert loaded.flatten("all").get_group() is loaded.get_group("all")


def test_the_root_is_bound_as_the_root_whatever_was_sliced_before() -> None:
    with fake_world(8, 2):
        saved = pickle.dumps(_mesh())
    loaded = pickle.loads(saved)
    assert loaded["dp"] is loaded["dp"]  # in the order of descriptions, it comes before the root
    with fake_world(8, 2):
        loaded.bind()
        assert loaded._get_root_mesh() is loaded is loaded.universe.root
        assert loaded["dp"]._get_root_mesh() is loaded
        assert loaded["tp"]._get_root_mesh_dim() == 1
        assert loaded.flatten("all").get_group() is loaded.get_group("all")


def test_bind_to_a_universe_that_means_another_axis_by_a_name() -> None:
    with fake_world(8, 2):
        saved = pickle.dumps(_mesh())
    loaded = pickle.loads(saved)
    with fake_world(8, 2):
        other = _views()
        other["replicate", "shard"].flatten("dp")
        for _ in range(2):
            with pytest.raises(ValueError, match=r"dp already exists in the universe of .* of its"):
                loaded.bind(other.universe)
            assert not loaded.has_groups
        loaded.bind(meshverse.Universe(8))
        assert dist.get_process_group_ranks(loaded.get_group("dp")) == [2, 6]


@pytest.mark.parametrize("is_second", [False, True], ids=["first root", "second root"])
def test_a_universe_keeps_the_names_of_meshes_that_were_bound_to_it(is_second: bool) -> None:
    with fake_world(8, 2):
        bare = DeviceMesh("cpu", list(range(8)), mesh_dim_names=("all",), _init_backend=False)
        loaded = bare
        if is_second:
            loaded = DeviceMesh(
                *("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]]),
                mesh_dim_names=("dp", "tp"),
                universe=bare.universe,
                _init_backend=False,
            )
        else:
            loaded = DeviceMesh(
                *("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]]),
                mesh_dim_names=("dp", "tp"),
                _init_backend=False,
            )
        other = _views()
        loaded.bind(other.universe)
        assert loaded["dp"]._get_root_mesh_dim() == 0
        with pytest.raises(ValueError, match="dp already exists in the universe of"):
            other["replicate", "shard"].flatten("dp")
        assert dist.get_process_group_ranks(loaded.get_group("dp")) == [2, 6]
