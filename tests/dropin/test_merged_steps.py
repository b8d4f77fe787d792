"""DTensor's step over several axes at once, which it takes where these axes were flattened.

torch merges collectives over a mesh's axes into one over their flattened mesh. For rows that are
sharded unevenly over two axes, and for groups in another order than the mesh, that loses or mixes
up rows. All meshes of one of our universes have the same flattened meshes, so a flattened axis of
one view must not make another view wrong.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import meshverse
from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.sides import side
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh

_ROWS = (1, 5, 6, 7, 9, 12)
_CHOICES: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial()]


def _wrong(mesh: StockDeviceMesh, rows: int) -> list[str]:
    """Return the placements from which the whole tensor is not gathered as it was."""
    whole = torch.arange(rows * 7.0).reshape(rows, 7)
    wrong = []
    for placements in itertools.product(_CHOICES, repeat=mesh.ndim):
        known = [Replicate() if one.is_partial() else one for one in placements]
        local = distribute_tensor(whole, mesh, known).to_local()
        tensor = DTensor.from_local(
            local, mesh, placements, shape=whole.shape, stride=whole.stride()
        )
        n_terms = 1
        for size, one in zip(mesh.shape, placements, strict=True):
            n_terms *= size if one.is_partial() else 1
        for target in itertools.product((Replicate(), Shard(0)), repeat=mesh.ndim):
            moved = tensor.redistribute(placements=target)
            back = moved.redistribute(placements=[Replicate()] * mesh.ndim)
            if not torch.equal(back.to_local(), n_terms * whole):
                wrong.append(f"{rows} rows, {placements} by {target}, on {mesh}")
    return wrong


def _flattened(size: int) -> list[DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    mesh.flatten("dp_tp")
    return [mesh]


def _another_view(size: int) -> list[DeviceMesh]:
    world = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))
    world.unflatten("world", (2, size // 2), ("dp", "tp")).flatten("dp_tp")
    other = init_device_mesh(
        "cpu", (size // 2, 2), universe=world.universe, mesh_dim_names=("a", "b")
    )
    return [world.unflatten("world", (2, size // 2), ("ep", "fsdp")), other]


def _in_another_order(size: int) -> list[DeviceMesh]:
    # The groups of the first mesh have ranks in its order, and the flattened one of the second mesh
    # in ascending order.
    ranks = torch.tensor([*range(1, size), 0]).reshape(2, size // 2)
    names = ("dp", "tp")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, preserve_rank_order=True)
    DeviceMesh("cpu", ranks, mesh_dim_names=names, universe=mesh.universe).flatten("dp_tp")
    return [mesh]


def _destroyed(size: int) -> list[DeviceMesh]:
    # With a timeout of its own, the flattened axis does not use the default group.
    world = init_device_mesh(
        "cpu", (size,), mesh_dim_names=("world",), timeout=timedelta(seconds=100)
    )
    flattened = world.unflatten("world", (2, size // 2), ("dp", "tp"))
    dist.destroy_process_group(flattened.flatten("dp_tp").get_group())
    return [flattened, world.unflatten("world", (2, size // 2), ("ep", "fsdp"))]


def _on_another_backend(size: int) -> list[DeviceMesh]:
    world = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))
    # The fake backend moves no data.
    world.unflatten("world", (2, size // 2), ("dp", "tp")).flatten("dp_tp", "fake")
    return [world.unflatten("world", (2, size // 2), ("ep", "fsdp"))]


def _three_axes(size: int) -> list[DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 1, size // 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh.flatten("all")
    mesh["pp", "tp"].flatten("pp_tp")
    return [mesh, mesh["pp", "tp"], mesh["dp", "tp"]]


_VIEWS: dict[str, Callable[[int], list[DeviceMesh]]] = {
    "flattened": _flattened,
    "another view": _another_view,
    "in another order": _in_another_order,
    "destroyed": _destroyed,
    "on another backend": _on_another_backend,
    "three axes": _three_axes,
}


_SHORT = [name for name in _VIEWS if name != "three axes"]


def _all_wrong(views: str, rows: tuple[int, ...]) -> list[str]:
    meshes = _VIEWS[views](dist.get_world_size())
    return [each for mesh in meshes for n in rows for each in _wrong(mesh, n)]


@pytest.mark.parametrize(
    ("views", "size", "rows"),
    in_tiers(
        [
            *[(views, 4, (5, 8)) for views in _SHORT],
            *[(views, size, _ROWS) for views in _VIEWS for size in (4, 6)],
        ],
        [(views, 4, (5, 8)) for views in _SHORT[::2]],
        [(views, 4, _ROWS) for views in _SHORT[1::2]],
    ),
)
def test_every_view_gathers_all_rows(
    crew: Crew, views: str, size: int, rows: tuple[int, ...]
) -> None:
    assert crew.run(_all_wrong, size, views, rows) == [[]] * size


def _counts(side_name: str, rows: int) -> dict[str, Any]:
    """Count collectives from each pair of placements to a replica, and note whether it is right."""
    whole = torch.arange(rows * 7.0).reshape(rows, 7)
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh._flatten("dp_tp")
        seen = {}
        for one in (Shard(0), Partial()):
            known = [Replicate() if one.is_partial() else one] * 2
            local = distribute_tensor(whole, mesh, known).to_local()
            tensor = DTensor.from_local(
                local, mesh, [one] * 2, shape=whole.shape, stride=whole.stride()
            )
            with CommDebugMode() as counted:
                moved = tensor.redistribute(placements=[Replicate()] * 2).to_local()
            expected = 4 * whole if one.is_partial() else whole
            seen[str(one)] = counted.get_total_counts(), torch.equal(moved, expected)
    return seen


def test_even_shards_still_take_one_step(crew: Crew) -> None:
    stock, ours = (crew.run(_counts, 4, name, 8) for name in ("stock", "ours"))
    assert stock == ours == [{"S(0)": (1, True), "P(sum)": (1, True)}] * 4


def test_uneven_shards_take_a_step_for_each_axis(crew: Crew) -> None:
    assert crew.run(_counts, 4, "ours", 5) == [{"S(0)": (2, True), "P(sum)": (1, True)}] * 4
    # If this fails, torch has become right, and needs no check from that version on.
    assert crew.run(_counts, 4, "stock", 5) == [{"S(0)": (1, False), "P(sum)": (1, True)}] * 4


def test_meshes_of_installed_names_take_right_steps(crew: Crew) -> None:
    assert crew.run(_counts, 4, "installed", 5) == [{"S(0)": (2, True), "P(sum)": (1, True)}] * 4
    assert crew.run(_counts, 4, "installed", 8) == [{"S(0)": (1, True), "P(sum)": (1, True)}] * 4


def _made_before(rows: int) -> list[tuple[bool, int, bool]]:
    """Return, for meshes made before, during and after `installed()`: ours, steps, and right."""
    whole = torch.arange(rows * 7.0).reshape(rows, 7)
    seen = []
    with side("stock") as family:

        def flattened() -> Any:
            mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            mesh._flatten("dp_tp")
            return mesh

        before = flattened()
        with meshverse.installed():
            during = flattened()
            meshes = [before, during]
            seen += [_steps(mesh, whole) for mesh in meshes]
        seen += [_steps(mesh, whole) for mesh in (*meshes, flattened())]
    return seen


def _steps(mesh: StockDeviceMesh, whole: torch.Tensor) -> tuple[bool, int, bool]:
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    with CommDebugMode() as counted:
        moved = tensor.full_tensor()
    return isinstance(mesh, DeviceMesh), counted.get_total_counts(), torch.equal(moved, whole)


def test_meshes_that_torch_made_keep_torch_steps_beside_ours(crew: Crew) -> None:
    stock, ours = (False, 1, False), (True, 2, True)
    # What torch itself does on its own meshes is wrong, and not ours to change.
    assert crew.run(_made_before, 4, 5) == [[stock, ours, stock, ours, stock]] * 4


_FROM_THREADS = """
import sys, threading
import torch, torch.distributed as dist
import meshverse
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
from torch.distributed.tensor import DTensor, Shard, _redistribute
from torch.distributed.tensor.debug import CommDebugMode

barrier, seen, errors = threading.Barrier(8), [], []

def work(index):
    try:
        barrier.wait()  # all create the first mesh of ours, and use it, at the same time
        mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh.flatten("dp_tp")
        for rows, n_steps in ((5, 2), (8, 1)) * 20:
            tensor = DTensor.from_local(
                torch.ones(2, 3), mesh, [Shard(0), Shard(0)], shape=(rows, 3), stride=(3, 1)
            )
            with CommDebugMode() as counted:
                tensor.full_tensor()
            seen.append(counted.get_total_counts() == n_steps)
    except Exception as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert not errors, errors
assert seen == [True] * 8 * 40, seen
"""


@pytest.mark.long
def test_from_threads_that_begin_at_once() -> None:
    subprocess.run([sys.executable, "-c", _FROM_THREADS], check=True, timeout=SECONDS)


def _from_threads(n_threads: int, n_times: int) -> list[list[bool]]:
    """Whether uneven and even rows are gathered as they were, by thread; the last has torch's mesh.

    Each thread has a mesh with groups of its own, so that they need no order among them.
    """
    meshes: list[StockDeviceMesh] = []
    for number in range(n_threads):
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), isolate=f"thread {number}"
        )
        mesh.flatten("dp_tp")
        meshes.append(mesh)
    with side("stock") as family:
        stock = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        stock._flatten("dp_tp")
        meshes.append(stock)
        barrier = threading.Barrier(len(meshes))

        def work(mesh: StockDeviceMesh) -> list[bool]:
            barrier.wait()
            seen = []
            for rows in (5, 8) * n_times:
                whole = torch.arange(rows * 7.0).reshape(rows, 7)
                tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
                seen.append(torch.equal(tensor.full_tensor(), whole))
            return seen

        with ThreadPoolExecutor(len(meshes)) as pool:
            return [*pool.map(work, meshes)]


def test_threads_gather_all_rows_beside_one_that_uses_torchs_mesh(crew: Crew) -> None:
    ours, stock = [True, True] * 20, [False, True] * 20
    assert crew.run(_from_threads, 4, 3, 20) == [[ours, ours, ours, stock]] * 4


_IMPORTED_LATE = """
import sys
import torch, torch.distributed as dist
import meshverse
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
mesh.flatten("dp_tp")
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

for rows, n_steps in ((5, 2), (8, 1)):
    tensor = DTensor.from_local(
        torch.ones(2, 3), mesh, [Shard(0), Shard(0)], shape=(rows, 3), stride=(3, 1)
    )
    with CommDebugMode() as counted:
        tensor.full_tensor()
    assert counted.get_total_counts() == n_steps, counted.get_total_counts()
"""


@pytest.mark.long
def test_of_a_dtensor_that_is_imported_after_the_axes_were_flattened() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTED_LATE], check=True, timeout=SECONDS)


@pytest.mark.parametrize(("rows", "n_steps"), [(5, 2), (8, 1)])
def test_under_fake_tensor_mode(rows: int, n_steps: int) -> None:
    with fake_world(4, 0):
        (mesh,) = _flattened(4)
        with FakeTensorMode():
            local = torch.ones(2, 3)
            placements = [Shard(0), Shard(0)]
            tensor = DTensor.from_local(local, mesh, placements, shape=(rows, 3), stride=(3, 1))
            with CommDebugMode() as counted:
                tensor.full_tensor()
    assert counted.get_total_counts() == n_steps


def test_under_local_tensor_mode() -> None:
    with fake_world(4, 0), LocalTensorMode(4):
        (mesh,) = _flattened(4)
        for rows in (5, 7, 8):  # with fewer, torch raises
            whole = torch.arange(rows * 3.0).reshape(rows, 3)
            gathered = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor()
            assert isinstance(gathered, LocalTensor)
            assert torch.equal(gathered.reconcile(), whole), rows


def _compiled(rows: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh.flatten("dp_tp")
    whole = torch.arange(rows * 7.0).reshape(rows, 7)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])

    def gathered(tensor: DTensor) -> torch.Tensor:
        return tensor.redistribute(placements=[Replicate(), Replicate()]).to_local() + 1

    compiled = torch.compile(gathered, backend="aot_eager", fullgraph=True)
    return torch.equal(compiled(tensor), whole + 1)


@pytest.mark.long
@pytest.mark.parametrize("rows", [5, 8])
def test_compiled_functions(crew: Crew, rows: int) -> None:
    assert crew.run(_compiled, 4, rows) == [True] * 4
