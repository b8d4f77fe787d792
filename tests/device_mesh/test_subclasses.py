"""A user's subclass of a mesh: what it derives, and that it is copied and saved, as stock's is."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # torch.load(weights_only=True) wants it for any mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.observation import OURS, STOCK, observe
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, init_device_mesh, save_mesh
from meshverse.device_mesh.device_mesh import _own_attributes

_NAMES = ("dp", "tp")
_RANKS = [[0, 1, 2, 3], [4, 5, 6, 7]]


class _WithRole:
    """A trainer's subclass: an attribute, and a way to construct it."""

    def __init__(self, *args: Any, role: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.role = role


class OfStock(_WithRole, STOCK.DeviceMesh):
    pass


class OfOurs(_WithRole, DeviceMesh):
    pass


class WithState(OfOurs):
    """Saves something in a form of its own, through what it inherits."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["role"] = f"saved {state['role']}"
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.role = f"loaded {self.role}"


class WithReduce(OfOurs):
    """Knows how to be made again."""

    def __reduce__(self) -> Any:
        return _make_again, (self.role,)


def _make_again(role: str) -> WithReduce:
    return WithReduce("cpu", _RANKS, mesh_dim_names=_NAMES, role=role)


def _mesh(mesh_class: type = OfOurs, role: Any = "actor", **extra: Any) -> Any:
    return mesh_class("cpu", _RANKS, mesh_dim_names=_NAMES, role=role, **extra)


def _torch_save(weights_only: bool) -> Callable[[Any], Any]:
    def save_and_load(mesh: Any) -> Any:
        file = io.BytesIO()
        torch.save(mesh, file)
        file.seek(0)
        with torch.serialization.safe_globals([type(mesh)]):
            return torch.load(file, weights_only=weights_only)

    return save_and_load


_ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "pickle protocol 2": lambda mesh: pickle.loads(pickle.dumps(mesh, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": _torch_save(weights_only=False),
    "torch.save, weights only": _torch_save(weights_only=True),
}


@pytest.mark.parametrize("round_trip", _ROUND_TRIPS)
@pytest.mark.parametrize("mesh_class", [OfStock, OfOurs])
def test_comes_back(mesh_class: type, round_trip: str, world) -> None:
    role = ["actor"]
    mesh = _mesh(mesh_class, role)
    with groups_created(0):
        back = _ROUND_TRIPS[round_trip](mesh)
    assert type(back) is mesh_class
    assert back == mesh
    assert back is not mesh
    assert (back.role == role, back.role is role) == (True, round_trip == "copy")
    assert observe(back) == observe(mesh)
    back.role = "another"
    assert mesh.role == ["actor"]


@pytest.mark.parametrize("round_trip", _ROUND_TRIPS)
def test_comes_back_into_its_universe(round_trip: str, world) -> None:
    mesh = _mesh()
    back = _ROUND_TRIPS[round_trip](mesh)
    assert back.universe is mesh.universe
    assert back.get_all_groups() == mesh.get_all_groups()
    assert back["tp"] is mesh["tp"]
    assert back._get_root_mesh() is mesh
    assert back.flatten("all") is mesh.flatten("all")


def test_derived_meshes_are_of_the_class_stocks_are_of(world) -> None:
    for mesh_class, family in ((OfStock, STOCK), (OfOurs, OURS)):
        mesh = _mesh(mesh_class)
        group = dist.new_group([4, 5])
        derived = [
            mesh["tp"],
            mesh._flatten("all"),
            mesh._unflatten(1, (2, 2), ("a", "b")),
            mesh_class._concatenate([mesh["dp"], mesh["tp"]]),
            *mesh._get_all_submeshes("tp"),
            mesh_class.from_group(group, "cpu"),
        ]
        assert {type(one) for one in derived} == {family.DeviceMesh}
        assert mesh["dp", "tp"] is mesh


def test_an_equal_mesh_of_another_class_is_not_taken_for_it(world) -> None:
    mesh = _mesh()
    plain = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, universe=mesh.universe)
    for one in (
        DeviceMesh.concatenate([mesh["dp"], mesh["tp"]]),
        mesh["tp"]._get_root_mesh()["dp", "tp"]._unflatten(0, (2,), ("dp",)),
        pickle.loads(pickle.dumps(plain)),
    ):
        assert one == mesh
        assert type(one) is DeviceMesh
    other = _mesh(role="critic", universe=mesh.universe)
    assert (mesh.role, other.role) == ("actor", "critic")
    assert pickle.loads(pickle.dumps(other)).role == "critic"


def test_it_may_save_in_its_own_form(world) -> None:
    for round_trip in ("pickle", "copy", "deepcopy"):
        back = _ROUND_TRIPS[round_trip](_mesh(WithState))
        assert type(back) is WithState
        assert back.role == "loaded saved actor"
    back = pickle.loads(pickle.dumps(_mesh(WithReduce)))
    assert (type(back), back.role) == (WithReduce, "actor")


def test_it_may_refer_to_itself(world) -> None:
    mesh = _mesh(role={})
    mesh.role["mesh"] = mesh
    for round_trip in ("pickle", "deepcopy"):
        back = _ROUND_TRIPS[round_trip](mesh)
        assert back.role["mesh"] is back
        assert back is not mesh


def test_loaded_without_its_universe_and_bound() -> None:
    with fake_world(8, 5):
        saved = pickle.dumps([_mesh(), _mesh(role="critic")["tp"]])
    mesh, part = pickle.loads(saved)
    assert (type(mesh), type(part)) == (OfOurs, DeviceMesh)
    assert (mesh.role, mesh.get_coordinate()) == ("actor", (1, 1))
    twin = copy.copy(mesh)
    with pytest.raises(RuntimeError, match=r"mesh\.bind\(\)"):
        mesh.get_group("tp")
    with fake_world(8, 3):
        mesh.bind()
        for bound in (mesh, twin):
            assert bound.role == "actor"
            assert dist.get_process_group_ranks(bound.get_group("tp")) == [0, 1, 2, 3]


def test_a_decoupled_copy_is_apart(world, monkeypatch) -> None:
    mesh = _mesh()
    monkeypatch.setattr(OfOurs, "decouple_backend_at_save", True)
    for round_trip in ("pickle", "copy", "deepcopy"):
        back = _ROUND_TRIPS[round_trip](mesh)
        assert (type(back), back.role) == (OfOurs, "actor")
        assert back != mesh


def test_of_a_world_that_has_ended() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
    for round_trip in ("copy", "deepcopy", "pickle"):
        back = _ROUND_TRIPS[round_trip](mesh)
        assert (back.role, back.shape, back.get_coordinate()) == ("actor", (2, 4), (1, 1))
        with pytest.raises(RuntimeError, match="process group"):
            back.get_group("tp")


def test_a_file_can_set_no_attribute_of_ours(world) -> None:
    mesh = _mesh()
    mesh.__dict__["role"] = "actor"
    for own in ("_universe", "_dim_group_names", "mesh", "_pg_registry"):
        with pytest.raises(ValueError, match=rf"A saved OfOurs sets \['{own}'\]"):
            mesh.__setstate__({own: None, "role": "thief"})
    assert mesh.role == "actor"


def test_a_file_can_name_no_other_class(world) -> None:
    load, (_, state), _ = _mesh().__reduce_ex__(4)
    for other in (dict, STOCK.DeviceMesh, "OfOurs", None):
        with pytest.raises(TypeError, match="not a subclass of"):
            load(other, state)
    state["rank"] = None
    with pytest.raises(ValueError, match="'rank' is None"):
        load(OfOurs, state)


def test_all_that_a_mesh_has_itself_is_known(world) -> None:
    # What is missing in this list would be taken for the subclass's own, and saved.
    mesh = DeviceMesh("cpu", _RANKS, mesh_dim_names=_NAMES, universe=_mesh().universe)
    others = [mesh["tp"], mesh.flatten("all"), mesh.unflatten("tp", (2, 2), ("a", "b"))]
    others.append(DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]))
    for one in [mesh, *others]:
        observe(one)
        for name in dir(one):
            if isinstance(getattr(type(one), name, None), property) or name in _own_attributes(
                type(one)
            ):
                getattr(one, name, None)
        hash(one)
        pickle.dumps(one)
        assert set(vars(one)) <= _own_attributes(type(one))
        assert one.__getstate__() == {}


def _own_hash(base: Any) -> Any:
    class OwnHash(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.role = "trainer"

        def __hash__(self) -> int:
            return hash(self.role)

    return OwnHash


def _equal_without_hash(base: Any) -> Any:
    class Equal(base):
        def __eq__(self, other: object) -> bool:
            return self is other

    return Equal


def _own_flatten(base: Any) -> Any:
    class Flat(base):
        def flatten(self, name: str) -> Any:
            return self._flatten(name)

    return Flat


@pytest.mark.parametrize("subclass", [_own_hash, _equal_without_hash, _own_flatten])
@pytest.mark.parametrize("base", [STOCK.DeviceMesh, DeviceMesh])
def test_own_special_methods(subclass: Any, base: Any) -> None:
    with fake_world(8):
        mesh = subclass(base)("cpu", torch.tensor(_RANKS), mesh_dim_names=_NAMES)
        flat = mesh.flatten("all") if subclass is _own_flatten else mesh._flatten("all")
        assert flat.size() == 8
        assert mesh.get_group("tp").size() == 4


_NEW_NAMES = sorted(
    name for name in set(dir(DeviceMesh)) - set(dir(STOCK.DeviceMesh)) if not name.startswith("_")
)


@pytest.mark.parametrize("name", _NEW_NAMES)
def test_a_name_that_only_our_class_has_can_be_the_subclass_s_own(name: str) -> None:
    own = type("Own", (DeviceMesh,), {name: lambda self: "own"})
    with fake_world(8):
        mesh = own("cpu", torch.tensor(_RANKS), mesh_dim_names=_NAMES)
        assert getattr(mesh, name)() == "own"
        assert mesh["tp"].size() == 4
        assert mesh._flatten("all").size() == 8
        assert mesh._unflatten("tp", (2, 2), ("x", "y")).size() == 8
        assert "dp=2" in repr(mesh)
        assert {mesh: 1}[mesh] == 1
        assert mesh.get_group("tp").size() == 4
        assert tuple(mesh.get_coordinate()) == (0, 0)
        assert mesh.get_local_rank("tp") == 0
        copy.deepcopy(mesh)
        assert mesh["dp", "tp"].size() == 8
        assert save_mesh(mesh)["mesh"]["axes"] == [([2], [4]), ([4], [1])]
        assert mesh._repr_html_()


def _all_own(base: Any, value: Any) -> Any:
    """Return a subclass whose own attributes have the names that only our class has."""
    names = set(_NEW_NAMES) - {"decouple_backend_at_save"}  # which says how it is saved
    return type("Own", (base,), dict.fromkeys(names, value))


@pytest.mark.parametrize("value", [None, "own", lambda self, *_: "own", property(lambda _: 1 / 0)])
@pytest.mark.parametrize("base", [STOCK.DeviceMesh, DeviceMesh])
def test_all_names_that_only_our_class_has_can_be_the_subclass_s_own(base: Any, value: Any) -> None:
    with fake_world(8, 5):
        mesh = _all_own(base, value)("cpu", torch.tensor(_RANKS), mesh_dim_names=_NAMES)
        assert mesh["tp"].size() == mesh["dp", "tp"]["tp"].size() == 4
        assert mesh._flatten("all").size() == mesh._unflatten(1, (2, 2), ("x", "y")).size() == 8
        again = copy.deepcopy(mesh)
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert "dp=2" in repr(again)
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
        assert (x @ x).redistribute(placements=[Replicate()] * 2).to_local().shape == (8, 8)


@pytest.mark.parametrize("name", _NEW_NAMES)
def test_a_name_that_only_our_class_has_can_be_assigned(name: str) -> None:
    with fake_world(8):
        mesh = DeviceMesh("cpu", torch.tensor(_RANKS), mesh_dim_names=_NAMES)
        before = getattr(mesh, name)
        setattr(mesh, name, "own")
        assert getattr(mesh, name) == "own"
        assert mesh["tp"].size() == 4
        assert getattr(mesh["tp"], name) != "own"
        assert mesh._flatten("all").size() == 8
        assert mesh._unflatten("tp", (2, 2), ("x", "y")).size() == 8
        assert mesh.get_group("tp").size() == 4
        assert mesh == mesh["dp", "tp"]
        assert "dp=2" in repr(mesh)
        delattr(mesh, name)
        assert getattr(mesh, name) == before or name in ("flattened", "group_names")
        with pytest.raises(AttributeError):
            delattr(mesh, name)
