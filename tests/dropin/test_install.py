"""`install()`, `uninstall()` and `installed()`: what they change, when and for whom."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock_module
from torch.distributed.device_mesh import DeviceMesh as ImportedBefore
from torch.distributed.device_mesh import init_device_mesh as imported_before
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import meshverse
from helpers.forked import SECONDS
from helpers.observation import OURS, STOCK, observe
from helpers.worlds import fake_world
from meshverse import dropin

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8

_AXES = ("dp", "tp")
_MATRIX = torch.arange(16.0).reshape(4, 4)


def _build() -> ImportedBefore:
    return imported_before("cpu", (2, 4), mesh_dim_names=_AXES)


def _distribute(mesh: ImportedBefore, placements: list[Placement]) -> DTensor:
    """My shard of `_MATRIX`, without communication: a fake world has none."""
    return distribute_tensor(_MATRIX, mesh, placements, src_data_rank=None)


def _is_installed() -> bool:
    return type(_build()) is OURS.DeviceMesh


# --- the switch ----------------------------------------------------------------------------------

_SPELLINGS: dict[str, Callable[[], Any]] = {
    "function imported before": _build,
    "class imported before": lambda: ImportedBefore("cpu", [[0, 1], [4, 5]]),
    "torch.distributed": lambda: dist.init_device_mesh("cpu", (8,)),
    "torch.distributed.DeviceMesh": lambda: dist.DeviceMesh("cpu", torch.arange(8)),
    "torch.distributed.tensor": lambda: torch.distributed.tensor.DeviceMesh("cpu", [5]),
    "module attribute": lambda: stock_module.init_device_mesh("cpu", (4, 2)),
    "from_group": lambda: ImportedBefore.from_group(dist.group.WORLD, "cpu"),
    "imported inside": lambda: _import_now()("cpu", (8,)),
    "DTensor's own": lambda: _distribute(_build(), [Shard(0), Shard(1)]).device_mesh,
}


def _import_now() -> Callable[..., Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_every_spelling_follows_the_switch(spelling: str) -> None:
    build = _SPELLINGS[spelling]
    kinds = [type(build())]
    meshverse.install()
    kinds.append(type(build()))
    meshverse.uninstall()
    kinds.append(type(build()))
    assert kinds == [STOCK.DeviceMesh, OURS.DeviceMesh, STOCK.DeviceMesh]


def test_install_and_uninstall_are_idempotent() -> None:
    meshverse.uninstall()
    assert not _is_installed()
    for _ in range(3):
        meshverse.install()
    assert _is_installed()
    meshverse.uninstall()
    assert not _is_installed()


def test_blocks_nest() -> None:
    with ExitStack() as blocks:
        for _ in range(3):
            blocks.enter_context(meshverse.installed())
            assert _is_installed()
        with meshverse.installed():
            pass
        assert _is_installed()
    assert not _is_installed()


def test_one_block_can_be_opened_again() -> None:
    for _ in range(2):
        with meshverse.installed():
            assert _is_installed()
        assert not _is_installed()


def test_install_inside_a_block_stays() -> None:
    with meshverse.installed():
        meshverse.install()
    assert _is_installed()


def test_uninstall_inside_a_block_waits_for_its_end() -> None:
    meshverse.install()
    with meshverse.installed():
        meshverse.uninstall()
        assert _is_installed()
    assert not _is_installed()


def test_a_block_that_a_signal_handler_interrupts_as_it_begins_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = dropin._update_hooks

    def update_and_interrupt() -> None:
        usual()
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(dropin, "_update_hooks", update_and_interrupt)
    with pytest.raises(KeyboardInterrupt), meshverse.installed():
        pytest.fail("the block began")
    assert not _is_installed()


# --- threads -------------------------------------------------------------------------------------


def _in_threads(*programs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(program: Callable[[], None]) -> None:
        try:
            program()
        except BaseException as error:  # noqa: BLE001  (shown below, in the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_blocks_of_two_threads_overlap() -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = []

    def first() -> None:
        with meshverse.installed():
            first_is_in.set()
            assert second_is_in.wait(SECONDS)
        first_is_out.set()

    def second() -> None:
        assert first_is_in.wait(SECONDS)
        with meshverse.installed():
            second_is_in.set()
            assert first_is_out.wait(SECONDS)
            seen.append(_is_installed())

    _in_threads(first, second)
    assert seen == [True]
    assert not _is_installed()


def test_many_threads_enter_leave_and_build() -> None:
    def work() -> None:
        for _ in range(40):
            with meshverse.installed():
                assert _is_installed()

    def switch() -> None:
        for _ in range(400):
            meshverse.install()
            meshverse.uninstall()

    _in_threads(*[work] * 8, switch)
    assert not _is_installed()


# --- what it leaves alone ------------------------------------------------------------------------

_ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "pickle protocol 0": lambda mesh: pickle.loads(pickle.dumps(mesh, protocol=0)),
}


@pytest.mark.parametrize("round_trip", _ROUND_TRIPS)
def test_a_stock_mesh_is_copied_while_installed(round_trip: str) -> None:
    stock = _build()
    expected = observe(_ROUND_TRIPS[round_trip](stock))
    with meshverse.installed():
        back = _ROUND_TRIPS[round_trip](stock)
        assert back == stock
        assert hash(back) == hash(stock)
        assert observe(back) == expected
        assert back["tp"] == stock["tp"]


def test_a_stock_checkpoint_is_loaded_while_installed() -> None:
    tensor = _distribute(_build(), [Shard(0), Shard(1)])
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    file.seek(0)
    with meshverse.installed():
        back = torch.load(file, weights_only=True)["weight"]
        assert back.device_mesh == tensor.device_mesh
        assert back.to_local().tolist() == [[9.0], [13.0]]
        assert (back + tensor).to_local().tolist() == [[18.0], [26.0]]


_DERIVED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda mesh: mesh["tp"],
    "slice of two": lambda mesh: mesh._unflatten(1, (2, 2), ("cp", "tp"))["dp", "tp"],
    "flatten": lambda mesh: mesh._flatten("world"),
    "unflatten": lambda mesh: mesh._unflatten(1, (2, 2), ("cp", "tp")),
    "concatenate": lambda mesh: type(mesh)._concatenate([mesh["dp"], mesh["tp"]]),
}


@pytest.mark.parametrize("which", _DERIVED)
def test_what_derives_from_a_stock_mesh_stays_in_its_family(which: str) -> None:
    derive = _DERIVED[which]
    expected, stock = observe(derive(_build())), _build()
    with meshverse.installed():
        derived = derive(stock)
        assert type(derived) is STOCK.DeviceMesh
        assert observe(derived) == expected
        assert derived._get_root_mesh() is stock


def test_a_mesh_of_given_groups_is_of_this_world_only() -> None:
    meshverse.install()
    try:
        mesh = ImportedBefore.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("all",))
    finally:
        meshverse.uninstall()
    assert mesh.get_group() is dist.group.WORLD
    data = [group["how"] for group in mesh.universe.explain().to_dict()["groups"]]
    assert data == ["given by the user"]
    dist.destroy_process_group()
    with fake_world(8, 5), pytest.raises(RuntimeError, match="there is another one"):
        mesh.get_group()


def test_submeshes_of_a_stock_mesh_are_the_same_while_installed() -> None:
    stock = _build()
    expected = stock._get_all_submeshes("tp")
    with meshverse.installed():
        submeshes = stock._get_all_submeshes("tp")
    assert submeshes == expected
    assert [mesh.mesh.tolist() for mesh in submeshes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert submeshes[1].get_group() is stock.get_group("tp")


def test_stock_meshes_and_their_tensors_work_on_while_installed() -> None:
    stock = _build()
    tensor = _distribute(stock, [Shard(0), Shard(1)])
    with meshverse.installed():
        moved = tensor.redistribute(placements=[Shard(0), Replicate()])
        assert moved.device_mesh is stock
        assert (tensor @ moved.T).device_mesh is stock
        on_ours = _distribute(_build(), [Shard(0), Shard(1)])
        assert type(on_ours.device_mesh) is OURS.DeviceMesh
        assert torch.equal(on_ours.to_local(), tensor.to_local())


def _everything_of_torch() -> dict[tuple[str, str], object]:
    """Every attribute of what a mesh is made of in torch."""
    from torch.distributed.tensor import _api, _dtensor_spec

    places = [dist, stock_module, dist.distributed_c10d, torch.distributed.tensor, _api]
    places += [_dtensor_spec, STOCK.DeviceMesh, type(STOCK.DeviceMesh)]
    return {
        (place.__name__, name): value for place in places for name, value in vars(place).items()
    }


def _changed(before: dict[tuple[str, str], object]) -> set[tuple[str, str]]:
    now = _everything_of_torch()
    return {key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)}


def test_two_methods_of_torch_are_replaced_while_installed() -> None:
    before = _everything_of_torch()
    both = {("DeviceMesh", "from_group"), ("DeviceMesh", "__setstate__")}
    with meshverse.installed():
        assert _is_installed()
        assert _changed(before) == both
    assert not _changed(before)
    meshverse.install()
    assert _is_installed()
    with meshverse.installed():
        assert _changed(before) == both
    assert _changed(before) == both
    meshverse.uninstall()
    assert not _changed(before)


def test_what_others_have_put_on_torchs_class_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = staticmethod(lambda *_: None)
    monkeypatch.setattr(STOCK.DeviceMesh, "from_group", theirs)
    for switch in (meshverse.uninstall, meshverse.install, meshverse.uninstall):
        switch()
        assert vars(STOCK.DeviceMesh)["from_group"] is theirs


# --- a stock mesh, and a program's own subclass, in every state ----------------------------------


@pytest.fixture(params=["never", "installed", "installed and uninstalled"])
def state(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "never":
        meshverse.install()
    if request.param == "installed and uninstalled":
        meshverse.uninstall()
    yield request.param
    meshverse.uninstall()


class TheirMesh(STOCK.DeviceMesh):
    """A program's own kind of mesh, with a constructor of its own."""

    def __init__(self, ranks: list[int], label: str) -> None:
        super().__init__("cpu", ranks, mesh_dim_names=("dp",))
        self.label = label


def test_a_programs_own_subclass_stays_what_it_is(state: str) -> None:
    theirs = TheirMesh([4, 5], "mine")
    assert type(theirs) is TheirMesh
    assert theirs.label == "mine"
    assert theirs.get_local_rank() == 1
    back = pickle.loads(pickle.dumps(theirs))
    assert type(back) is TheirMesh
    assert back == theirs


class _Counted:
    """Another base of a program's own kind of mesh, which counts what is made."""

    n_made = 0

    def __new__(cls, *_: object, **__: object) -> Any:
        cls.n_made += 1
        return super().__new__(cls)


class CountedMesh(STOCK.DeviceMesh, _Counted):
    """A program's own kind of mesh, with two bases."""


def test_a_programs_own_subclass_has_its_other_bases(state: str) -> None:
    before = CountedMesh.n_made
    theirs = CountedMesh("cpu", [4, 5], mesh_dim_names=("dp",))
    assert type(theirs) is CountedMesh
    assert pickle.loads(pickle.dumps(theirs)) == theirs
    assert CountedMesh.n_made == before + 2


def test_the_constructor_still_complains_as_stock(state: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'axes'"):
        ImportedBefore("cpu", [4, 5], axes=("dp",))
    with pytest.raises(TypeError, match="device_type"):
        ImportedBefore()
    with pytest.raises(RuntimeError, match="unique"):
        imported_before("cpu", (2, 4), mesh_dim_names=("dp", "dp"))


@pytest.mark.parametrize("name", ["_flatten", "_unflatten", "__getitem__", "get_group"])
def test_a_replaced_method_of_torchs_class_does_not_reach_our_meshes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"torch's {name} was called")

    monkeypatch.setattr(STOCK.DeviceMesh, name, refuse)
    with meshverse.installed():
        mesh = _build()
        pairs = mesh["tp"]._unflatten(0, (2, 2), ("cp", "pair"))
        assert mesh._flatten("all").get_group() is dist.group.WORLD
        assert pairs["pair"].get_group().size() == 2


_HOOK_BEFORE = """
import importlib
from torch.distributed.device_mesh import DeviceMesh
made = []
def new(cls, *arguments, **named):
    made.append(arguments[0])
    return object.__new__(cls)
DeviceMesh.__new__ = new
import meshverse
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
assert type(DeviceMesh("cpu", [0, 1, 2, 3])) is DeviceMesh
assert made == ["cpu"]
meshverse.install()
assert type(DeviceMesh("cpu", [0, 1, 2, 3])) is meshverse.DeviceMesh
assert made == ["cpu"]
meshverse.uninstall()
importlib.reload(meshverse.dropin)
assert type(DeviceMesh("cpu", [0, 1, 2, 3])) is DeviceMesh
"""


def test_a_new_that_another_library_has_set_is_called_for_torchs_meshes() -> None:
    # Not a fork, which has imported Meshverse.
    subprocess.run([sys.executable, "-c", _HOOK_BEFORE], check=True, timeout=SECONDS)
