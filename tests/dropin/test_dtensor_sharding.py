"""DTensor on our meshes: shards, redistributions, operations, and ranks outside; as on stock's.

Every program runs in real processes with stock's meshes, with ours, and under `installed()`. What
it returns has to be right, and the same in all three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from helpers.crew import Crew
from helpers.sides import SIDES, mesh_class, side
from helpers.tiers import in_tiers

Answers = dict[str, Any]


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.arange(float(rows * columns)).reshape(rows, columns)


def _on_every_side(crew: Crew, program: Callable[..., Answers], *arguments: Any) -> list[Answers]:
    """The answers of each rank, after checking that they are the same whatever mesh is used."""
    answers = {name: crew.run(program, 4, name, *arguments) for name in SIDES}
    assert all(answers["stock"])  # it answered something
    for name in SIDES:
        assert answers[name] == answers["stock"], name
    return answers["ours"]


# --- shards and redistributions ------------------------------------------------------------------

_SHAPES = [(8, 4), (7, 5), (1, 3), (2, 9), (0, 4)]
_CHOICES: list[Placement] = [Shard(0), Shard(1), Replicate()]


def _shards(side_name: str, mesh_shape: tuple[int, ...]) -> Answers:
    answers: Answers = {}
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", mesh_shape)
        for shape in _SHAPES:
            whole = _matrix(*shape)
            for placements in itertools.product(_CHOICES, repeat=len(mesh_shape)):
                tensor = distribute_tensor(whole, mesh, placements)
                assert type(tensor.device_mesh) is mesh_class(side_name)
                assert torch.equal(tensor.full_tensor(), whole), (shape, placements)
                answers[f"{shape} {placements}"] = tensor.to_local().tolist()
    return answers


@pytest.mark.parametrize(
    "mesh_shape",
    [
        (4,),
        (2, 2),
        pytest.param((1, 4), marks=pytest.mark.long),
        pytest.param((2, 1, 2), marks=pytest.mark.long),
    ],
)
def test_even_and_uneven_shards(crew: Crew, mesh_shape: tuple[int, ...]) -> None:
    answers = _on_every_side(crew, _shards, mesh_shape)
    assert len(answers[0]) == len(_SHAPES) * 3 ** len(mesh_shape)


def _redistributions(side_name: str, shape: tuple[int, int], flattened: bool) -> Answers:
    answers: Answers = {}
    whole = _matrix(*shape)
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if flattened:
            mesh._flatten("world")  # DTensor looks here for a shorter way
        targets = list(itertools.product(_CHOICES, repeat=2))
        sources = [*targets, (Partial(), Partial()), (Partial(), Shard(1)), (Shard(0), Partial())]
        for source, target in itertools.product(sources, targets):
            copies = 2 ** sum(placement.is_partial() for placement in source)
            known = [Replicate() if placement.is_partial() else placement for placement in source]
            local = distribute_tensor(whole, mesh, known).to_local()
            tensor = DTensor.from_local(
                local, mesh, source, shape=whole.shape, stride=whole.stride()
            )
            with CommDebugMode() as counted:
                moved = tensor.redistribute(placements=target)
            assert torch.equal(moved.full_tensor(), copies * whole), (source, target)
            counts = {str(name): count for name, count in counted.get_comm_counts().items()}
            answers[f"{source} to {target}"] = (moved.to_local().tolist(), counts)
    return answers


# With a flattened mesh at hand, torch gathers rows that are unevenly sharded twice wrongly.
@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "flattened"),
    in_tiers([((8, 8), True), ((8, 8), False), ((5, 3), False)], [((5, 3), False)]),
)
def test_redistribution_from_all_to_all_placements(
    crew: Crew, shape: tuple[int, int], flattened: bool
) -> None:
    answers = _on_every_side(crew, _redistributions, shape, flattened)
    assert len(answers[0]) == 12 * 9


# --- strided shards: what FSDP on top of tensor parallelism gives --------------------------------


def _strided_shards(side_name: str, rows: int) -> Answers:
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(3)
        model = nn.Linear(4, rows, bias=False)
        whole = model.weight.detach().clone()
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        weight = model.weight
        assert "_StridedShard" in repr(weight.placements[0])
        assert torch.equal(weight.full_tensor(), whole)
        assert type(weight.device_mesh) is mesh_class(side_name)
        moved = weight.redistribute(placements=[Replicate(), Shard(0)])
        back = moved.redistribute(placements=weight.placements)
        assert torch.equal(back.to_local(), weight.to_local())
        return {
            "placements": str(weight.placements),
            "local": weight.to_local().tolist(),
            "moved": moved.to_local().tolist(),
            "norm": torch.linalg.vector_norm(weight).full_tensor().item(),
            "row sums": weight.sum(1).full_tensor().tolist(),
            "is it": torch.allclose(weight.sum(1).full_tensor(), whole.sum(1), atol=1e-5),
        }


@pytest.mark.parametrize("rows", in_tiers([8, 6], [6]))
def test_strided_shards(crew: Crew, rows: int) -> None:
    assert all(answers["is it"] for answers in _on_every_side(crew, _strided_shards, rows))


# --- operations ----------------------------------------------------------------------------------

_LEFT, _RIGHT = _matrix(8, 4) / 7, torch.cos(_matrix(4, 8))


def _assert_close(seen: Tensor, expected: Tensor) -> None:
    """Check that they differ by the order of their sums at most.

    Those are of up to 32 float32 terms, each up to 20 in size: off by 32 * 20 * eps = 8e-5.
    """
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-4)


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b.T,
    "matmul": lambda a, b: a @ b,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "mean": lambda a, b: a.mean(),
    "sum of an axis": lambda a, b: a.sum(0) + b.sum(1),
    "maximum": lambda a, b: torch.maximum(a, b.T).amax(1),
    "softmax": lambda a, b: (a @ b).softmax(-1),
    "layer norm": lambda a, b: F.layer_norm(a @ b, (8,)),
    "stack": lambda a, b: torch.stack([a, b.T]).sum(-1),
    "split": lambda a, b: a.split([1, 3], 1)[1] * 2,
    "view": lambda a, b: a.reshape(8, 2, 2).transpose(0, 2).contiguous(),
    "where": lambda a, b: torch.where(a > 1, a, b.T),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "gather": lambda a, b: F.embedding(torch.tensor([[0, 5], [3, 3]]), a),
}


def _concatenated(mesh: StockDeviceMesh) -> StockDeviceMesh:
    split = mesh._unflatten(1, (1, 2), ("cp", "ep"))
    return type(mesh)._concatenate([split["dp"], split["ep"]])


_VIEWS: dict[str, Callable[[StockDeviceMesh], StockDeviceMesh]] = {
    "whole": lambda mesh: mesh,
    "slice": lambda mesh: mesh["dp"],
    "flattened": lambda mesh: mesh._flatten("world"),
    "concatenated": _concatenated,
}


def _operations(side_name: str, view: str) -> Answers:
    answers: Answers = {}
    with side(side_name) as family, implicit_replication():
        mesh = _VIEWS[view](family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        placements = [Shard(0), Shard(1)][: mesh.ndim]
        a = distribute_tensor(_LEFT, mesh, placements)
        b = distribute_tensor(_RIGHT, mesh, list(reversed(placements)))
        for name, operation in _OPERATIONS.items():
            result = operation(a, b)
            assert type(result.device_mesh) is mesh_class(side_name)
            _assert_close(result.full_tensor(), operation(_LEFT, _RIGHT))
            answers[name] = str(result.placements), result.to_local().tolist()
    return answers


@pytest.mark.parametrize("view", in_tiers(_VIEWS, ["flattened"]))
def test_operations_over_meshes_and_submeshes(crew: Crew, view: str) -> None:
    assert len(_on_every_side(crew, _operations, view)[0]) == len(_OPERATIONS)


def _gradients(mesh: StockDeviceMesh) -> Answers:
    a = distribute_tensor(_LEFT, mesh, [Shard(0), Replicate()]).requires_grad_()
    b = distribute_tensor(_RIGHT, mesh, [Replicate(), Shard(1)]).requires_grad_()
    ((a @ b).sin() ** 2).sum().backward()
    left, right = (_LEFT.clone().requires_grad_(), _RIGHT.clone().requires_grad_())
    ((left @ right).sin() ** 2).sum().backward()
    _assert_close(a.grad.full_tensor(), left.grad)
    _assert_close(b.grad.full_tensor(), right.grad)
    return {"a": a.grad.full_tensor().tolist(), "b": b.grad.full_tensor().tolist()}


def _cross_entropy(mesh: StockDeviceMesh) -> Answers:
    logits, targets = torch.sin(_matrix(6, 8)), torch.tensor([0, 7, 3, 4, 1, 6])
    expected = logits.clone().requires_grad_()
    wanted = F.cross_entropy(expected, targets)
    wanted.backward()
    mine = distribute_tensor(logits, mesh["tp"], [Shard(1)]).requires_grad_()
    with loss_parallel(), CommDebugMode() as counted:
        loss = F.cross_entropy(mine, targets)
        loss.backward()
    _assert_close(loss.full_tensor(), wanted)
    _assert_close(mine.grad.full_tensor(), expected.grad)
    counts = {str(name): count for name, count in counted.get_comm_counts().items()}
    assert not any("all_gather" in name for name in counts)  # the point of it
    return {"placements": str(mine.grad.placements), "counts": counts}


def _own_functions(mesh: StockDeviceMesh) -> Answers:
    doubled = local_map(lambda x: 2 * x, out_placements=[Shard(0), Shard(1)], device_mesh=mesh)(
        distribute_tensor(_LEFT, mesh, [Shard(0), Shard(1)])
    )
    assert torch.equal(doubled.full_tensor(), 2 * _LEFT)
    module = distribute_module(nn.Linear(4, 2, bias=False), mesh)
    with mesh:  # the mesh of the block is the default
        unsaid = distribute_tensor(_LEFT, placements=[Shard(0), Replicate()])
    made = [
        torch.distributed.tensor.zeros(5, 3, device_mesh=mesh, placements=[Shard(0), Shard(1)]),
        torch.distributed.tensor.full((5,), 2.5, device_mesh=mesh["tp"], placements=[Shard(0)]),
        torch.distributed.tensor.ones(3, device_mesh=mesh),
    ]
    return {
        "local_map": doubled.to_local().tolist(),
        "module": type(module.weight.device_mesh) is type(mesh),
        "of the block": unsaid.device_mesh is mesh,
        "made": [
            (str(t.placements), t.to_local().tolist(), t.full_tensor().tolist()) for t in made
        ],
    }


_PROGRAMS = {"gradients": _gradients, "loss": _cross_entropy, "own functions": _own_functions}


def _on_a_mesh(side_name: str, program: str) -> Answers:
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return _PROGRAMS[program](mesh)


@pytest.mark.parametrize("program", in_tiers(_PROGRAMS, list(_PROGRAMS)[:1]))
def test_gradients_losses_and_own_functions(crew: Crew, program: str) -> None:
    _on_every_side(crew, _on_a_mesh, program)


# --- ranks outside the mesh ----------------------------------------------------------------------

_PARTS = {
    "two of four": [1, 3],
    "three, uneven": [0, 1, 2],
    "one": [2],
    "in other order": [3, 0],
    "two axes": [[2], [1]],
}


def _outside(side_name: str) -> Answers:
    answers: Answers = {}
    with side(side_name) as family:
        for name, ranks in _PARTS.items():
            mesh = family.DeviceMesh("cpu", ranks)
            placements = [Shard(0), Replicate()][: mesh.ndim]
            local = torch.full((2, 3), float(dist.get_rank()))
            tensor = DTensor.from_local(local, mesh, placements, run_check=False)
            doubled = tensor * 2 + tensor
            answers[name] = {
                "shape": tuple(tensor.shape),
                "local": tensor.to_local().tolist(),
                "doubled": doubled.to_local().tolist(),
                "whole": doubled.full_tensor().tolist(),
                "sum": tensor.sum().full_tensor().tolist(),
                "coordinate": mesh.get_coordinate(),
                "scattered": distribute_tensor(_matrix(5, 2), mesh, placements).to_local().tolist(),
                "outside": mesh._is_current_rank_part_of_mesh(),
            }
    return answers


def test_ranks_outside_the_mesh(crew: Crew) -> None:
    for rank, answers in enumerate(_on_every_side(crew, _outside)):
        assert answers["two of four"]["outside"] == (rank in (1, 3))
        if rank in (1, 3):
            assert answers["two of four"]["whole"] == [[3.0] * 3] * 2 + [[9.0] * 3] * 2
            assert answers["two of four"]["sum"] == 24
