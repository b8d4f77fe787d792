"""Every axis of every view all-reduces over exactly its ranks, in real processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.all_reduce import Reached, expected_ranks, reached_ranks
from helpers.crew import Crew
from helpers.observation import OURS
from meshverse import DeviceMesh, init_device_mesh
from trainer_views import Degrees, five_views

Views = dict[str, StockDeviceMesh]
_Array = tuple[np.ndarray, tuple[str, ...]]


def _whole_world(*axes: tuple[str, int]) -> _Array:
    """The array of a mesh of ranks 0, 1, 2, ... with these axes."""
    names, shape = zip(*axes, strict=True)
    return np.arange(np.prod(shape)).reshape(shape), names


# --- 4 processes ---------------------------------------------------------------------------------


def _views_of_4() -> Views:
    permuted = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    return {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "permuted": permuted,
        "flattened": permuted.flatten("world"),
        "nameless": init_device_mesh("cpu", (4,)),
        "part": DeviceMesh("cpu", [2, 1], mesh_dim_names=("tp",)),
        "one": DeviceMesh("cpu", [[3]], mesh_dim_names=("dp", "tp")),
    }


_ARRAYS_OF_4 = {
    "mesh": _whole_world(("dp", 2), ("tp", 2)),
    "permuted": (np.array([[3, 1], [0, 2]]), ("dp", "tp")),
    "flattened": _whole_world(("world", 4)),
    "nameless": _whole_world(("dim_0", 4)),
    "part": (np.array([2, 1]), ("tp",)),
    "one": (np.array([[3]]), ("dp", "tp")),
}

# --- 8 processes ---------------------------------------------------------------------------------


def _views_of_8() -> Views:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    batch = mesh["dp", "cp"].flatten("batch")
    return {
        "mesh": mesh,
        "slice": mesh["dp", "tp"],
        "batch": batch,
        "again": batch.unflatten(0, (1, 4), ("replicate", "shard")),
        "split": mesh.unflatten("tp", (2, 1), ("ep", "etp")),
        "backwards": DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]).flatten("backwards"),
        "part": DeviceMesh("cpu", [[7, 2], [4, 1], [0, 5]], mesh_dim_names=("dp", "tp")),
    }


_CUBE = _whole_world(("dp", 2), ("cp", 2), ("tp", 2))
_ARRAYS_OF_8 = {
    "mesh": _CUBE,
    "slice": _CUBE,
    "batch": _whole_world(("batch", 4), ("tp", 2)),
    "again": _whole_world(("replicate", 1), ("shard", 4), ("tp", 2)),
    "split": _whole_world(("dp", 2), ("cp", 2), ("ep", 2), ("etp", 1)),
    "backwards": (_CUBE[0].transpose(2, 0, 1).reshape(4, 2), ("backwards", "cp")),
    "part": (np.array([[7, 2], [4, 1], [0, 5]]), ("dp", "tp")),
}

# --- 16 processes --------------------------------------------------------------------------------


def _views_of_16() -> Views:
    return five_views(OURS.init_device_mesh, Degrees(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=4))


_ARRAYS_OF_16 = {
    "world": _whole_world(("world", 16)),
    "data": _whole_world(("pp", 2), ("batch", 4), ("cp", 1), ("tp", 2)),
    "loss": _whole_world(("pp", 2), ("loss", 4), ("tp", 2)),
    "dense": _whole_world(("pp", 2), ("dp_replicate", 2), ("fsdp", 2), ("tp", 2)),
    "experts": _whole_world(("pp", 2), ("dp_replicate", 2), ("efsdp", 1), ("ep", 4)),
    "full": _whole_world(("pp", 2), ("dp_replicate", 2), ("dp_shard", 2), ("cp", 1), ("tp", 2)),
}

_WORLDS: dict[int, tuple[Callable[[], Views], dict[str, _Array]]] = {
    4: (_views_of_4, _ARRAYS_OF_4),
    8: (_views_of_8, _ARRAYS_OF_8),
    16: (_views_of_16, _ARRAYS_OF_16),
}


def _reached_in_every_view(build: Callable[[], Views]) -> tuple[dict[str, Reached], dict, int]:
    views = build()
    mine = {name: view for name, view in views.items() if view.get_coordinate() is not None}
    # Twice, as training does, and the second time in the other order.
    first = {name: reached_ranks(view) for name, view in mine.items()}
    second = {name: reached_ranks(view) for name, view in reversed(mine.items())}
    assert first == second
    tensors = {name: view.mesh.tolist() for name, view in mine.items()}
    return first, tensors, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("world_size", _WORLDS)
def test_every_axis_reaches_its_ranks(crew: Crew, world_size: int) -> None:
    build, arrays = _WORLDS[world_size]
    answers = crew.run(_reached_in_every_view, world_size, build)
    for rank, (reached, _, _) in enumerate(answers):
        for view, (array, names) in arrays.items():
            expected = expected_ranks(array, names, rank, world_size)
            mine = reached.get(view, {})
            assert mine == {name: expected[name] for name in mine}, (rank, view)
            assert bool(mine) == (rank in array), (rank, view)


def test_the_sums_are_those_of_the_mesh_tensor(crew: Crew) -> None:
    for rank, (reached, tensors, _) in enumerate(crew.run(_reached_in_every_view, 8, _views_of_8)):
        for view, tensor in tensors.items():
            names = tuple(reached[view])
            assert expected_ranks(np.array(tensor), names, rank, 8) == reached[view]


def test_five_views_make_eight_groups_on_every_rank(crew: Crew) -> None:
    assert {groups for _, _, groups in crew.run(_reached_in_every_view, 16, _views_of_16)} == {8}


# --- other collectives, and ours beside stock's --------------------------------------------------


def _other_collectives() -> dict[str, list]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    group = mesh.get_group("tp")
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    sent = torch.tensor([rank * 10.0])
    dist.broadcast(sent, src=dist.get_global_rank(group, 1), group=group)
    exchanged = torch.empty(2)
    dist.all_to_all_single(exchanged, torch.tensor([rank, rank + 100.0]), group=group)
    dist.barrier(group=mesh.get_group("dp"))
    return {
        "gathered": torch.cat(gathered).tolist(),
        "broadcast": sent.tolist(),
        "exchanged": exchanged.tolist(),
    }


def test_other_collectives(crew: Crew) -> None:
    assert crew.run(_other_collectives, 4) == [
        {"gathered": [0, 1], "broadcast": [10], "exchanged": [0, 1]},
        {"gathered": [0, 1], "broadcast": [10], "exchanged": [100, 101]},
        {"gathered": [2, 3], "broadcast": [30], "exchanged": [2, 3]},
        {"gathered": [2, 3], "broadcast": [30], "exchanged": [102, 103]},
    ]


def _between_stock_meshes() -> list[Reached]:
    stock_init = dist.init_device_mesh
    meshes = [
        stock_init("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        stock_init("cpu", (4, 1), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")),
    ]
    return [reached_ranks(mesh) for mesh in meshes]


def test_beside_stock_meshes(crew: Crew) -> None:
    shapes = [(2, 2), (2, 2), (4, 1), (1, 4)]
    for rank, reached in enumerate(crew.run(_between_stock_meshes, 4)):
        assert reached == [
            expected_ranks(np.arange(4).reshape(shape), ("dp", "tp"), rank, 4) for shape in shapes
        ]
