"""Functional collectives and DTensor take our meshes as their own."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh

_WEIGHT = torch.arange(48.0).reshape(8, 6)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _functional_collectives() -> dict[str, list[float]]:
    mesh = _mesh()
    flat = mesh.flatten("world")
    mine = torch.tensor([10.0 ** dist.get_rank()])
    return {
        "tp": funcol.all_reduce(mine, "sum", mesh["tp"]).tolist(),
        "dp, by index": funcol.all_reduce(mine, "sum", (mesh, 0)).tolist(),
        "by group": funcol.all_reduce(mine, "sum", mesh.get_group("tp")).tolist(),
        "world": funcol.all_reduce(mine, "sum", flat).tolist(),
        "gathered": funcol.all_gather_tensor(mine, 0, mesh["dp"]).tolist(),
        "scattered": funcol.reduce_scatter_tensor(mine.repeat(4), "sum", 0, flat).tolist(),
    }


def test_functional_collectives(crew: Crew) -> None:
    for rank, got in enumerate(crew.run(_functional_collectives, 4)):
        tp, dp = (11, 1100)[rank // 2], (101, 1010)[rank % 2]
        assert got == {
            "tp": [tp],
            "dp, by index": [dp],
            "by group": [tp],
            "world": [1111],
            "gathered": [[1, 100], [10, 1000]][rank % 2],
            "scattered": [1111],
        }


_PLACEMENTS = {
    "mesh": [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (Replicate(), Replicate()),
    ],
    "permuted": [(Shard(0), Shard(1)), (Replicate(), Shard(0))],
    "flattened": [(Shard(0),), (Shard(1),)],
    "joined": [(Shard(0), Shard(1))],
    "slice": [(Shard(1),)],
}


def _views() -> dict[str, DeviceMesh]:
    mesh = _mesh()
    split = mesh.unflatten("tp", (1, 2), ("cp", "ep"))
    # DTensor takes a coordinate for a group rank, so it needs the groups in the mesh's order.
    permuted = DeviceMesh(
        "cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"), preserve_rank_order=True
    )
    return {
        "mesh": mesh,
        "permuted": permuted,
        "flattened": mesh.flatten("world"),
        "joined": DeviceMesh.concatenate([split["dp"], split["ep"]]),
        "slice": mesh["tp"],
    }


def _full_tensors() -> dict[str, bool]:
    right = {}
    for name, view in _views().items():
        for placements in _PLACEMENTS[name]:
            tensor = distribute_tensor(_WEIGHT, view, placements)
            right[f"{name} {placements}"] = torch.equal(tensor.full_tensor(), _WEIGHT)
            moved = tensor.redistribute(view, [Replicate()] * view.ndim)
            right[f"{name} {placements} moved"] = torch.equal(moved.to_local(), _WEIGHT)
            partial = DTensor.from_local(_WEIGHT, view, [Partial()] * view.ndim)
            right[f"{name} {placements} sum"] = torch.equal(
                partial.full_tensor(), _WEIGHT * view.size()
            )
    return right


def test_full_tensors(crew: Crew) -> None:
    for right in crew.run(_full_tensors, 4):
        assert len(right) == 3 * sum(map(len, _PLACEMENTS.values()))
        assert [case for case, is_right in right.items() if not is_right] == []


def _local_shard() -> torch.Tensor:
    return distribute_tensor(_WEIGHT, _mesh(), (Shard(0), Shard(1))).to_local()


def test_local_shards(crew: Crew) -> None:
    for rank, shard in enumerate(crew.run(_local_shard, 4)):
        row, column = divmod(rank, 2)
        expected = _WEIGHT[4 * row : 4 * row + 4, 3 * column : 3 * column + 3]
        assert torch.equal(shard, expected)


def _matmul() -> tuple[bool, str]:
    mesh = _mesh()
    left = distribute_tensor(_WEIGHT, mesh, (Shard(0), Replicate()))
    right = distribute_tensor(_WEIGHT.T.contiguous(), mesh, (Replicate(), Shard(1)))
    product = left @ right
    is_right = torch.equal(product.full_tensor(), _WEIGHT @ _WEIGHT.T)
    return is_right, type(product.device_mesh).__module__


def test_operations_keep_our_mesh(crew: Crew) -> None:
    for is_right, module in crew.run(_matmul, 4):
        assert is_right
        assert module.startswith("meshverse")


def _saved_and_loaded() -> tuple[bool, bool]:
    tensor = distribute_tensor(_WEIGHT, _mesh(), (Shard(0), Shard(1)))
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)["weight"]
    return back.device_mesh is tensor.device_mesh, torch.equal(back.full_tensor(), _WEIGHT)


def test_saved_tensors_come_back_on_the_same_mesh(crew: Crew) -> None:
    assert crew.run(_saved_and_loaded, 4) == [(True, True)] * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mesh_of_members_does_not_stop_others(crew: Crew, world_size: int) -> None:
    for rank, total in enumerate(crew.run(_first_half_only, world_size)):
        assert total == (48 if rank < world_size // 2 else None)


def _first_half_only() -> float | None:
    ranks = list(range(dist.get_world_size() // 2))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) if dist.get_rank() in ranks else None
    if mesh is None:
        return None
    return distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]).sum().full_tensor().item()
